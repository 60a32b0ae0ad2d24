"""Mistakes in checkpoints: none, damaged, of something else; and jobs that share a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.mistakes.case import Spoil, mistakes
from tests.mistakes.spoil import Spoiler, both, checkpoint, content, copied, folder

EVERY = "--set run.publish.every_n_steps=2"
OWN = "--set run.publish.path={own}/p"
STEP = "{data}/runs/clicks/step-00000004"
AGAIN = f"--set run.resume_from={STEP} --set run.steps=8"
STATE = f"--set run.init_from={STEP} --set run.init_optimizer_state=true"
THREE = "--set run.failure.max_failures=3"
TOWERS = "{data}/runs/towers/step-00000004"


def _remove(name: str) -> Any:
    def change(step: Path) -> None:
        target = step / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    return change


def _write(name: str, value: bytes) -> Any:
    return lambda step: (step / name).write_bytes(value)


def _flip(name: str) -> Any:
    """Change one byte in the middle of a file, or of the first shard."""

    def change(step: Path) -> None:
        path = sorted(step.glob(name))[0]
        whole = bytearray(path.read_bytes())
        whole[len(whole) // 2] ^= 0xFF
        path.write_bytes(whole)

    return change


def _shorten(name: str) -> Any:
    def change(step: Path) -> None:
        path = sorted(step.glob(name))[0]
        path.write_bytes(path.read_bytes()[:-20])

    return change


def _first_table(step: Path) -> None:
    shutil.rmtree(sorted((step / "tables").iterdir())[0])


def _version(step: Path) -> None:
    raw = json.loads((step / "manifest.json").read_text())
    (step / "manifest.json").write_text(json.dumps({**raw, "version": 99}))


SHARD = "tables/*/*.arrow"

DAMAGE: list[tuple[str, Spoil]] = [
    ("manifest", checkpoint(_remove("manifest.json"), "no manifest")),
    ("manifest", checkpoint(_write("manifest.json", b""), "empty manifest")),
    ("manifest", checkpoint(_write("manifest.json", b"{}"), "manifest {}")),
    ("manifest", checkpoint(_write("manifest.json", b"[1]"), "manifest [1]")),
    ("manifest", checkpoint(_write("manifest.json", b"\xff\x00\xfe"), "binary manifest")),
    ("manifest", checkpoint(_write("manifest.json", b"[" * 100_000), "nested manifest")),
    ("manifest", checkpoint(_flip("manifest.json"), "one byte of the manifest")),
    ("manifest", checkpoint(_shorten("manifest.json"), "a short manifest")),
    ("version 99", checkpoint(_version, "another version")),
    ("dense.pt", checkpoint(_remove("dense.pt"), "no dense.pt")),
    ("dense.pt", checkpoint(_write("dense.pt", b""), "empty dense.pt")),
    ("dense.pt", checkpoint(_flip("dense.pt"), "one byte of dense.pt")),
    ("t_cat_0", checkpoint(_first_table, "no files of a table")),
    ("tables", checkpoint(_remove("tables"), "no tables")),
    ("arrow", checkpoint(_flip(SHARD), "one byte of a table")),
    ("arrow", checkpoint(_shorten(SHARD), "a short table")),
]


def _running(own: Path, data: Path) -> None:
    """Write the lock of a driver that lives: this process."""
    from dataclasses import asdict

    from rayrec.driver.run_folder import LOCK, Owner

    (own / "run").mkdir()
    (own / "run" / LOCK).write_text(json.dumps(asdict(Owner.here("another"))))


RESUME = [
    ("--set run.resume_from=''", "resume_from"),
    ("--set run.resume_from={data}/nothing", "nothing"),
    ("--set run.resume_from={data}/clicks", "manifest"),
    ("--set run.resume_from={data}/plan.json", "plan.json"),
    ("--set run.resume_from={own}/empty", "manifest", folder("empty")),
    ("--set run.resume_from=nofs://bucket/step", "nofs"),
    ("--set run.resume_from=latest --checkpoint-dir {own}/run", "no complete checkpoint"),
    ("--set run.resume_from=auto --checkpoint-dir {data}/runs/towers", "t_cat_0"),
    (f"{THREE} --local", "max_failures=3"),
    ("--local --set run.heartbeat_timeout_s=5", "run.heartbeat_timeout_s=5"),
    ("--set run.name=clicks", "name would have no effect|run.storage_path"),
    (f"--set run.resume_from={TOWERS}", "t_user|t_cat_0"),
    (f"{AGAIN} --set run.sparse_optimizer.name=adam", "rowwise_adagrad"),
    (f"{AGAIN} --set run.dense_optimizer.name=sgd", "'adam'"),
    (f"{AGAIN} --set run.seed=5", "seed=0"),
    (f"{AGAIN} --set run.global_batch_size=128", "global_batch_size=256"),
    (f"{AGAIN} --set model.dense_layers=[32]", "dense"),
    (f"{AGAIN} --set model.model=dcn", "model"),
    (f"{AGAIN} --set data.train={{data}}/clicks/eval", "other data"),
    (f"--set run.init_from={TOWERS}", "t_user|t_cat_0"),
    (f"--set run.init_from={STEP} --set model.over_layers=[32]", "over_arch"),
    (f"{STATE} --set run.sparse_optimizer.name=sgd", "rowwise_adagrad"),
    (f"{STATE} --set run.dense_optimizer.name=sgd", "'adam'"),
    ("--set run.init_from=''", "init_from"),
    ("--set run.init_from=latest", "latest"),
    ("--checkpoint-dir {data}/runs/clicks", "already holds checkpoints"),
    ("--checkpoint-dir {data}/runs/towers", "already holds checkpoints"),
    (
        f"--checkpoint-dir {{data}}/runs/towers --set run.resume_from={STEP}",
        "already holds checkpoints",
    ),
    (
        f"--checkpoint-dir {{data}}/runs/towers --set run.init_from={STEP}",
        "already holds checkpoints",
    ),
    ("--set run.resume_from=latest --checkpoint-dir {data}/runs/towers", "t_cat_0"),
    (
        "--checkpoint-dir {own}/run",
        "in use by process",
        Spoiler("[a driver holds the folder]", _running),
    ),
]

SCORE = [
    ("--data ''", "--data"),
    ("--data {data}/nothing", "nothing"),
    ("--data {data}/films/eval", "is missing"),
    ("--data {data}/ml", "none of them Parquet"),
    ("--global-batch-size=-1", "--global-batch-size|x>=1"),
    ("--result ''", "--result"),
    ("--result {data}", "--result|folder"),
    ("--timeout 0", "--timeout"),
    ("--plan nothing", "plan 'nothing'"),
    ("--plan {data}/plan2.json", "plan is for 2 ranks|1"),
    ("--ranks 0", "--ranks|x>=1"),
    ("--pin-cores", "pin_cores|num_workers=0"),
    ("--gpu", "GPU"),
    ("--steps 5", "No such option '--steps'"),
]

# of the checkpoint, in place of the sound one
CHECKPOINTS = [
    ("''", "CHECKPOINT"),
    ("{data}/nothing", "nothing"),
    ("{data}/clicks", "manifest"),
    ("{data}/runs/clicks", "is the folder of a run"),
    ("{data}/plan.json", "plan.json"),
    ("nofs://bucket/step", "nofs"),
    (TOWERS, "rayrec train"),
    ("latest", "latest"),
]

FILE = [
    ("--out ''", "--out"),
    ("--out {data}/plan.json/p.parquet", "--out"),
    ("--out /proc/nothing/p.parquet", "--out"),
    ("--out nofs://bucket/p.parquet", "nofs"),
    ("--keys label", "label"),
    ("--keys ''", "--keys"),
    ("--out {own}/same.parquet --result {own}/same.parquet", "--out|--result"),
]

OWN_ROWS = [
    (
        "--data {own}/train --out {own}/train/part-00000.parquet",
        "lies in the folder of --data|part-00000.parquet",
        copied("clicks/train", "train"),
    ),
    (
        "--data {own}/train --out {own}/train/scores.parquet",
        "lies in the folder of --data",
        copied("clicks/train", "train"),
    ),
]

OWN_EVALUATION = [
    (
        "--data {own}/eval",
        "truth.json",
        both(copied("clicks/eval", "eval"), content("truth.json", "{")),
    ),
    (
        "--data {own}/eval",
        "truth.json",
        both(copied("clicks/eval", "eval"), content("truth.json", "[]")),
    ),
    (
        "--data {own}/eval",
        "truth.json|bayes_auc",
        both(
            copied("clicks/eval", "eval"),
            content(
                "truth.json",
                '{"rows": 1000, "base_rate": 0.25, "bayes_auc": "high", "bayes_logloss": 0.4, '
                '"bayes_ne": 0.7, "shuffled_labels": false}',
            ),
        ),
    ),
]

REQUIRED = [
    ("evaluate --data {data}/clicks/eval", "Missing argument|CHECKPOINT"),
    (f"evaluate {STEP}", "Missing option|--data"),
]

FULL_DISK = [("", "predictions|large"), ("--result {own}/r.json", "--result|large")]

PUBLISH = [
    ("--set run.publish.every_n_steps=0", "every_n_steps=0|at least 1"),
    (f"{EVERY} --set run.publish.every_s=3", "give exactly one of them"),
    (EVERY, "storage_path=None|run.publish.path"),
    (f"{EVERY} --set run.publish.dtype=int3", "'int3'|int8"),
    (f"{EVERY} --set run.publish.path=s3://b/p", "s3://b/p|local"),
    (f"{EVERY} {OWN} --set run.publish.num_to_keep=1", "num_to_keep=1 without full_every"),
    (
        f"{EVERY} {OWN} --set run.publish.tables.nothing=fp16",
        "table 'nothing', which the model does not have",
    ),
]

MISTAKES = [
    *mistakes("rayrec train", "clicks", RESUME),
    *mistakes("rayrec train", "clicks", PUBLISH),
    *mistakes(
        "rayrec train",
        "clicks",
        [
            ("--set run.resume_from={own}/step --set run.steps=8", says, spoil)
            for says, spoil in DAMAGE
        ],
    ),
    *mistakes(
        "rayrec train",
        "clicks",
        [("--set run.init_from={own}/step", says, spoil) for says, spoil in DAMAGE[::4]],
    ),
    *mistakes("rayrec evaluate", "score own", [("", says, spoil) for says, spoil in DAMAGE]),
    *mistakes("rayrec evaluate", "scores", SCORE),
    *mistakes(
        "rayrec evaluate",
        "",
        [
            (f"evaluate {path} --data {{data}}/clicks/eval --local", says)
            for path, says in CHECKPOINTS
        ],
    ),
    *mistakes("rayrec predict", "predictions", FILE),
    *mistakes("rayrec predict", "predictions", OWN_ROWS),
    *mistakes("rayrec evaluate", "scores", OWN_EVALUATION),
    *mistakes("rayrec evaluate", "", REQUIRED),
    *mistakes("rayrec predict", "predictions", FULL_DISK[:1], code=1, file_bytes=1000),
    *mistakes("rayrec evaluate", "scores", FULL_DISK[1:], code=1, file_bytes=400),
    *mistakes("rayrec train", "clicks", [("--set data.eval={own}/eval", *OWN_EVALUATION[0][1:])]),
]
