"""Sound files and sound command lines: each of these lines ends with code 0, so that what a mistake
adds to one is the reason for its refusal.

The files are made once: small click data with planted truth, two runs with checkpoints, a small
MovieLens in its header form, a small Criteo log, a plan, a topology. Costs about 20 s.
"""

from __future__ import annotations

import contextlib
import io
import random
import shlex
from pathlib import Path

SMALL = "--set run.steps=4 --set run.global_batch_size=256"
LAYERS = "--set model.dense_layers=[16] --set model.over_layers=[16]"
TOWERS = (
    "--set model.model=two_tower --set \"model.query=['user','age']\" "
    "--set \"model.candidate=['item','genres']\" --set model.layers=[16] --set model.ks=[5]"
)


def rows(train: str, held_out: str, schema: str) -> str:
    """Options that say where rows lie."""
    return f"--set data.train={train} --set data.eval={held_out} --set data.schema={schema}"


def clicks(
    train: str = "{data}/clicks",
    held_out: str = "{data}/clicks/eval",
    schema: str = "{data}/clicks",
) -> str:
    """A run of a small click model on one rank in this process; arguments name other folders."""
    where = rows(f"{train}/train", held_out, f"{schema}/schema.json")
    return f"train {where} {LAYERS} {SMALL} --local"


def towers(
    train: str = "{data}/films", held_out: str = "{data}/films/eval", schema: str = "{data}/films"
) -> str:
    """A run of small towers, likewise."""
    where = rows(f"{train}/train", held_out, f"{schema}/schema.json")
    return f"train {where} {TOWERS} {SMALL} --local"


COMMANDS = {
    "train_dlrm": "jobs.train_dlrm",
    "smoke": "jobs.smoke",
    "convert_criteo": "jobs.convert_criteo",
    "convert_movielens": "jobs.convert_movielens",
    "rayrec plan": "rayrec.cli.main",
    "rayrec calibrate": "rayrec.cli.main",
    "rayrec make-data": "rayrec.cli.main",
    "rayrec train": "rayrec.cli.main",
    "rayrec evaluate": "rayrec.cli.main",
    "rayrec predict": "rayrec.cli.main",
    "rayrec export": "rayrec.cli.main",
    "rayrec forget": "rayrec.cli.main",
    "rayrec chaos": "rayrec.cli.main",
    "rayrec serve": "rayrec.cli.main",
    "rayrec": "rayrec.cli.main",
}

LINES = {
    "clicks": clicks(),
    "clicks on ranks": clicks().removesuffix(" --local"),
    "own data": clicks(train="{own}"),
    "own evaluation": clicks(held_out="{own}/train"),
    "own schema": clicks(schema="{own}"),
    "planted": "--set data.planted.rows_train=2000 --set data.planted.rows_eval=500 "
    f"{LAYERS} {SMALL} --local",
    "towers": towers(),
    "towers, own data": towers(train="{own}"),
    "towers, own evaluation": towers(held_out="{own}/eval"),
    "towers, own schema": towers(schema="{own}"),
    "score own": "evaluate {own}/step --data {data}/clicks/eval --local",
    "smoke": "--ranks 1",
    "criteo": "{data}/criteo.tsv {own}/out --num-buckets 100",
    "own criteo": "{own}/criteo.tsv {own}/out --num-buckets 100",
    "films": "{data}/ml {own}/out",
    "own films": "{own}/ml {own}/out",
    "plan": "plan --schema {data}/clicks/schema.json --topology cpu --ranks 2",
    "plan, own schema": "plan --schema {own}/schema.json --topology cpu --ranks 2",
    "plan, own topology": "plan --schema {data}/clicks/schema.json --topology {own}/topology.json",
    "calibrate": "calibrate --ranks 1 --out {own}/topology.json",
    "export": "export {data}/runs/clicks/step-00000004 {own}/served --data {data}/clicks",
    "make-data": "make-data {own}/made --rows 1000 --eval-rows 500",
    "train": "train --data {data}/clicks --set scaling.num_workers=0 --set run.steps=4 "
    "--set run.global_batch_size=256",
    "run file": "train {own}/run.toml --data {data}/clicks --set scaling.num_workers=0",
    "scores": "evaluate {data}/runs/clicks/step-00000004 --data {data}/clicks --local",
    "predictions": "predict {data}/runs/clicks/step-00000004 --data {data}/clicks --local "
    "--out {own}/scores.parquet",
    "folder": "predict {data}/runs/clicks/step-00000004 --data {data}/clicks --local "
    "--out {own}/scores",
    "artifact": "predict {data}/served --data {data}/clicks --workers 1 --out {own}/scores",
}

