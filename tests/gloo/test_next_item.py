"""Next-item losses on 1, 2 and 4 ranks: one global mean, one set of rows, whatever the plan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rayrec.distributed import DistributedModelParallel, unsharded_state_dict
from rayrec.optim import Adam
from rayrec.train.step import train_step
from tests.ranks import RankFailed, RankPool
from tests.sequences import LOSSES, build, part, plain_loss, plan_of

STEPS = 4


def trained(
    rank: int,
    ranks: int,
    loss: str,
    kind: str,
    in_place: bool,
    dropout: float = 0.3,
    group_size: int | None = None,
) -> tuple[list[float], dict[str, Tensor] | None]:
    """The losses of the global batches, and all that was trained."""
    model = DistributedModelParallel(
        build(loss, dropout=dropout),
        plan=plan_of(kind, group_size or ranks),
        sharding_group_size=group_size,
        sparse_optimizer=Adam(0.05),
        share_tables=in_place,
        seed=7,
    )
    dense = torch.optim.Adam([p for _, p in model.dense_parameters()], lr=0.05)
    batches = [part(step, rank, ranks, loss) for step in range(STEPS)]
    sums = [float(train_step(model, dense, batch, ranks).loss_sum) for batch in batches]
    found = torch.tensor(sums, dtype=torch.float64)
    torch.distributed.all_reduce(found)
    rows = torch.tensor([batch.global_rows for batch in batches])
    losses = (found / rows).tolist()
    if group_size is not None:  # whose tables have no whole state
        return losses, dict(model.dense_parameters())
    return losses, unsharded_state_dict(model)


def plain(loss: str, start: dict[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    """The same in torch alone; the tables' Adam sees gradients of all rows."""
    model = build(loss, "cpu")
    model.load_state_dict(start)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        value = plain_loss(model, step, loss)
        value.backward()
        optimizer.step()
        losses.append(float(value))
    return losses, model.state_dict()


def untrained(rank: int, ranks: int, loss: str) -> dict[str, Tensor] | None:
    model = DistributedModelParallel(build(loss), plan=plan_of("table_wise", ranks), seed=7)
    return unsharded_state_dict(model)


@pytest.mark.parametrize("loss", LOSSES)
def test_ranks_train_on_one_global_mean(ranks: RankPool, loss: str) -> None:
    (one,) = ranks.run(1, trained, loss, "table_wise", True)
    # float32 sums in another order
    close = {"rtol": 1e-5, "atol": 1e-5}
    for world_size, kind, in_place in (
        (2, "row_wise", True),
        (2, "row_wise", False),
        (2, "column_wise", False),
        (4, "row_wise", False),
        (4, "table_wise", False),
        (4, "data_parallel", False),
    ):
        losses, values = ranks.run(world_size, trained, loss, kind, in_place)[0]
        assert losses == pytest.approx(one[0], abs=1e-5), (world_size, kind)
        for name, value in one[1].items():
            torch.testing.assert_close(values[name], value, **close)
    # all items are candidates of the full softmax, so that torch's Adam and the tables' are one
    if loss == "full":
        (one,) = ranks.run(1, trained, loss, "table_wise", True, 0.0)
        losses, values = plain(loss, ranks.run(1, untrained, loss)[0])
        assert one[0] == pytest.approx(losses, abs=1e-5)
        for name, value in values.items():
            torch.testing.assert_close(one[1][name], value, **close)


def test_groups_of_ranks_share_negatives_and_have_no_slices_of_all_items(ranks: RankPool) -> None:
    (one,) = ranks.run(1, trained, "popularity", "table_wise", True)
    losses, values = ranks.run(4, trained, "popularity", "row_wise", False, 0.3, 2)[0]
    assert losses == pytest.approx(one[0], abs=1e-5)
    assert len(values) == 3
    for name, value in values.items():
        torch.testing.assert_close(value, one[1][name], rtol=1e-5, atol=1e-5)
    with pytest.raises(RankFailed, match=r"slices of 11 of them .* sharding_group_size"):
        ranks.run(4, trained, "full", "row_wise", False, 0.3, 2)
