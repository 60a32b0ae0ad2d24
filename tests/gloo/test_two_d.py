"""2D parallelism: with sync in every step two groups are one world; with fewer they drift apart and
are averaged.
"""

from __future__ import annotations

import pytest
import torch

from rayrec.distributed import DistributedModelParallel
from rayrec.errors import ConfigError
from rayrec.layout import EmbeddingBagConfig, row_wise
from rayrec.modules import EmbeddingBagCollection
from rayrec.optim import SGD, RowWiseAdagrad
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train.step import train_step
from tests.gloo.small_dlrm import build, parts, plan_of
from tests.ranks import RankPool
from tests.worlds import part_of, plan_for

STEPS = 5  # all of equal batches on every rank


class Even:
    """A part of an even batch: replicas average over ranks, so all ranks hold as many rows."""

    def __init__(self, step: int, rank: int, world_size: int) -> None:
        whole = parts(step, 0, 1)
        rows = whole.rows // 4 * 4
        per = rows // world_size
        part = parts(step, 0, 1)
        span = slice(rank * per, (rank + 1) * per)
        ids = whole.sparse_features.values().view(len(whole.sparse_features.keys()), -1)[:, span]
        self.dense_features, self.labels, self.rows, self.global_rows = (
            part.dense_features[span],
            part.labels[span],
            per,
            rows,
        )
        lengths = torch.ones(ids.numel(), dtype=torch.int32)
        self.sparse_features = type(whole.sparse_features)(
            whole.sparse_features.keys(), ids.reshape(-1), lengths=lengths, stride=per
        )


def train(rank: int, world_size: int, group_size: int | None, every: int, adagrad: bool):
    optimizer = RowWiseAdagrad(lr=0.05) if adagrad else SGD(lr=0.05)
    plan = plan_of(group_size or world_size)
    model = DistributedModelParallel(
        build(),
        plan=plan,
        sparse_optimizer=optimizer,
        sharding_group_size=group_size,
        sync_every=every,
    )
    dense = torch.optim.SGD([p for _, p in model.dense_parameters()], lr=0.05)
    for step in range(STEPS):
        train_step(model, dense, Even(step, rank, world_size), world_size)
    drifted = [s.weight.detach().clone() for s in model.shard_states()]
    model.sync()
    return [(s.shard, s.weight.detach().clone()) for s in model.shard_states()], drifted


def whole(results) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for states, _ in results:
        for shard, weight in states:
            rows = max(s.rows.stop for st, _ in results for s, _ in st if s.table == shard.table)
            table = found.setdefault(shard.table, torch.zeros(rows, 8))
            part_of(table, shard).copy_(weight)
    return found


@pytest.mark.parametrize("adagrad", [False, True])
def test_two_groups_with_sync_in_every_step_are_one_world(ranks: RankPool, adagrad: bool) -> None:
    # of one group the plan of two ranks: row-wise Adagrad keeps one value per column block, so both
    # sides need the same cuts
    one = whole(ranks.run(2, train, None, 1, adagrad))
    results = ranks.run(4, train, 2, 1, adagrad)
    for name, weight in whole(results).items():
        # float32 sums in another order
        torch.testing.assert_close(weight, one[name], rtol=1e-4, atol=1e-5)
    for rank in (0, 1):
        for a, b in zip(results[rank][1], results[rank + 2][1], strict=True):
            assert torch.equal(a, b)


def learned(rank: int, world_size: int, group_size: int | None):
    """Gradient of per-id weights that a model learns, for this rank's quarter of the batch, and the
    final rows.
    """
    torch.manual_seed(0)
    table = EmbeddingBagConfig(12, 8, name="t", feature_names=["f"])
    plan = plan_for(
        group_size or world_size, {"t": row_wise(table, range(group_size or world_size))}
    )
    model = DistributedModelParallel(
        EmbeddingBagCollection([table], is_weighted=True, device="meta"),
        plan=plan,
        sparse_optimizer=RowWiseAdagrad(lr=0.1),
        sharding_group_size=group_size,
        seed=3,
    )
    weights = torch.full((6,), 0.5 + rank % 4).requires_grad_()
    kjt = KeyedJaggedTensor(["f"], torch.arange(6) + rank, weights, lengths=torch.tensor([2, 1, 3]))
    (model(kjt).values() * (1 + rank)).sum().backward()
    return weights.grad, [(s.shard, s.weight.detach().clone()) for s in model.shard_states()]


def test_learned_weights_have_one_worlds_gradient_in_groups(ranks: RankPool) -> None:
    one, grid = ranks.run(4, learned, None), ranks.run(4, learned, 2)
    for (a, _), (b, _) in zip(one, grid, strict=True):
        torch.testing.assert_close(a, b)
    rows = torch.zeros(12, 8)
    for _, states in one:
        for shard, weight in states:
            part_of(rows, shard).copy_(weight)
    for _, states in grid:
        for shard, weight in states:
            torch.testing.assert_close(weight, part_of(rows, shard))


def test_replicas_drift_and_meet_again(ranks: RankPool) -> None:
    results = ranks.run(4, train, 2, 2, True)
    for rank in (0, 1):
        (mine, mine_drifted), (peer, peer_drifted) = results[rank], results[rank + 2]
        assert any(not torch.equal(a, b) for a, b in zip(mine_drifted, peer_drifted, strict=True))
        for (_, a), (_, b) in zip(mine, peer, strict=True):
            assert torch.equal(a, b)


def refused(rank: int, world_size: int):
    for size in (3, 4):
        with pytest.raises(ConfigError, match=f"sharding_group_size={size}"):
            DistributedModelParallel(build(), plan=plan_of(size), sharding_group_size=size)
    return True


def test_groups_that_do_not_part_the_world_are_refused(ranks: RankPool) -> None:
    assert all(ranks.run(4, refused))
