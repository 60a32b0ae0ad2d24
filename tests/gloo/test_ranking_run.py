"""MLPerf's ranking model at a thousandth of its size: ranks train as one, dropout and times too."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from rayrec.data import WindowedDataset
from rayrec.driver.planning import find_tables
from rayrec.layout import Topology
from rayrec.optim import ScheduleConfig
from rayrec.planner import manual_plan
from rayrec.recipe import ModelRecipe
from rayrec.train import RankTrainer, TrainSpec
from rayrec.train.events import Evaluation
from tests.ranks import RankPool

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_mlperf.py"
Trained = tuple[list[dict[str, float]], dict[str, Any], list[Any]]


def train(
    rank: int, world_size: int, recipe: ModelRecipe, data: WindowedDataset, options: dict[str, Any]
) -> Trained:
    plan = manual_plan(find_tables(recipe), "row_wise", Topology.local(world_size))
    spec = TrainSpec(model=recipe, data=data, plan=plan, **options)
    told: list[dict[str, float]] = []

    def keep(event: object) -> None:
        if isinstance(event, Evaluation):
            told.append(dict(event.scores))

    with RankTrainer(spec) as trainer:
        trainer.run(on_event=keep)
        shards = [(s.shard, s.weight.detach().clone()) for s in trainer.model.shard_states()]
        dense = {name: p.detach().clone() for name, p in trainer.model.dense_parameters()}
    return told, dense, shards


def test_ranks_train_the_same_model(ranks: RankPool, tmp_path: Path) -> None:
    example = runpy.run_path(str(EXAMPLE))
    recipe = example["RECIPE"]
    assert recipe.hstu.dropout > 0 and recipe.hstu.layers == 3
    # less than a batch in each window
    data = example["windows"](tmp_path, events=400)
    options = example["OPTIONS"] | {"steps": 4, "dense_schedule": ScheduleConfig(warmup=2)}
    ((scores, wanted, whole),) = ranks.run(1, train, recipe, data, options)
    tables = {shard.table: weight for shard, weight in whole}
    assert {name: len(tables[name]) for name in example["CONTEXT"]} == example["CONTEXT"]
    assert len(scores) == 4 and len(tables) == 12
    for world_size in (2, 4):
        for others, dense, shards in ranks.run(world_size, train, recipe, data, options):
            assert others == [pytest.approx(one, abs=1e-5) for one in scores]
            for name, value in dense.items():
                torch.testing.assert_close(value, wanted[name], atol=1e-5, rtol=1e-5)
            for shard, weight in shards:
                part = tables[shard.table][shard.rows.start : shard.rows.stop]
                torch.testing.assert_close(weight, part, atol=1e-5, rtol=1e-5)
