"""Mistakes at jobs.train_two_tower: its own options, its data, and where they come from."""

from __future__ import annotations

from typing import Any

from tests.mistakes.case import Mistake, mistakes
from tests.mistakes.spoil import (
    DROP,
    Spoiler,
    both,
    column,
    column_by,
    content,
    copied,
    cut,
    edited,
    folder,
    table_by,
)

NAN = float("nan")
SCHEMA = "films/schema.json"
PARQUET = "train/part-00000.parquet"

VALUES = [
    ("--query ''", "--query|names"),
    ("--query user,,age", "--query|names"),
    ("--query nothing", "'nothing'|query"),
    ("--query genres,user", "genres"),
    ("--query user,user", "--query|twice"),
    ("--query user,item", "item"),
    ("--candidate ''", "--candidate|names"),
    ("--candidate nothing", "'nothing'|candidate"),
    ("--candidate genres", "genres|one integer id"),
    ("--candidate user", "user"),
    ("--layers ''", "--layers|whole numbers"),
    ("--layers 0", "--layers|whole numbers"),
    ("--layers x", "--layers|whole numbers"),
    ("--temperature 0", "--temperature|above 0"),
    ("--temperature=-1", "--temperature|above 0"),
    ("--temperature nan", "--temperature|above 0"),
    ("--temperature inf", "--temperature|above 0"),
    ("--temperature x", "--temperature|a number"),
    ("--ks ''", "--ks|whole numbers"),
    ("--ks 0", "--ks|whole numbers"),
    ("--ks 5,x", "--ks|whole numbers"),
    ("--ks 5,5", "--ks|twice"),
    ("--ks 1000000", "ks has 1000000|60"),
    ("--dim 16", "--dim|--source"),
    ("--dim 0", "--dim|at least"),
    ("--global-batch 1", "global_batch_size=1|at least 2"),
    ("--global-batch 0", "--global-batch|at least"),
    ("--global-batch 100000", "rows, which make no batch of 100000"),
    ("--steps 0", "--steps|at least 1"),
    ("--epochs 3", "--steps|--epochs"),
    ("--sparse-lr nan", "--sparse-lr"),
    ("--ranks 2", "--ranks|--local"),
    ("--keep 2", "--keep|--checkpoint-dir"),
    ("--resume {data}/nothing", "nothing"),
    ("--resume {data}/runs/clicks/step-00000004 --steps 8", "t_user|t_cat_0"),
    ("--checkpoint-dir {data}/runs/towers", "already holds checkpoints"),
    ("--source {data}/ml", "--source|--train"),
    ("--train {data}/nothing", "nothing"),
    ("--train {data}/clicks/train", "'user' is missing"),
    ("--train ''", "--train"),
    ("--eval {data}/nothing", "nothing"),
    ("--eval {data}/plan.json", "plan.json"),
    ("--schema {data}/nothing.json", "nothing.json"),
    ("--schema {data}/clicks/schema.json", "'user'|query"),
    ("--work-dir ''", "--work-dir"),
    ("--work-dir {data}/plan.json", "--work-dir"),
    ("--work-dir /proc/nothing", "--work-dir"),
    ("--result {data}", "--result|folder"),
    ("--plan nothing", "plan 'nothing'"),
    ("--gpu", "GPU"),
    ("--profile-steps 3", "--profile-steps|without --profile"),
]

BARE = [
    ("--local", "--source"),
    ("--train {data}/films/train --local", "--eval"),
    ("--train {data}/films/train --eval {data}/films/eval --local", "--schema"),
    ("--source {data}/ml --eval {data}/films/eval --local", "--eval|--source"),
    ("--source {data}/ml --schema {data}/films/schema.json --local", "--schema|--source"),
    ("--source '' --local", "--source"),
    ("--source {data}/nothing --local", "nothing"),
    ("--source {data}/clicks --local", "neither u.data nor ml-100k.inter"),
    ("--source {data}/plan.json --local", "neither u.data nor ml-100k.inter"),
    ("--source {data}/ml --dim 0 --local", "--dim|at least 1"),
    ("--source {data}/ml --query nothing --local", "'nothing'"),
]


def _seen(own: Any, data: Any) -> None:
    """Hold out nothing but rows that are trained on."""
    import pyarrow.parquet as pq

    (own / "eval").mkdir()
    pq.write_table(pq.read_table(data / "films" / "train"), own / "eval" / "part-00000.parquet")


def _of(name: str, value: Any, kind: str = "", part: str = "train") -> Spoiler:
    return column(name, value, kind, source=f"films/{part}", target=part)


def _all_zero(values: list[Any]) -> list[int]:
    return [0] * len(values)


DATA = [
    ("", "none with label=1", column_by("label", _all_zero, "", "zeros", "films/train")),
    ("", "item|one integer id", _of("item", None)),
    ("", "item|-3", _of("item", -3)),
    ("", "item|60", _of("item", 6000)),
    ("", "user|40", _of("user", 4000)),
    ("", "genres|4000", _of("genres", [4000])),
    ("", "label|2", _of("label", 2)),
    ("", "label|nan", _of("label", NAN, "float")),
    ("", "label|null", _of("label", None)),
    ("", "'item'", table_by(lambda t: t.drop_columns(["item"]), "no item", "films/train")),
    ("", "rows", table_by(lambda t: t.slice(0, 0), "no rows", "films/train")),
    ("", "train", folder("train")),
    ("", "part-00000.parquet", content(PARQUET, "words")),
    ("", "part-00000.parquet", cut("films/train/part-00000.parquet", PARQUET, 0.8)),
]

HELD_OUT = [
    ("", "new to its user", Spoiler("[nothing is new]", _seen)),
    ("", "label|2", _of("label", 2, part="eval")),
    ("", "label|nan", _of("label", NAN, "float", part="eval")),
    ("", "label|null", _of("label", None, part="eval")),
    ("", "item|6000", _of("item", 6000, part="eval")),
    ("", "item|one integer id", _of("item", None, part="eval")),
    ("", "'item'", table_by(lambda t: t.drop_columns(["item"]), "no item", "films/eval", "eval")),
    ("", "eval", folder("eval")),
]

SOURCES = [
    (
        "",
        "ml-100k.user",
        both(
            copied("ml", "ml"),
            Spoiler("[no users]", lambda own, data: (own / "ml/ml-100k.user").unlink()),
        ),
    ),
    (
        "",
        "ml-100k.item",
        both(copied("ml", "ml"), content("ml/ml-100k.item", b"\xff\xfe\x00", "binary items")),
    ),
]

LEFT_OUT = [("", "no field 'tables'", edited(SCHEMA, "schema.json", "tables", DROP))]


MISTAKES: list[Mistake] = [
    *mistakes("train_two_tower", "towers", VALUES),
    *mistakes("train_two_tower", "", BARE),
    *mistakes("train_two_tower", "towers, own data", DATA),
    *mistakes("train_two_tower", "towers, own evaluation", HELD_OUT),
    *mistakes("train_two_tower", "towers, own source", SOURCES),
    *mistakes("train_two_tower", "towers, own schema", LEFT_OUT),
    *mistakes("train_two_tower", "towers from source", [("", "large")], code=1, file_bytes=3000),
]
