"""A loss that is a mean over tokens: 1, 2 and 4 ranks train on the same global mean."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rayrec.distributed import DistributedModelParallel, unsharded_state_dict
from rayrec.models import DLRMTrain
from rayrec.optim import SGD
from rayrec.train.pipeline import TrainPipelineBase
from rayrec.train.step import train_step
from tests.gloo.small_dlrm import build, make_plan, parts
from tests.ranks import RankPool

STEPS = 4


class Tokens(DLRMTrain):
    """Row b has so many tokens as its first id tells, also none; the loss is their mean."""

    def forward(self, batch):
        logits = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        count = tokens(batch)
        losses = functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        loss = (losses * count).sum() / count.sum().clamp(min=1)
        return loss, (loss.detach(), logits.detach(), batch.labels)

    def loss_count(self, batch) -> Tensor:
        return tokens(batch).sum()


def tokens(batch) -> Tensor:
    return (batch.sparse_features["f0"].values() - 20).clamp(min=0)


def trained(
    rank: int, world_size: int, piped: bool
) -> tuple[list[float], dict[str, Tensor] | None]:
    """The losses of the global batches, and all that was trained."""
    model = DistributedModelParallel(
        Tokens(build().model), plan=make_plan("mixed", world_size), sparse_optimizer=SGD(0.5)
    )
    dense = torch.optim.SGD([p for _, p in model.dense_parameters()], lr=0.5)
    # 4 of these 23 rows have most of the tokens, and the last batch has one row
    batches = [parts(step, rank, world_size) for step in (0, 1, 2, 7)]
    if piped:
        steps = TrainPipelineBase(model, dense, "cpu").iterate(batches)
        sums = [float(step.loss) * float(step.rows) for step in islice(steps, STEPS)]
    else:
        sums = [float(train_step(model, dense, batch, world_size).loss_sum) for batch in batches]
    found = torch.tensor(sums)
    torch.distributed.all_reduce(found)
    rows = torch.tensor([batch.global_rows for batch in batches])
    return (found / rows).tolist(), unsharded_state_dict(model)


@pytest.mark.parametrize("piped", [False, True])
def test_ranks_train_on_the_mean_over_all_tokens(ranks: RankPool, piped: bool) -> None:
    (one,) = ranks.run(1, trained, piped)
    for world_size in (2, 4):
        losses, values = ranks.run(world_size, trained, piped)[0]
        assert losses == pytest.approx(one[0], abs=1e-5)
        for name, value in one[1].items():
            torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-5)
