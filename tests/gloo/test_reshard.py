"""Resharding in the middle of training over real gloo groups, two hosts of two: final weights of
never having resharded, and no hang.
"""

from __future__ import annotations

import random

import pytest
import torch

from rayrec.distributed import DistributedModelParallel
from rayrec.layout import ShardingPlan, TableLayout, TablePlacement
from rayrec.optim import SPARSE_OPTIMIZERS, SparseOptimizer
from tests.draws import Draw, options_of
from tests.ranks import RankPool
from tests.simulation import batches_of, targets_of
from tests.worlds import World, build_collections, output_of, random_layout, random_world

TWO_BY_TWO = ((0, 1), (2, 3))
STEPS = 5
# FBGEMM's and torch's kernels add the ids of a row in another order under another plan: float32,
# five steps
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


def other_plan(
    world: World, optimizers: dict[str, SparseOptimizer], rng: random.Random
) -> ShardingPlan:
    """Another random plan. State per row and norms of rows are over column blocks, so those tables
    keep their column cuts.
    """
    placements = {}
    for table in world.tables:
        old, optimizer = world.plan.tables[table.name].layout, optimizers[table.name]
        by_block = (
            "row" in optimizer.state_widths.values()
            or optimizer.name in ("lamb", "lars_sgd")
            or optimizer.max_row_norm is not None
        )
        kept = old.col_cuts if isinstance(old, TableLayout) else (0, table.embedding_dim)
        layout = old
        for _ in range(100):
            drawn = random_layout(table, world.hosts, rng)  # type: ignore[arg-type]
            cuts = drawn.col_cuts if isinstance(drawn, TableLayout) else (0, table.embedding_dim)
            if drawn != old and (not by_block or cuts == kept):
                layout = drawn
                break
        placements[table.name] = TablePlacement(layout)
    return ShardingPlan(world_size=world.world_size, tables=placements, hosts=world.hosts)


def train_resharding(rank: int, world_size: int, drawn: Draw, plans: list[ShardingPlan]):
    """One rank's final rectangles and the bytes it sent, with one plan per step."""
    world = drawn.world
    batches = batches_of(world, STEPS)
    targets = targets_of(world, batches)
    model = DistributedModelParallel(
        build_collections(world, "meta"),
        plan=plans[0],
        sparse_optimizer=drawn.optimizers,
        seed=world.seed,
        share_tables=world.seed % 2 == 0,
    )
    sent = 0
    for step in range(STEPS):
        if plans[step] is not model.plan:
            sent += model.reshard(plans[step])
        out = [output_of(module, batches[step][rank]) for module in model.module]
        sum((o * t).sum() for o, t in zip(out, targets[step][rank], strict=True)).backward()
    return [(s.shard, s.weight.detach().clone()) for s in model.shard_states()], sent


def whole_tables(world: World, results) -> dict[str, torch.Tensor]:
    """Tables put together of all ranks' rectangles, every cell of them."""
    whole = {
        t.name: torch.full((t.num_embeddings, t.embedding_dim), float("nan")) for t in world.tables
    }
    for states, _ in results:
        for shard, weight in states:
            whole[shard.table][
                shard.rows.start : shard.rows.stop, shard.cols.start : shard.cols.stop
            ] = weight
    assert not any(table.isnan().any() for table in whole.values())
    return whole


@pytest.mark.parametrize("name", sorted(SPARSE_OPTIMIZERS))
@pytest.mark.seeds(range(2))
def test_resharding_in_mid_training_changes_nothing_over_gloo(
    ranks: RankPool, name: str, seed: int
) -> None:
    rng = random.Random(f"reshard {name} {seed}")
    world = random_world(
        rng.randrange(10_000), hosts=TWO_BY_TWO, sequences=True, varying=seed % 2 == 1
    )
    optimizer = options_of(name, rng)
    drawn = Draw(world, {table.name: optimizer for table in world.tables})
    first, second, third = world.plan, *(other_plan(world, drawn.optimizers, rng) for _ in range(2))
    never = ranks.run(4, train_resharding, drawn, [first] * STEPS, timeout_s=60)
    often = ranks.run(
        4, train_resharding, drawn, [first, first, second, third, first], timeout_s=60
    )
    wanted, got = whole_tables(world, never), whole_tables(world, often)
    for table, weight in wanted.items():
        torch.testing.assert_close(got[table], weight, **TOLERANCE)
    assert sum(sent for _, sent in never) == 0
    if second != first:
        assert sum(sent for _, sent in often) > 0
