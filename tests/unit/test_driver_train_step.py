"""The scale of the loss: gradients averaged over ranks are those of the mean over the global batch,
however rows are spread.
"""

from __future__ import annotations

import copy
import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayrec.errors import ConfigError
from rayrec.train.step import train_step


class Clicks(nn.Module):
    """A logistic regression with the interface of a click model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 1)

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        logits = self.linear(batch.x).squeeze(1)
        total = nn.functional.binary_cross_entropy_with_logits(
            logits, batch.labels, reduction="sum"
        )
        loss = total / max(1, len(logits))
        return loss, (loss.detach(), logits.detach(), batch.labels)


def part(x: Tensor, labels: Tensor, global_rows: int) -> SimpleNamespace:
    return SimpleNamespace(x=x, labels=labels, rows=len(x), global_rows=global_rows)


@pytest.mark.seeds(range(20))
def test_mean_of_the_ranks_gradients_is_that_of_the_whole_batch(seed: int) -> None:
    draw = random.Random(seed)
    world_size, rows = draw.randint(1, 6), draw.randint(1, 40)
    torch.manual_seed(seed)
    model, x, labels = Clicks(), torch.randn(rows, 5), torch.randint(2, (rows,)).float()
    # some ranks get nothing
    cuts = [0, *sorted(draw.randint(0, rows) for _ in range(world_size - 1)), rows]
    whole = copy.deepcopy(model)
    train_step(whole, None, part(x, labels, rows), 1)
    total, loss_sum = torch.zeros(1, 5), 0.0
    for start, stop in pairwise(cuts):
        rank = copy.deepcopy(model)
        result = train_step(rank, None, part(x[start:stop], labels[start:stop], rows), world_size)
        assert rank.linear.weight.grad is not None and result.rows == stop - start
        total += rank.linear.weight.grad / world_size  # what DDP does
        loss_sum += float(result.loss_sum)
    assert whole.linear.weight.grad is not None
    # float32 sums in another order
    torch.testing.assert_close(total, whole.linear.weight.grad, rtol=1e-5, atol=1e-6)
    loss = nn.functional.binary_cross_entropy_with_logits(
        model.linear(x).squeeze(1), labels, reduction="sum"
    )
    assert loss_sum == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("output", [torch.zeros(()), (torch.zeros(()), None), None])
def test_another_form_of_output_is_refused(output: object) -> None:
    class Odd(nn.Module):
        def forward(self, batch: Any) -> object:
            return output

    with pytest.raises(ConfigError, match=r"\(loss, \(loss, logits, labels\)\)"):
        train_step(Odd(), None, part(torch.zeros(3, 5), torch.zeros(3), 3), 1)
