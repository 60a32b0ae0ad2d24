"""One property over everything at once: any model, plan, optimizer, hosts and batches train as the unsharded tables.

A draw is a function of its seed: 1 to 8 tables 4 to 64 columns wide in pooled and sequence collections, sum and mean pooling, weighted
bags, features shared by tables, a variable batch per feature, all seven kinds and free grids mixed, each of the seven optimizers with
its options, one to six ranks on one to three hosts, ranks without rows and bags without ids. Three steps each: every output of every
step and every final rectangle of weights and optimizer state is compared. 500 draws take 0.1 s each.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from rayrec.layout import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig, PoolingType, ShardingPlan, TablePlacement, kind_of
from rayrec.optim import SGD, SPARSE_OPTIMIZERS, SparseOptimizer
from tests.sim.test_optimizers import check, options_of
from tests.worlds import World, random_layout

DRAWS = 500
HOSTS = ((1,), (2,), (1, 1), (3,), (1, 1, 1), (4,), (2, 2), (2, 2), (3, 3))  # ranks of each host
WIDTHS = (4, 8, 12, 16, 20, 32, 48, 64)


class Draw(NamedTuple):
    """A world, and the optimizer of each of its tables."""

    world: World
    optimizers: dict[str, SparseOptimizer]


def draw(seed: int, hosts: tuple[tuple[int, ...], ...] | None = None) -> Draw:
    """Everything, as a function of the seed; on given hosts when asked for."""
    rng = random.Random(f"everything {seed}")
    if hosts is None:
        sizes = rng.choice(HOSTS)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        hosts = tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))
    world_size = sum(len(host) for host in hosts)
    names = [f"f{i}" for i in range(rng.randint(1, 8))]
    left = rng.randint(1, 8)
    collections: list[tuple[BaseEmbeddingConfig, ...]] = []
    weighted: list[bool] = []
    while left:
        size = rng.randint(1, left)
        sequence = rng.random() < 0.4
        first = sum(len(tables) for tables in collections)
        width = rng.choice(WIDTHS)  # a sequence collection has one
        collections.append(tuple(table_of(f"t{first + i}", width if sequence else 0, names, rng) for i in range(size)))
        weighted.append(not sequence and rng.random() < 0.3)
        left -= size
    tables = [table for group in collections for table in group]
    placements = {table.name: TablePlacement(random_layout(table, hosts, rng)) for table in tables}  # type: ignore[arg-type]
    plan = ShardingPlan(world_size=world_size, tables=placements, hosts=hosts)
    kinds = sorted(SPARSE_OPTIMIZERS)
    common = options_of(rng.choice(kinds), rng)
    own = rng.random() < 0.3
    optimizers = {table.name: options_of(rng.choice(kinds), rng) if own else common for table in tables}
    world = World(seed, hosts, collections, weighted, plan, SGD(), rng, varying=rng.random() < 0.4)
    return Draw(world, optimizers)


def table_of(name: str, sequence_width: int, names: list[str], rng: random.Random) -> BaseEmbeddingConfig:
    """A table of a sequence collection of that width, or a pooled table when it is 0."""
    rows, features = rng.randint(2, 40), rng.sample(names, rng.randint(1, min(3, len(names))))
    if sequence_width:
        return EmbeddingConfig(rows, sequence_width, name=name, feature_names=features)
    pooling = rng.choice([PoolingType.SUM, PoolingType.SUM, PoolingType.MEAN])
    return EmbeddingBagConfig(rows, rng.choice(WIDTHS), name=name, feature_names=features, pooling=pooling)


@pytest.mark.seeds(range(DRAWS))
def test_everything_at_once_equals_unsharded(seed: int) -> None:
    drawn = draw(seed)
    check(drawn.world, drawn.optimizers, meta=seed % 2 == 0)


def traits(drawn: Draw) -> set[str]:
    """What a draw exercises."""
    world = drawn.world
    found = {"x".join(str(len(host)) for host in world.hosts), f"{len(world.tables)} tables"}
    found |= {kind_of(placement.layout, world.hosts) for placement in world.plan.tables.values()}
    found |= {optimizer.name for optimizer in drawn.optimizers.values()}
    found |= {f"width {table.embedding_dim}" for table in world.tables}
    found |= {str(table.pooling) if isinstance(table, EmbeddingBagConfig) else "sequence" for table in world.tables}
    uses = [feature for table in world.tables for feature in table.feature_names]
    cases = {
        "weighted": any(world.weighted),
        "variable batch": world.varying,
        "shared feature": len(uses) > len(set(uses)),
        "several collections": len(world.collections) > 1,
        "optimizers of their own": len(set(drawn.optimizers.values())) > 1,
    }
    return found | {name for name, holds in cases.items() if holds}


def test_the_draws_hold_every_case_several_times() -> None:
    """Else the property could hold because a case never came."""
    times: dict[str, int] = {}
    for seed in range(DRAWS):
        for trait in traits(draw(seed)):
            times[trait] = times.get(trait, 0) + 1
    wanted = {"x".join(map(str, sizes)) for sizes in HOSTS} | {f"{n} tables" for n in range(1, 9)} | {f"width {w}" for w in WIDTHS}
    wanted |= {"data_parallel", "table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard"}
    wanted |= {"product_grid", "weighted", "variable batch", "shared feature", "several collections", "optimizers of their own"}
    wanted |= {str(PoolingType.SUM), str(PoolingType.MEAN), "sequence", *SPARSE_OPTIMIZERS}
    assert {trait: times.get(trait, 0) for trait in wanted if times.get(trait, 0) < 20} == {}
