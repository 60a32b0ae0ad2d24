"""Small models, their optimizers and steps, which the tests of optimizers share."""

from __future__ import annotations

import torch
from torch import nn

from rayrec.distributed.kernels.lookup import make_lookup
from rayrec.optim import KeyedOptimizerWrapper, SparseOptimizer
from tests.optim_reference import Work, random_work

CPU = torch.device("cpu")
STEPS = 4
SEED = 5  # a group of several shards whose first batches are not empty


def kernel_of(optimizer: SparseOptimizer, seed: int = SEED):
    """A kernel with random rows, and its work."""
    work = random_work(seed, optimizer, weighted=False)
    lookup = make_lookup(work.group, CPU)
    work.fill(lookup)
    return lookup, work


def train(lookup, work: Work, steps: int = 1) -> float:
    """Largest change of a row's element."""
    before = [state.weight.clone() for state in lookup.shard_states()]
    for _ in range(steps):
        lookup(work.batch(6)).backward(work.grad(6))
    return max(
        float((state.weight - w).abs().max())
        for state, w in zip(lookup.shard_states(), before, strict=True)
    )


def dense_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def dense_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def keyed_adam(model: nn.Module) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(
        dict(model.named_parameters()), lambda params: torch.optim.Adam(params, lr=0.1)
    )
