"""Whole models under SGD: trained on simulated ranks by any plan, and in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from rayrec.comm import SimulatedWorld
from rayrec.distributed import shard_embeddings, table_configs
from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.layout import Shard, ShardingPlan
from rayrec.optim import SGD
from tests.worlds import part_of, whole_tables

# float32 sums in another order, through some layers and two steps
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


class Trained(NamedTuple):
    """What is left on a rank.

    Attributes:
        losses: by step, its part of the loss of the global batch.
        outputs: by step, what `share_of` gave beside it.
        dense: its parameters that are no tables.
        shards: its shards and their rows.
    """

    losses: list[float]
    outputs: list[Any]
    dense: dict[str, Tensor]
    shards: list[tuple[Shard, Tensor]]


def train(
    model: nn.Module,
    plan: ShardingPlan,
    share_of: Callable[[nn.Module, int, int], tuple[Tensor, Any]],
    steps: int,
    lr: float,
    in_place: bool,
) -> list[Trained]:
    """Train copies of a model on the ranks of a plan.

    Args:
        share_of: (model, step, rank) -> the rank's part of the loss of the global batch, and an
            output to keep.
    """
    ranks = plan.world_size

    def rank_main(exchange: Any) -> Trained:
        torch.set_num_threads(1)
        options = EngineOptions(share_tables=in_place)
        device = torch.device("cpu")
        own, engine = shard_embeddings(
            copy.deepcopy(model), plan, exchange, SGD(lr=lr), device, 0, options
        )
        # a sharded collection has no parameters
        dense, losses, outputs = dict(own.named_parameters()), [], []
        for step in range(steps):
            share, output = share_of(own, step, exchange.rank)
            # the engine divides the sum over ranks by their number
            (share * ranks).backward()
            losses.append(float(share.detach()))
            outputs.append(output)
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in dense.values()]
            flat = torch.cat([grad.flatten() for grad in grads]) / ranks
            whole = sum(exchange.all_gather(flat, [len(flat)] * ranks).wait())
            parts = whole.split([p.numel() for p in dense.values()])
            means = [part.view_as(p) for part, p in zip(parts, dense.values(), strict=True)]
            _descend(list(dense.values()), means, lr)
            own.zero_grad()
        shards = [(s.shard, s.weight.detach().clone()) for s in engine.shard_states()]
        return Trained(losses, outputs, {n: p.detach() for n, p in dense.items()}, shards)

    return SimulatedWorld(ranks).run(rank_main)


def check_equals_plain(
    found: list[Trained], model: nn.Module, loss_of: Callable[[int], Tensor], lr: float
) -> None:
    """Losses, parameters and rows of the ranks are those of `model` under its plain loss.

    Args:
        model: the whole model, which is trained here.
        loss_of: step -> the loss of the global batch.
    """
    parameters = dict(model.named_parameters())
    for step in range(len(found[0].losses)):
        loss = loss_of(step)
        told = sum(rank.losses[step] for rank in found)
        assert told == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-5)
        grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        whole = [
            torch.zeros_like(p) if grad is None else grad
            for p, grad in zip(parameters.values(), grads, strict=True)
        ]
        _descend(list(parameters.values()), whole, lr)
    tables = {name.split(".")[-2]: p for name, p in parameters.items() if is_table(name)}
    whole_tables(table_configs(model), [one for rank in found for one in rank.shards])
    for rank in found:
        assert rank.dense.keys() == {name for name in parameters if not is_table(name)}
        for name, value in rank.dense.items():
            torch.testing.assert_close(value, parameters[name].detach(), **CLOSE)
        for shard, rows in rank.shards:
            wanted = part_of(tables[shard.table].detach(), shard)
            torch.testing.assert_close(rows, wanted, **CLOSE)


def is_table(name: str) -> bool:
    """Whether a parameter of a whole model is a table."""
    return ".embeddings." in name or ".embedding_bags." in name


def _descend(parameters: list[Tensor], grads: list[Tensor], lr: float) -> None:
    with torch.no_grad():
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter -= lr * grad
