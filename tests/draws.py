"""Draws of everything at once: a world, a plan and an optimizer with its options for every table.

The reference updates the unsharded tables row by row with the formula of tests/optim_reference.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from rayrec.layout import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    ShardingPlan,
    TableLayout,
)
from rayrec.optim import SGD, SPARSE_OPTIMIZERS, RMSprop, SparseOptimizer
from tests.optim_reference import ReferenceTable
from tests.simulation import batches_of, check_outputs, run_sharded, targets_of
from tests.worlds import Reference, World, plan_for, random_layout

STEPS = 3
# float32 sums in another order, divided by roots of small second moments (the eps of `options_of`
# bounds the factor)
TOLERANCE = {"rtol": 3e-4, "atol": 3e-5}


def options_of(name: str, rng: random.Random) -> SparseOptimizer:
    options: dict = {
        "lr": 0.1,
        "weight_decay": rng.choice([0.0, 0.3]),
        "max_row_norm": rng.choice([None, 0.7]),
    }
    kind = SPARSE_OPTIMIZERS[name]
    if hasattr(kind, "eps"):
        # the root is about the gradient after one step of the others, and a tenth of it after one
        # of RMSprop, which needs as much more beside it: gradients that cancel with the decay to
        # 5e-4 had each rounding error multiplied by 100, in step after step
        options["eps"] = 1e-2 if kind is RMSprop else 1e-3
    if hasattr(kind, "weight_decay_mode"):
        options["weight_decay_mode"] = rng.choice(["l2", "decoupled"])
    if hasattr(kind, "eta"):
        options["eta"] = 0.1
    return kind(**options)


class RowReference(Reference):
    """The unsharded collections; tables are updated row by row, and only rows that some id of the
    global batch reads.

    Args:
        world: whose plan only matters for the column blocks: means and norms are over the columns
            of one block.
        optimizers: of every table.
    """

    def __init__(self, world: World, optimizers: dict[str, SparseOptimizer]) -> None:
        super().__init__(world)
        self.optimizers, self.t, self.touched = optimizers, 0, {t.name: set() for t in world.tables}
        self.blocks: dict[str, list[tuple[int, int, ReferenceTable]]] = {}
        for name, weight in self.weights().items():
            layout = world.plan.tables[name].layout
            cuts = layout.col_cuts if isinstance(layout, TableLayout) else (0, weight.shape[1])
            self.blocks[name] = [
                (a, b, ReferenceTable(weight.detach()[:, a:b], optimizers[name]))
                for a, b in pairwise(cuts)
            ]

    def step(self, batches, targets):
        self.t += 1
        for table in self.world.tables:
            self.touched[table.name] = {
                int(i) for kjt in batches for f in table.feature_names for i in kjt[f].values()
            }
        return super().step(batches, targets)

    @torch.no_grad()
    def _update(self, name: str, weight: Tensor) -> None:
        grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        for a, b, block in self.blocks[name]:
            block.update(
                self.optimizers[name],
                self.t,
                {row: grad[row, a:b].double().tolist() for row in self.touched[name]},
            )
            weight[:, a:b] = block.tensor()


def check(world: World, optimizers: dict[str, SparseOptimizer], meta: bool) -> None:
    world.optimizer = optimizers  # type: ignore[assignment]  # handed on to shard_embeddings, which takes one per table
    batches = batches_of(world, STEPS)
    targets = targets_of(world, batches)
    reference = RowReference(world, optimizers)
    outputs, states, _ = run_sharded(world, batches, targets, meta=meta)
    check_outputs(reference, batches, targets, outputs, TOLERANCE)
    assert {shard.table for shard, _, _ in states} == set(optimizers)
    for shard, weight, state in states:
        (block,) = [
            block
            for a, b, block in reference.blocks[shard.table]
            if (a, b) == (shard.cols.start, shard.cols.stop)
        ]
        rows = slice(shard.rows.start, shard.rows.stop)
        torch.testing.assert_close(weight.double(), block.tensor()[rows], **TOLERANCE)
        assert list(state) == list(optimizers[shard.table].state_widths)
        for name, tensor in state.items():
            torch.testing.assert_close(tensor.double(), block.tensor(name)[rows], **TOLERANCE)


def other_plan(
    world: World, optimizers: dict[str, SparseOptimizer], rng: random.Random
) -> ShardingPlan:
    """Another random plan. State per row and norms of rows are over column blocks, so those tables
    keep their column cuts.
    """
    layouts = {}
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
        layouts[table.name] = layout
    return plan_for(world.world_size, layouts, world.hosts)


HOSTS = ((1,), (2,), (1, 1), (3,), (1, 1, 1), (4,), (2, 2), (2, 2), (3, 3))  # ranks of each host


WIDTHS = (4, 8, 12, 16, 20, 32, 48, 64)


class Draw(NamedTuple):
    """A world, and the optimizer of each of its tables."""

    world: World
    optimizers: dict[str, SparseOptimizer]


def draw(
    seed: int,
    hosts: tuple[tuple[int, ...], ...] | None = None,
    optimizers: Sequence[str] = tuple(sorted(SPARSE_OPTIMIZERS)),
) -> Draw:
    """Everything, as a function of the seed; on given hosts, by some optimizers, when asked for."""
    rng = random.Random(f"everything {seed}")
    if hosts is None:
        sizes = rng.choice(HOSTS)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        hosts = tuple(
            tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)
        )
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
        collections.append(
            tuple(
                table_of(f"t{first + i}", width if sequence else 0, names, rng) for i in range(size)
            )
        )
        weighted.append(not sequence and rng.random() < 0.3)
        left -= size
    tables = [table for group in collections for table in group]
    plan = plan_for(world_size, {t.name: random_layout(t, hosts, rng) for t in tables}, hosts)
    kinds = list(optimizers)
    common = options_of(rng.choice(kinds), rng)
    own = rng.random() < 0.3
    optimizers = {
        table.name: options_of(rng.choice(kinds), rng) if own else common for table in tables
    }
    world = World(seed, hosts, collections, weighted, plan, SGD(), rng, varying=rng.random() < 0.4)
    return Draw(world, optimizers)


def table_of(
    name: str, sequence_width: int, names: list[str], rng: random.Random
) -> BaseEmbeddingConfig:
    """A table of a sequence collection of that width, or a pooled table when it is 0."""
    rows, features = rng.randint(2, 40), rng.sample(names, rng.randint(1, min(3, len(names))))
    if sequence_width:
        return EmbeddingConfig(rows, sequence_width, name=name, feature_names=features)
    pooling = rng.choice([PoolingType.SUM, PoolingType.SUM, PoolingType.MEAN])
    return EmbeddingBagConfig(
        rows, rng.choice(WIDTHS), name=name, feature_names=features, pooling=pooling
    )
