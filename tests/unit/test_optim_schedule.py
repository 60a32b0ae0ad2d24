"""Learning rates that reach the lookup kernels: schedulers, warm-up and its stages."""

from __future__ import annotations

import pytest
import torch

from rayrec.errors import CheckpointError, ConfigError
from rayrec.optim import (
    SGD,
    Adam,
    CombinedOptimizer,
    FusedOptimizer,
    KeyedOptimizerWrapper,
    RowWiseAdagrad,
    SparseOptimizer,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
    learning_rate_at,
)
from tests.unit.optim_worlds import dense_model, dense_step, kernel_of, keyed_adam, train


@pytest.mark.parametrize(
    "optimizer", [SGD(0.1), RowWiseAdagrad(0.1), Adam(0.1)], ids=lambda o: o.name
)
def test_a_written_learning_rate_reaches_the_kernel_at_once(optimizer: SparseOptimizer) -> None:
    lookup, work = kernel_of(optimizer)
    fused = FusedOptimizer([lookup])
    assert train(lookup, work) > 1e-3
    fused.param_groups[0]["lr"] = 0.0
    assert train(lookup, work) == 0.0
    # unseen by the group: the next step or zero_grad passes it on
    fused.param_groups[0].update(lr=0.1)
    fused.zero_grad()
    assert train(lookup, work, 2) > 1e-3


def test_a_second_optimizer_of_a_kernel_has_the_rate_that_the_first_one_wrote() -> None:
    lookup, work = kernel_of(SGD(0.1))
    FusedOptimizer([lookup]).param_groups[0]["lr"] = 0.0
    second = FusedOptimizer([lookup])
    second.step()
    assert second.param_groups[0]["lr"] == 0.0 and train(lookup, work) == 0.0
    assert second.own_rates() == [0.1]


def test_torchs_schedulers_drive_the_kernels() -> None:
    lookup, work = kernel_of(SGD(0.1))
    fused = FusedOptimizer([lookup])
    scheduler = torch.optim.lr_scheduler.LambdaLR(fused, lambda step: 1.0 if step == 0 else 0.0)
    assert train(lookup, work) > 1e-3
    fused.step()
    scheduler.step()
    assert train(lookup, work) == 0.0


def test_warm_up_drives_dense_parameters_and_tables_alike() -> None:
    model, (lookup, work) = dense_model(), kernel_of(SGD(0.4))
    combined = CombinedOptimizer(
        [("dense", keyed_adam(model)), ("tables", FusedOptimizer([lookup]))]
    )
    stages = [WarmupStage(WarmupPolicy.LINEAR, 3, 0.0), WarmupStage(WarmupPolicy.CONSTANT, 4, 0.5)]
    optimizer = WarmupOptimizer(combined, stages, lr=None)
    rates, moved = [], []
    for _ in range(6):
        rates.append([group["lr"] for group in optimizer.param_groups])
        moved.append(train(lookup, work))
        dense_step(model, optimizer)
    torch.testing.assert_close(
        torch.tensor(rates),
        torch.tensor([0, 1 / 3, 2 / 3, 1, 0.5, 1])[:, None] * torch.tensor([0.1, 0.4]),
    )
    assert moved[0] == 0.0 and moved[3] > 1e-3


COSINE = WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS


@pytest.mark.parametrize(
    ("stage", "factors"),  # the stage's own factors up to step max_iters, and then 1
    [
        (WarmupStage(), [1, 1, 1]),
        (WarmupStage(WarmupPolicy.NONE, 2, 0.3), [1, 1, 1, 1]),
        (WarmupStage(WarmupPolicy.LINEAR, 4, 0.2), [0.2, 0.4, 0.6, 0.8, 1.0, 1, 1]),
        (WarmupStage(WarmupPolicy.LINEAR, 2, 0.0, 3.0), [0, 1.5, 3, 1, 1]),
        (WarmupStage(WarmupPolicy.CONSTANT, 2, 0.3), [0.3, 0.3, 0.3, 1, 1]),
        (WarmupStage(WarmupPolicy.POLY, 4, 2.0), [1, 0.5625, 0.25, 0.0625, 0, 1, 1]),
        (WarmupStage(WarmupPolicy.POLY, 2, 1.0, decay_iters=4), [1, 0.75, 0.5, 1, 1]),
        (WarmupStage(WarmupPolicy.STEP, 3, 0.5), [1, 0.5, 0.25, 0.125, 1, 1]),
        (WarmupStage(WarmupPolicy.STEP, 5, 0.1, decay_iters=2), [1, 1, 0.1, 0.1, 0.01, 0.01, 1]),
        (WarmupStage(COSINE, 3, 0.5), [1, 1, 1, 1, 1]),
        (
            WarmupStage(COSINE, 5, 0.2, sgdr_period=4),
            [1, 0.6 + 0.2 * 2**0.5, 0.6, 0.6 - 0.2 * 2**0.5, 1, 0.6 + 0.2 * 2**0.5, 1],
        ),
        (
            WarmupStage(
                WarmupPolicy.INTERPOLATE, 4, 0.2, start_interpolating_iters=0, end_value=1.0
            ),
            [0.2, 0.4, 0.6, 0.8, 1, 1],
        ),
    ],
    ids=lambda v: v.policy.value if isinstance(v, WarmupStage) else "",
)
def test_factors_of_a_stage(stage: WarmupStage, factors: list[float]) -> None:
    assert [learning_rate_at(i, 2.0, [stage]) / 2 for i in range(len(factors))] == pytest.approx(
        factors
    )


