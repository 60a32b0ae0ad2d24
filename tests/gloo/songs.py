"""Histories of songs with a planted chain, a run on them, and its tasks for a pool of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.data import NextItemDataset
from rayrec.driver.planning import find_tables
from rayrec.layout import Topology
from rayrec.next_item_recipe import NextItemModel, NextItemRecipe
from rayrec.planner import manual_plan
from rayrec.runs.inputs import open_data
from rayrec.runs.item_pairs import Pairs
from rayrec.runs.next_item import run_options
from rayrec.runs.next_item_scores import NextItemScorer
from rayrec.train.checkpoint_config import CheckpointConfig
from rayrec.train.config import TrainSpec
from rayrec.train.tasks import FitTask
from tests.words import sets

ITEMS = 40
SCHEMA = {
    "label": "label",
    "features": [
        {"name": "history", "column": "past", "most_recent": 12},
        {"name": "item", "column": "item"},
    ],
    "sequences": [
        {"name": "times", "column": "at", "most_recent": 12, "aligned_with": "history"},
        {"name": "seen", "column": "past"},
    ],
    "tables": [
        {
            "name": "song",
            "num_embeddings": ITEMS,
            "embedding_dim": 16,
            "features": ["history", "item"],
            "pooling": "none",
        }
    ],
}
SMALL = NextItemModel(model="sasrec", seen="seen", length=12, negatives=16, ks=(1, 5))


def rows_of(users: int, seed: int) -> pa.Table:
    """Users who go on to the next item four times of five, and else jump."""
    rng = np.random.default_rng(seed)
    past, item = [], []
    for user in range(users):
        length = 0 if user == 0 else int(rng.integers(3, 15))
        jumps = rng.random(length + 1) < 0.2
        jumps[0] = True
        walk = np.where(jumps, rng.integers(0, ITEMS, length + 1), 1).cumsum()
        past.append((walk[:-1] % ITEMS).tolist())
        item.append(int(walk[-1]) % ITEMS)
    at = [np.cumsum(rng.integers(1, 1000, len(one))).tolist() for one in past]
    lists = pa.list_(pa.int64())
    columns = {"past": pa.array(past, lists), "item": item, "at": pa.array(at, lists)}
    return pa.table(columns)


def write_songs(folder: Path) -> Path:
    """Write rows to train on and to rank, with their schema."""
    for part, users in (("train", 600), ("eval", 101)):
        (folder / part).mkdir()
        pq.write_table(rows_of(users, users), folder / part / "a.parquet", row_group_size=100)
    (folder / "schema.json").write_text(json.dumps(SCHEMA))
    return folder


def options(folder: Path, *changes: str) -> list[str]:
    usual = [
        "model.model=sasrec",
        "model.seen=seen",
        "model.negatives=16",
        "model.ks=[1,5]",
        "run.progress=off",
        "scaling.num_workers=0",
    ]
    return ["train", "--data", str(folder), *sets(*usual, *changes)]


def task_for(
    folder: Path, model: NextItemModel, ranks: int, kind: str, group_size: int | None = None
) -> FitTask:
    schema = (folder / "schema.json").read_text()
    train = open_data(str(folder / "train"), schema, with_labels=False)
    held_out = open_data(str(folder / "eval"), schema, with_labels=False)
    pairs = Pairs.of_rows(train, "history", "item")
    recipe = NextItemRecipe(schema=schema, model=model, counts=pairs.counts)
    candidates = recipe.candidates()
    spec = TrainSpec(
        **{**run_options(model), "global_batch_size": 50},
        model=recipe,
        data=train if candidates is None else NextItemDataset(data=train, candidates=candidates),
        plan=manual_plan(find_tables(recipe), kind, Topology.local(group_size or ranks)),
        sharding_group_size=group_size,
        steps=20,
        checkpoint=CheckpointConfig(at_end=False),
    )
    scorer = NextItemScorer(held_out=held_out, pairs=pairs, seen=model.seen, ks=model.ks)
    return FitTask(spec=spec, scorer=scorer)