SEEDS = {"ratings": 11, "logs": 12}


def make_sound(data: Path) -> None:
    """Write all sound files below a folder."""
    from tests.clicks import LEARNABLE, write_clicks  # imports torch: only where files are written

    write_clicks(data / "clicks", rows_train=3000, rows_eval=1000, **LEARNABLE)
    write_films(data / "ml")
    write_criteo(data / "criteo.tsv", rows=300)
    _run("convert_movielens", f"{data}/ml {data}/films --dim 8")
    saves = "--set run.checkpoint.every_n_steps=2"
    _run("rayrec", f"{LINES['clicks']} --checkpoint-dir {data}/runs/clicks {saves}", data)
    _run("rayrec", f"export {data}/runs/clicks/step-00000004 {data}/served --data {data}/clicks")
    _run("rayrec", f"{LINES['towers']} --checkpoint-dir {data}/runs/towers", data)
    _write_plan(data)


def write_films(folder: Path) -> None:
    """Write a small MovieLens: 40 users, 60 items, 1,500 ratings."""
    draw = random.Random(SEEDS["ratings"])
    folder.mkdir(parents=True)
    users = [f"{u}\t{18 + u}\t{'MF'[u % 2]}\tjob{u % 5}\t9{u:04}" for u in range(1, 41)]
    items = [f"{i}\tfilm {i}\t{1980 + i % 20}\tgenre{i % 4} genre{4 + i % 3}" for i in range(1, 61)]
    pairs = draw.sample([(user, item) for user in range(1, 41) for item in range(1, 61)], 1500)
    ratings = [f"{user}\t{item}\t{draw.randint(1, 5)}\t{8 * 10**8 + user}" for user, item in pairs]
    heads = {
        "user": "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token",
        "item": "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq",
        "inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float",
    }
    for (name, head), lines in zip(heads.items(), (users, items, ratings), strict=True):
        (folder / f"ml-100k.{name}").write_text("\n".join([head, *lines]) + "\n")


def criteo_row(draw: random.Random) -> list[str]:
    """Return the fields of one row of a Criteo log."""
    counts = [str(draw.randint(0, 90)) for _ in range(13)]
    categories = [f"{draw.getrandbits(32):08x}" for _ in range(26)]
    return [str(draw.randint(0, 1)), *counts, *categories]


def write_criteo(path: Path, rows: int) -> None:
    """Write a small Criteo log, tab separated and without a header."""
    draw = random.Random(SEEDS["logs"])
    path.write_text("".join("\t".join(criteo_row(draw)) + "\n" for _ in range(rows)))


def _write_plan(data: Path) -> None:
    """Write plans of the click tables for one rank and for two, and the topology of one rank."""
    from rayrec.data import FeatureSchema
    from rayrec.layout import Topology
    from rayrec.planner import EmbeddingShardingPlanner

    tables = FeatureSchema.load(data / "clicks" / "schema.json").embedding_bag_configs()
    for name, ranks in (("plan2.json", 2), ("plan.json", 1)):
        topology = Topology.local(ranks, memory_bytes=10**9)
        EmbeddingShardingPlanner(topology, batch_size=256).plan(tables).save(data / name)
    (data / "topology.json").write_text(topology.to_json() + "\n")


def _run(command: str, line: str, data: Path | None = None) -> None:
    """Run a job in this process."""
    from importlib import import_module

    words = shlex.split(line.replace("{data}", str(data)))
    with contextlib.redirect_stdout(io.StringIO()):
        code = import_module(COMMANDS[command]).main(words)
    assert code == 0, f"{command} {line} ended with {code}"
