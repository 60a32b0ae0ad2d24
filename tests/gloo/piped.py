"""Kinds of pipelines, what a run of one leaves, and how two runs are compared."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rayrec.distributed import DistributedModelParallel
from rayrec.train.pipeline import TrainPipelineBase, TrainPipelineSparseDist

PIPELINES = {"base": TrainPipelineBase, "sparse": TrainPipelineSparseDist}


class Outcome(NamedTuple):
    losses: list[float]
    outputs: list[torch.Tensor]
    dense: dict[str, torch.Tensor]
    tables: list[torch.Tensor]


def outcome(
    model: DistributedModelParallel, losses: list[Any], outputs: list[torch.Tensor]
) -> Outcome:
    dense = {n: p.detach().clone() for n, p in model.named_parameters()}
    return Outcome(
        [float(x) for x in losses],
        outputs,
        dense,
        [s.weight.detach().clone() for s in model.shard_states()],
    )


def count_prefetches(model: DistributedModelParallel) -> list[bool]:
    started: list[bool] = []
    prefetch = model.prefetch
    model.prefetch = lambda kjt: started.append(prefetch(kjt)) or started[-1]  # type: ignore[method-assign, func-returns-value]
    return started


def assert_equal(got: Outcome, wanted: Outcome) -> None:
    assert got.losses == wanted.losses
    for name in ("outputs", "tables"):
        for a, b in zip(getattr(got, name), getattr(wanted, name), strict=True):
            assert torch.equal(a, b), name
    assert got.dense.keys() == wanted.dense.keys() and all(
        torch.equal(v, wanted.dense[n]) for n, v in got.dense.items()
    )
