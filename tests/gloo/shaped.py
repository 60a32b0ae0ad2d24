"""Runs with several labels and weights of rows, for the tests of what shapes a run."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from rayrec.data import FeatureSchema
from rayrec.driver.planning import find_tables
from rayrec.layout import Topology
from rayrec.models import DLRM, MultiTaskTrain
from rayrec.modules import EmbeddingBagCollection
from rayrec.planner import manual_plan
from rayrec.runs.inputs import open_data
from rayrec.spec.task import Task
from rayrec.train import RankTrainer, TrainSpec
from rayrec.train.events import Event
from rayrec.train.window import gather_objects
from tests.clicks import write_clicks

TASKS = (
    Task(name="click"),
    Task(name="genre", kind="multiclass", classes=4, weight=0.5, metrics=("recall@2", "ndcg@2")),
    Task(name="rating", kind="regression", weight=0.25),
)


@dataclass(frozen=True)
class ManyTasks:
    """A DLRM with six outputs a row."""

    schema: str
    tasks: tuple[Task, ...] = TASKS

    def __call__(self) -> nn.Module:
        schema = FeatureSchema.from_json(self.schema)
        tables = EmbeddingBagCollection(tables=schema.embedding_bag_configs(), device="meta")
        width, outputs = schema.tables[0].embedding_dim, sum(t.outputs for t in self.tasks)
        model = DLRM(tables, len(schema.dense), [8, width], [8, outputs])
        return MultiTaskTrain(model, self.tasks)


def write_shaped(folder: Path) -> None:
    """Clicks with a genre, a rating and a weight beside the label."""
    write_clicks(folder, rows_eval=301)
    schema = json.loads((folder / "schema.json").read_text())
    label = schema["label"]
    random = np.random.default_rng(5)
    for name in ("train", "eval"):
        for file in sorted((folder / name).glob("*.parquet")):
            table = pq.read_table(file)
            rows, clicks = table.num_rows, table[label].to_numpy().astype(np.float32)
            table = table.append_column("genre", pa.array(random.integers(0, 4, rows)))
            table = table.append_column("rating", pa.array(clicks * 2 + random.random(rows)))
            table = table.append_column("weight", pa.array(random.random(rows) + 0.5))
            pq.write_table(table, file)
    schema["label"] = [label, "genre", "rating"]
    schema["weight"] = "weight"
    (folder / "many.json").write_text(json.dumps(schema))


def many_of(folder: Path, world_size: int, **options: Any) -> TrainSpec:
    """A run of all tasks, thirteen steps long; see `tests.gloo.trainers.spec_of`."""
    schema = (folder / "many.json").read_text()
    recipe = ManyTasks(schema)
    plan = manual_plan(find_tables(recipe), "row_wise", Topology.local(world_size))
    spec = TrainSpec(
        model=recipe,
        data=open_data(str(folder / "train"), schema),
        eval_data=open_data(str(folder / "eval"), schema),
        plan=plan,
        global_batch_size=128,
        steps=13,
        tasks=TASKS,
    )
    return replace(spec, **options)


def whole_numbers(trainer: RankTrainer) -> dict[str, torch.Tensor]:
    """Every number of the model, tables joined from the shards of all ranks; on every rank."""
    own = [
        (state.shard.table, state.shard.rows.start, name, tensor.clone())
        for state in trainer.model.shard_states()
        for name, tensor in state.tensors().items()
    ]
    parts = defaultdict(dict)
    for of_rank in gather_objects(own):
        for table, row, name, tensor in of_rank:
            parts[f"{table}.{name}"][row] = tensor
    joined = {name: torch.cat([rows[at] for at in sorted(rows)]) for name, rows in parts.items()}
    return joined | {name: p.detach().clone() for name, p in trainer.model.dense_parameters()}


def trained(
    spec: TrainSpec, notes: list[str] | None = None
) -> tuple[dict[str, torch.Tensor], list[Event]]:
    """The numbers after training, and what was told on the way."""
    events: list[Event] = []
    with RankTrainer(spec) as trainer:
        trainer.begin((notes if notes is not None else []).append)
        trainer.run(on_event=events.append)
        return whole_numbers(trainer), events
