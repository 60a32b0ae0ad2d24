"""Resharding in the middle of training gives the final weights of never having resharded, over
random pairs of plans.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from rayrec.comm import SimulatedWorld
from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.errors import PlanError
from rayrec.layout import EmbeddingBagConfig, ShardingPlan, TableLayout, TablePlacement, table_wise
from rayrec.modules import EmbeddingBagCollection
from rayrec.optim import SGD, Adam, FusedOptimizer
from tests.draws import other_plan
from tests.simulation import TOLERANCE, batches_of, sharded, sharded_world, targets_of, train_step
from tests.worlds import EPS, OPTIMIZERS, World, plan_for, random_world, whole_tables

STEPS = 4


def train(world: World, plans: list[ShardingPlan]) -> dict[str, torch.Tensor]:
    """Whole tables after training with one plan per step."""
    batches = batches_of(world, STEPS)
    targets = targets_of(world, batches)

    def rank_main(exchange):
        torch.set_num_threads(1)
        options = EngineOptions(share_tables=world.seed % 2 == 0)
        planned = replace(world, plan=plans[0])
        modules, engine = sharded_world(planned, exchange, options)
        engine.set_learning_rate(0.07)
        for step in range(STEPS):
            if plans[step] is not engine.plan:
                engine.reshard(plans[step])
            train_step(modules, batches[step][exchange.rank], targets[step][exchange.rank])
        return [(s.shard, s.weight.detach().clone()) for s in engine.shard_states()]

    states = SimulatedWorld(world.world_size).run(rank_main)
    return whole_tables(world.tables, [state for own in states for state in own])


@pytest.mark.seeds(range(60))
def test_resharding_between_steps_changes_nothing(seed: int) -> None:
    optimizer = (*OPTIMIZERS, Adam(lr=0.01, eps=EPS))[seed % 4]
    world = random_world(7000 + seed, optimizer=optimizer, sequences=seed % 2 == 0)
    optimizers = {table.name: optimizer for table in world.tables}
    first, second = world.plan, other_plan(world, optimizers, random.Random(seed))
    never = train(world, [first] * STEPS)
    once = train(world, [first, first, second, second])
    back = train(world, [first, second, first, second])
    for name, weight in never.items():
        torch.testing.assert_close(once[name], weight, **TOLERANCE)
        torch.testing.assert_close(back[name], weight, **TOLERANCE)


def test_only_rectangles_whose_owner_changes_travel() -> None:
    world = random_world(1, hosts=[[0, 1]], optimizer=SGD(lr=0.1))

    def rank_main(exchange):
        _, engine = sharded_world(world, exchange)
        nothing = engine.reshard(replace(world.plan))
        swapped = {}
        for name, placement in world.plan.tables.items():
            layout = placement.layout
            if isinstance(layout, TableLayout):
                layout = replace(
                    layout, owners=tuple(tuple(1 - r for r in row) for row in layout.owners)
                )
            swapped[name] = TablePlacement(layout)
        # a message of a rectangle ends at a multiple of 8 bytes
        own = sum(
            -(-4 * s.weight.numel() // 8) * 8
            for s in engine.shard_states()
            if isinstance(world.plan.tables[s.shard.table].layout, TableLayout)
        )
        return nothing, engine.reshard(replace(world.plan, tables=swapped)), own

    for nothing, moved, own in SimulatedWorld(2).run(rank_main):
        assert nothing == 0
        assert moved == own


def test_resharding_to_a_plan_for_other_ranks_is_refused() -> None:
    world = random_world(1, hosts=[[0, 1]])

    def rank_main(exchange):
        _, engine = sharded_world(world, exchange)
        with pytest.raises(PlanError, match="for 1 rank"):
            engine.reshard(random_world(1, hosts=[[0]]).plan)

    SimulatedWorld(2).run(rank_main)


def test_tables_keep_the_learning_rates_that_were_written() -> None:
    """Also on a rank that had no shard of the table until now."""
    rates = {"a": 0.3, "b": 0.03}
    tables = [EmbeddingBagConfig(8, 4, name, feature_names=[name]) for name in rates]
    first, second = (
        plan_for(2, {t.name: table_wise(t, rank) for t, rank in zip(tables, ranks, strict=True)})
        for ranks in ((0, 1), (1, 1))
    )

    def rank_main(exchange):
        collection = EmbeddingBagCollection(tables, device="meta")
        optimizers = {"a": SGD(lr=0.1), "b": SGD(lr=0.2)}
        _, engine = sharded(collection, first, exchange, optimizers)
        for lookup in engine.lookups.values():
            for group in FusedOptimizer([lookup]).param_groups:
                group["lr"] = rates[lookup.group.shards[0].table]
                if group["lr"] == 0.3:
                    group["initial_lr"] = 0.6  # by a schedule
        engine.reshard(second)
        told = {}
        for lookup in engine.lookups.values():
            (group,) = FusedOptimizer([lookup]).param_groups
            told[lookup.group.shards[0].table] = group["lr"], group.get("initial_lr")
        return told

    assert SimulatedWorld(2).run(rank_main) == [{}, {"a": (0.3, 0.6), "b": (0.03, None)}]
