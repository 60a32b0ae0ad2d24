"""Mistakes in a run of two towers: its model, its data, and where they lie."""

from __future__ import annotations

from typing import Any

from tests.mistakes.case import Mistake, mistakes
from tests.mistakes.spoil import DROP, Spoiler, column, content, cut, edited, folder, table_by

SCHEMA = "films/schema.json"
PARQUET = "train/part-00000.parquet"

VALUES = [
    ("--set model.query=[]", "query=()|at least one"),
    ("--set model.query=user", "query is 'user'|list"),
    ("--set \"model.query=['genres','user']\"", "genres"),
    ("--set \"model.query=['user','item']\"", "item"),
    ("--set \"model.candidate=['genres']\"", "genres|one id in each row"),
    ("--set \"model.candidate=['user']\"", "user"),
    ("--set model.layers=[0]", "layers has the number|0"),
    ("--set model.temperature=0", "temperature=0"),
    ("--set model.temperature=nan", "temperature=nan"),
    ("--set model.ks=[0]", "ks has the number|0"),
    ("--set run.global_batch_size=100000", "rows, which make no batch of 100000"),
    ("--set run.resume_from={data}/runs/clicks/step-00000004", "t_user|t_cat_0"),
    ("--checkpoint-dir {data}/runs/towers", "already holds checkpoints"),
    ("--set data.train={data}/nothing", "nothing"),
    ("--set data.train={data}/clicks/train", "'user' is missing"),
    ("--set data.eval={data}/nothing", "nothing"),
    ("--set data.eval={data}/plan.json", "plan.json"),
    ("--set data.schema={data}/nothing.json", "nothing.json"),
    ("--set data.schema={data}/clicks/schema.json", "'user'|query"),
    ("--set data.windows.column=user", "[data.windows] is for click models"),
    ("--set data.planted={}", "planted|leave one of both out"),
    ("--set data.work_dir=/proc/nothing", "work_dir"),
    ("--plan nothing", "plan 'nothing'"),
    ("--set scaling.use_gpu=true", "GPU"),
]


def _seen(own: Any, data: Any) -> None:
    """Hold out nothing but rows that are trained on."""
    import pyarrow.parquet as pq

    (own / "eval").mkdir()
    pq.write_table(pq.read_table(data / "films" / "train"), own / "eval" / "part-00000.parquet")


def _of(name: str, value: Any, kind: str = "", part: str = "train") -> Spoiler:
    return column(name, value, kind, source=f"films/{part}", target=part)


DATA = [
    ("", "item|one id in each row", _of("item", None)),
    ("", "item|-3", _of("item", -3)),
    ("", "item|60", _of("item", 6000)),
    ("", "user|40", _of("user", 4000)),
    ("", "genres|4000", _of("genres", [4000])),
    ("", "'item'", table_by(lambda t: t.drop_columns(["item"]), "no item", "films/train")),
    ("", "rows", table_by(lambda t: t.slice(0, 0), "no rows", "films/train")),
    ("", "train", folder("train")),
    ("", "part-00000.parquet", content(PARQUET, "words")),
    ("", "part-00000.parquet", cut("films/train/part-00000.parquet", PARQUET, 0.8)),
]

HELD_OUT = [
    ("", "new to its user", Spoiler("[nothing is new]", _seen)),
    ("", "item|6000", _of("item", 6000, part="eval")),
    ("", "item|one id in each row", _of("item", None, part="eval")),
    ("", "'item'", table_by(lambda t: t.drop_columns(["item"]), "no item", "films/eval", "eval")),
    ("", "eval", folder("eval")),
]

LEFT_OUT = [("", "no field 'tables'", edited(SCHEMA, "schema.json", "tables", DROP))]


MISTAKES: list[Mistake] = [
    *mistakes("rayrec train", "towers", VALUES),
    *mistakes("rayrec train", "towers, own data", DATA),
    *mistakes("rayrec train", "towers, own evaluation", HELD_OUT),
    *mistakes("rayrec train", "towers, own schema", LEFT_OUT),
    *mistakes("rayrec train", "towers", [("", "large")], code=1, file_bytes=3000),
]
