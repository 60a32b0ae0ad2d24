"""A run to forget in: clicks of a dynamic table of users, numbered items and hashed words, with
whole checkpoints and increments, a chain of a base and deltas, and two artifacts.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.optim import Adagrad
from rayrec.serve import export
from rayrec.train import CheckpointConfig, PublishConfig, RankTrainer, TrainSpec
from tests.gloo.trainers import spec_of

ROWS, STEPS, EVERY = 1600, 12, 2
WIDTH = 8
TABLES = [
    {
        "name": "t_user",
        "num_embeddings": 64,
        "features": ["user"],
        "dynamic": {"blocks": 4, "admission_threshold": 2},
    },
    {"name": "t_item", "num_embeddings": 90, "features": ["item"]},
    {"name": "t_word", "num_embeddings": 50, "features": ["word"]},
]


def write_data(folder: Path) -> Path:
    """Write the rows of the run, whose users are numbers of 64 bits, and their schema."""
    rng = np.random.default_rng(0)
    users = rng.integers(-(2**63), 2**63 - 1, 300)
    at = (np.arange(ROWS) // 10 + rng.zipf(1.5, ROWS)) % 300
    rows = pa.table(
        {
            "label": (users[at] % 3 == 0).astype(np.int8),
            "d": rng.random(ROWS),
            "user_id": users[at],
            "item": rng.integers(0, 90, ROWS),
            "word": [f"word {k}" for k in rng.integers(0, 200, ROWS)],
        }
    )
    (folder / "train").mkdir(parents=True)
    pq.write_table(rows, folder / "train" / "part.parquet")
    schema = {
        "label": "label",
        "dense": ["d"],
        "features": [
            {"name": "user", "column": "user_id"},
            {"name": "item", "column": "item"},
            {"name": "word", "column": "word", "hash_buckets": 50},
        ],
        "tables": [{"embedding_dim": WIDTH, **table} for table in TABLES],
    }
    (folder / "schema.json").write_text(json.dumps(schema))
    return folder


def spec(data: Path, run: Path) -> TrainSpec:
    """The run: its second and third checkpoints add to the first, and so on."""
    whole = spec_of(data, 1)
    return replace(
        whole,
        steps=STEPS,
        shuffle=False,
        sparse_optimizer=Adagrad(lr=0.1),
        run_path=str(run),
        extras=whole.model.to_extras(),
        checkpoint=CheckpointConfig(every_n_steps=EVERY, incremental=True, full_every=3),
        publish=PublishConfig(every_n_steps=EVERY, dtype="fp32"),
    )


def train(trained: TrainSpec) -> None:
    """Train as one rank, in this process."""
    with RankTrainer(trained) as trainer:
        trainer.begin()
        trainer.run()


def make_run(folder: Path) -> Path:
    """Train, and export two artifacts into the run's folder."""
    data, run = write_data(folder / "data"), folder / "run"
    train(spec(data, run))
    for step, types in ((6, "int8"), (STEPS, "fp32")):
        export(run / f"step-{step:08d}", run / "served" / types, types=types)
    return run
