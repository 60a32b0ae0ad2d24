"""Touched rows under 2D parallelism: what any replica touches counts on all of them."""

from __future__ import annotations

import pytest
import torch

from rayrec.distributed import DistributedModelParallel
from rayrec.optim import RowWiseAdagrad
from rayrec.train.step import train_step
from tests.gloo.small_dlrm import build, parts, plan_of
from tests.ranks import RankPool

STEPS = 3


def train(rank: int, world_size: int, group_size: int, every: int):
    """Touched rows per shard after a mark in the middle, and the rows that changed since then."""
    model = DistributedModelParallel(
        build(),
        plan=plan_of(group_size),
        sparse_optimizer=RowWiseAdagrad(lr=0.05),
        sharding_group_size=group_size,
        sync_every=every,
        track_rows=True,
    )
    dense = torch.optim.SGD([p for _, p in model.dense_parameters()], lr=0.05)
    train_step(model, dense, parts(0, rank, world_size), world_size)
    model.sync()
    assert model.touched is not None
    mark = model.touched.mark()
    before = {state.shard: state.weight.detach().clone() for state in model.shard_states()}
    for step in range(1, STEPS):
        train_step(model, dense, parts(step, rank, world_size), world_size)
    model.sync()
    touched = model.touched.since(mark)
    changed = {}
    for state in model.shard_states():
        rows = (state.weight != before[state.shard]).any(1).nonzero().view(-1)
        changed[state.shard] = (rows + state.shard.rows.start).tolist()
    return {shard: rows.tolist() for shard, rows in touched.items()}, changed


def looked_up(table: str) -> set[int]:
    """The rows of one of the four tables that the global batches after the mark read."""
    read: set[int] = set()
    for step in range(1, STEPS):
        read |= set(parts(step, 0, 1).sparse_features[f"f{table[1:]}"].values().tolist())
    return read


@pytest.mark.parametrize("every", [1, 2])
def test_two_replicas_count_what_either_touches(ranks: RankPool, every: int) -> None:
    for touched, changed in ranks.run(4, train, 2, every):
        for shard, rows in touched.items():
            wanted = looked_up(shard.table) & set(shard.rows)
            assert rows == sorted(wanted)
            assert set(changed[shard]) <= wanted


def test_an_average_of_more_than_two_replicas_touches_all_rows(ranks: RankPool) -> None:
    """A mean of three equal numbers may differ from them by its rounding."""
    for touched, _ in ranks.run(3, train, 1, 2):
        assert all(rows == list(shard.rows) for shard, rows in touched.items())
