"""`DenseRowWiseAdagrad`, a torch optimizer with one state per row."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rayrec.errors import ConfigError
from rayrec.optim import DenseRowWiseAdagrad


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1, "lr_decay": 0.5},
        {"maximize": True, "initial_accumulator_value": 0.3, "eps": 1e-3},
    ],
)
def test_dense_rowwise_adagrad_follows_its_formula(options: dict) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = nn.Parameter(torch.randn(4, 3, generator=generator))
    want, sums = (
        weight.detach().double(),
        torch.full((4, 1), options.get("initial_accumulator_value", 0.0), dtype=torch.float64),
    )
    optimizer = DenseRowWiseAdagrad([weight], lr=0.2, **options)
    for step in range(5):
        weight.grad = torch.randn(4, 3, generator=generator)
        g = (
            weight.grad.double() * (-1 if options.get("maximize") else 1)
            + options.get("weight_decay", 0.0) * want
        )
        sums += (g**2).mean(1, keepdim=True)
        want = want - 0.2 / (1 + step * options.get("lr_decay", 0.0)) * g / (
            sums.sqrt() + options.get("eps", 1e-10)
        )
        optimizer.step()
    # float32 against float64
    torch.testing.assert_close(weight.detach().double(), want, rtol=1e-5, atol=1e-6)
    again = DenseRowWiseAdagrad([nn.Parameter(torch.zeros(4, 3))], lr=0.2)
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(
        again.state[again.param_groups[0]["params"][0]]["sum"], optimizer.state[weight]["sum"]
    )


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: DenseRowWiseAdagrad([nn.Parameter(torch.zeros(3))]), r"shape \(3,\)"),
        (lambda: DenseRowWiseAdagrad([nn.Parameter(torch.zeros(3, 2))], lr=-1.0), "lr=-1.0"),
        (lambda: DenseRowWiseAdagrad([nn.Parameter(torch.zeros(3, 2))], eps=math.nan), "eps=nan"),
    ],
)
def test_dense_rowwise_adagrad_refuses_what_it_cannot_do(make, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()


def test_dense_rowwise_adagrad_refuses_sparse_gradients() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = DenseRowWiseAdagrad(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse=False"):
        optimizer.step()