def test_stages_share_one_axis_of_steps() -> None:
    stages = [
        WarmupStage(WarmupPolicy.LINEAR, 2, 0.0),
        WarmupStage(WarmupPolicy.INVSQRT, 4),
        WarmupStage(WarmupPolicy.LINEAR, 8, 0.0),
        WarmupStage(WarmupPolicy.INTERPOLATE, 12, 1.0, start_interpolating_iters=8, end_value=0.0),
    ]
    factors = [0, 0.5, 1, 3**-0.5, 0.5, 5 / 8, 6 / 8, 7 / 8, 1, 0.75, 0.5, 0.25, 0, 1, 1]
    assert [learning_rate_at(i, 1.0, stages) for i in range(len(factors))] == pytest.approx(factors)


def test_the_base_learning_rate_is_torchrecs_unless_told() -> None:
    def rates(**options) -> list[float]:
        sgd = KeyedOptimizerWrapper(
            dict(dense_model().named_parameters()),
            lambda p: torch.optim.SGD([{"params": p[:2], "lr": 3.0}, {"params": p[2:], "lr": 5.0}]),
        )
        return [group["lr"] for group in WarmupOptimizer(sgd, [], **options).param_groups]

    assert rates() == [0.1, 0.1]
    assert rates(lr=0.7) == [0.7, 0.7]
    assert rates(lr=None) == [3.0, 5.0]


@pytest.mark.parametrize(
    ("stages", "match"),
    [
        (
            [WarmupStage(max_iters=4), WarmupStage(max_iters=4)],
            "stage 1 ends at step max_iters=4, the one before it at 4",
        ),
        ([WarmupStage(WarmupPolicy.INVSQRT, 4)], "INVSQRT does not begin at step 0"),
        ([WarmupStage(WarmupPolicy.POLY, 4, 0.5, decay_iters=2)], "factor nan at step 4"),
        ([WarmupStage(WarmupPolicy.POLY, 4, 1.0, decay_iters=2)], r"factor -1.0 at step 4"),
        (
            [
                WarmupStage(
                    WarmupPolicy.INTERPOLATE, 4, 0.1, start_interpolating_iters=3, end_value=1.0
                )
            ],
            "at step 0",
        ),
    ],
)
def test_stages_that_make_no_learning_rates_are_refused(stages, match) -> None:
    with pytest.raises(ConfigError, match=match):
        WarmupOptimizer(keyed_adam(dense_model()), stages)


def test_names_of_the_schedule_are_checked() -> None:
    with pytest.raises(ConfigError, match="lr_param='rate'"):
        WarmupOptimizer(keyed_adam(dense_model()), [], lr_param="rate")
    with pytest.raises(ConfigError, match=r"param_name='0\.weight'"):
        WarmupOptimizer(keyed_adam(dense_model()), [], param_name="0.weight")


def test_a_schedule_goes_on_where_it_was_saved() -> None:
    stages = [WarmupStage(max_iters=8, value=0.0)]
    first, second = dense_model(), dense_model()
    a, b = WarmupOptimizer(keyed_adam(first), stages), WarmupOptimizer(keyed_adam(second), stages)
    for _ in range(3):
        dense_step(first, a)
    second.load_state_dict(first.state_dict())
    b.load_state_dict(a.state_dict())
    for _ in range(2):
        dense_step(first, a)
        dense_step(second, b)
    assert a.param_groups[0]["lr"] == b.param_groups[0]["lr"] == pytest.approx(0.1 * 5 / 8)
    assert all(
        torch.equal(x, y) for x, y in zip(first.parameters(), second.parameters(), strict=True)
    )
    with pytest.raises(CheckpointError, match="without a schedule"):
        b.load_state_dict(keyed_adam(dense_model()).state_dict())
