"""Every optimizer under any plan equals the unsharded tables with the formula written out, also with one optimizer per table."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rayrec.layout import TableLayout
from rayrec.optim import SPARSE_OPTIMIZERS, SparseOptimizer
from tests.sim.test_runtime import batches_of, run_sharded, targets_of
from tests.unit.optim_reference import ReferenceTable
from tests.worlds import Reference, World, random_world

STEPS = 3
# float32 sums in another order, divided by roots of small second moments (eps 1e-3 bounds the factor)
TOLERANCE = {"rtol": 3e-4, "atol": 3e-5}


def options_of(name: str, rng: random.Random) -> SparseOptimizer:
    options: dict = {"lr": 0.1, "weight_decay": rng.choice([0.0, 0.3]), "max_row_norm": rng.choice([None, 0.7])}
    if name not in ("sgd", "lars_sgd"):
        options["eps"] = 1e-3
    if name not in ("lamb", "lars_sgd"):
        options["weight_decay_mode"] = rng.choice(["l2", "decoupled"])
    if name == "lars_sgd":
        options["eta"] = 0.1
    return SPARSE_OPTIMIZERS[name](**options)


class RowReference(Reference):
    """The unsharded collections; tables are updated row by row, and only rows that some id of the global batch reads.

    Args:
        world: whose plan only matters for the column blocks: means and norms are over the columns of one block.
        optimizers: of every table.
    """

    def __init__(self, world: World, optimizers: dict[str, SparseOptimizer]) -> None:
        super().__init__(world)
        self.optimizers, self.t, self.touched = optimizers, 0, {t.name: set() for t in world.tables}
        self.blocks: dict[str, list[tuple[int, int, ReferenceTable]]] = {}
        for name, weight in self.weights().items():
            layout = world.plan.tables[name].layout
            cuts = layout.col_cuts if isinstance(layout, TableLayout) else (0, weight.shape[1])
            self.blocks[name] = [(a, b, ReferenceTable(weight.detach()[:, a:b], optimizers[name])) for a, b in pairwise(cuts)]

    def step(self, batches, targets):
        self.t += 1
        for table in self.world.tables:
            self.touched[table.name] = {int(i) for kjt in batches for f in table.feature_names for i in kjt[f].values()}
        return super().step(batches, targets)

    @torch.no_grad()
    def _update(self, name: str, weight: Tensor) -> None:
        grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        for a, b, block in self.blocks[name]:
            block.update(self.optimizers[name], self.t, {row: grad[row, a:b].double().tolist() for row in self.touched[name]})
            weight[:, a:b] = block.tensor()


def check(world: World, optimizers: dict[str, SparseOptimizer], meta: bool) -> None:
    world.optimizer = optimizers  # type: ignore[assignment]  # handed on to shard_embeddings, which takes one per table
    batches = batches_of(world, STEPS)
    targets = targets_of(world, batches)
    reference = RowReference(world, optimizers)
    outputs, states, _ = run_sharded(world, batches, targets, meta=meta)
    for step in range(STEPS):
        wanted = reference.step(batches[step], targets[step])
        for rank in range(world.world_size):
            for got, want in zip(outputs[step][rank], wanted[rank], strict=True):
                torch.testing.assert_close(got, want, **TOLERANCE)
    assert {shard.table for shard, _, _ in states} == set(optimizers)
    for shard, weight, state in states:
        (block,) = [block for a, b, block in reference.blocks[shard.table] if (a, b) == (shard.cols.start, shard.cols.stop)]
        rows = slice(shard.rows.start, shard.rows.stop)
        torch.testing.assert_close(weight.double(), block.tensor()[rows], **TOLERANCE)
        assert list(state) == list(optimizers[shard.table].state_widths)
        for name, tensor in state.items():
            torch.testing.assert_close(tensor.double(), block.tensor(name)[rows], **TOLERANCE)


@pytest.mark.seeds(range(12))
@pytest.mark.parametrize("name", sorted(SPARSE_OPTIMIZERS))
def test_sharded_equals_unsharded(name: str, seed: int) -> None:
    rng = random.Random(f"{name}{seed}")
    world = random_world(rng.randrange(10_000), sequences=True)
    optimizer = options_of(name, rng)
    check(world, {t.name: optimizer for t in world.tables}, meta=seed % 2 == 0)


@pytest.mark.seeds(range(30))
def test_tables_train_with_optimizers_of_their_own(seed: int) -> None:
    rng = random.Random(seed)
    world = random_world(seed, sequences=True)
    check(world, {t.name: options_of(rng.choice(sorted(SPARSE_OPTIMIZERS)), rng) for t in world.tables}, meta=True)
