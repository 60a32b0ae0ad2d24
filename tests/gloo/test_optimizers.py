"""Optimizers chosen per table by marks, schedules and clipping, trained by real ranks: N ranks
equal one.
"""

from __future__ import annotations

import pytest
import torch

from rayrec.distributed import DistributedModelParallel
from rayrec.optim import (
    LAMB,
    Adam,
    CombinedOptimizer,
    FusedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
    LarsSGD,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    SparseOptimizer,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
    apply_optimizer_in_backward,
    optimizer_of,
)
from rayrec.train.step import train_step
from tests.gloo.small_dlrm import STEPS, build, make_plan, parts
from tests.ranks import RankPool
from tests.worlds import part_of

# of the four tables: table-wise, row-wise, replicated, table-wise
MIXTURES: dict[str, list[SparseOptimizer]] = {
    "adam": [
        Adam(0.05, eps=1e-3),
        Adam(0.05, eps=1e-3),
        Adam(0.05, eps=1e-3),
        Adam(0.05, eps=1e-3),
    ],
    "all different": [
        LAMB(0.05, eps=1e-3),
        PartialRowWiseAdam(0.05, eps=1e-3),
        LarsSGD(0.5, eta=0.1),
        RowWiseAdagrad(0.05, weight_decay=0.1),
    ],
}
STAGES = [
    WarmupStage(WarmupPolicy.LINEAR, 4, 0.0),
    WarmupStage(WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS, 12, 0.1, sgdr_period=16),
]


def train(rank: int, world_size: int, mixture: str, scheduled: bool):
    """Loss sums by step, the tables as rectangles, and the learning rates of the last step."""
    module = build()
    for i, optimizer in enumerate(MIXTURES[mixture]):
        table = next(
            m for name, m in module.named_modules() if name.endswith(f"embedding_bags.t{i}")
        )
        apply_optimizer_in_backward(type(optimizer), table.parameters(), optimizer.hyperparameters)
    marked = {
        name.split(".")[-2]: optimizer_of(p)
        for name, p in module.named_parameters()
        if optimizer_of(p) is not None
    }
    model = DistributedModelParallel(
        module, plan=make_plan("mixed", world_size), sparse_optimizer=marked
    )
    dense = KeyedOptimizerWrapper(
        dict(model.dense_parameters()), lambda params: torch.optim.Adam(params, lr=1e-2, eps=1e-4)
    )
    fused = FusedOptimizer([lookup.kernel for lookup in model._engine.lookups.values()])
    clipped = GradientClippingOptimizer(dense, GradientClipping.NORM, max_gradient=0.5)
    optimizer = CombinedOptimizer([("dense", clipped), ("tables", fused)])
    if scheduled:
        optimizer = WarmupOptimizer(optimizer, STAGES, lr=None)
    losses = [
        float(train_step(model, optimizer, parts(step, rank, world_size), world_size).loss_sum)
        for step in range(STEPS)
    ]
    tables = [(s.shard, s.weight.detach().clone()) for s in model.shard_states()]
    return (
        losses,
        tables,
        sorted(
            {
                round(group["lr"] / base, 9)
                for group, base in zip(fused.param_groups, bases(fused), strict=True)
            }
        ),
    )


def bases(fused: FusedOptimizer) -> list[float]:
    return [kernel.optimizer.lr for kernel in fused._kernels]


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_1_2_and_4_ranks_train_alike(ranks: RankPool, mixture: str, scheduled: bool) -> None:
    # float32 sums over ranks in another order, divided by roots of second moments
    close = {"rtol": 2e-4, "atol": 2e-5}
    runs = {w: ranks.run(w, train, mixture, scheduled) for w in (1, 2, 4)}
    whole = {shard.table: weight for shard, weight in runs[1][0][1]}
    for results in runs.values():
        torch.testing.assert_close(
            torch.tensor([r[0] for r in results]).sum(0), torch.tensor(runs[1][0][0]), **close
        )
        for _, tables, factors in results:
            assert factors in ([], runs[1][0][2])
            for shard, weight in tables:
                torch.testing.assert_close(weight, part_of(whole[shard.table], shard), **close)


def test_the_schedule_reaches_the_tables(ranks: RankPool) -> None:
    plain, scheduled = ranks.run(2, train, "adam", False)[0], ranks.run(2, train, "adam", True)[0]
    # step 8 of 16 of the cosine from 1 to 0.1
    assert plain[2] == [1.0] and scheduled[2] == pytest.approx([0.55])
    assert any(
        (a - b).abs().max() > 1e-3 for (_, a), (_, b) in zip(plain[1], scheduled[1], strict=True)
    )


def sharded_norm(rank: int, world_size: int, norm_type: float):
    """A parameter of which each rank has a part, and one that is the same on all: the norm and the
    clipped gradients.
    """
    part, same = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
    keyed = KeyedOptimizerWrapper(
        {"part": part, "same": same}, lambda params: torch.optim.SGD(params, lr=1.0)
    )
    groups = {part: [torch.distributed.group.WORLD]}
    optimizer = GradientClippingOptimizer(
        keyed,
        GradientClipping.NORM,
        1.0,
        norm_type,
        enable_global_grad_clip=True,
        param_to_pgs=groups,
    )
    part.grad, same.grad = torch.tensor([3.0, 4.0]) * rank, torch.tensor([2.0])
    if rank == 0:
        part.grad = None
    optimizer.step()
    return float(optimizer.last_total_grad_norm), part.detach().clone(), same.detach().clone()


@pytest.mark.parametrize("norm_type, norm", [(2.0, 29**0.5), (1.0, 9.0), (float("inf"), 4.0)])
def test_the_norm_of_sharded_parameters_is_of_all_ranks(
    ranks: RankPool, norm_type: float, norm: float
) -> None:
    for rank, (found, part, same) in enumerate(ranks.run(2, sharded_norm, norm_type)):
        assert found == pytest.approx(norm)
        torch.testing.assert_close(
            part, -torch.tensor([3.0, 4.0]) * rank / norm, rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(same, -torch.tensor([2.0]) / norm, rtol=1e-5, atol=1e-6)
