"""Optimizers by parameter name, schedules that reach the lookup kernels, clipping, and marks on
tables.
"""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from rayrec.distributed.kernels.lookup import make_lookup
from rayrec.errors import CheckpointError, ConfigError
from rayrec.layout import EmbeddingBagConfig
from rayrec.modules import EmbeddingBagCollection
from rayrec.optim import (
    LAMB,
    SGD,
    SPARSE_OPTIMIZERS,
    Adagrad,
    Adam,
    CombinedOptimizer,
    DenseRowWiseAdagrad,
    FusedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    LarsSGD,
    RowWiseAdagrad,
    SparseOptimizer,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
    apply_optimizer_in_backward,
    learning_rate_at,
    optimizer_of,
    sparse_optimizer,
)
from tests.optim_reference import Work, random_work

CPU = torch.device("cpu")
SEED = 5  # a group of several shards whose first batches are not empty


def kernel_of(optimizer: SparseOptimizer, seed: int = SEED):
    """A kernel with random rows, and its work."""
    work = random_work(seed, optimizer, weighted=False)
    lookup = make_lookup(work.group, optimizer, CPU)
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


# learning rates that reach the kernels


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


# state by name


def test_state_is_by_name_whatever_the_order() -> None:
    first, second = dense_model(), dense_model()
    a = keyed_adam(first)
    for _ in range(3):
        dense_step(first, a)
    saved = a.state_dict()
    assert set(saved["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    second.load_state_dict(first.state_dict())
    backwards = dict(reversed(list(second.named_parameters())))
    b = KeyedOptimizerWrapper(backwards, lambda params: torch.optim.Adam(params, lr=0.7))
    b.load_state_dict(saved)
    for _ in range(2):
        dense_step(first, a)
        dense_step(second, b)
    assert all(
        torch.equal(x, y) for x, y in zip(first.parameters(), second.parameters(), strict=True)
    )


@pytest.mark.parametrize("optimizer", [Adagrad(0.1), Adam(0.1)], ids=lambda o: o.name)
def test_fused_state_restores_the_run(optimizer: SparseOptimizer) -> None:
    (trained, work), (restored, _) = kernel_of(optimizer), kernel_of(optimizer)
    train(trained, work, 3)
    saved = FusedOptimizer([trained], lambda t: f"ebc.embedding_bags.{t}.weight")
    assert "ebc.embedding_bags.t0.weight" in saved.state_dict()["state"]
    FusedOptimizer([restored], lambda t: f"ebc.embedding_bags.{t}.weight").load_state_dict(
        saved.state_dict()
    )
    routed, grad = work.batch(6), work.grad(6)
    for a, b in zip(trained.shard_states(), restored.shard_states(), strict=True):
        b.weight.copy_(a.weight)
    for lookup in (trained, restored):
        lookup(routed).backward(grad.clone())
    for a, b in zip(trained.shard_states(), restored.shard_states(), strict=True):
        assert torch.equal(a.weight, b.weight)


def test_state_of_another_model_or_optimizer_is_refused() -> None:
    (lookup, _), (other, _) = kernel_of(Adam(0.1)), kernel_of(Adam(0.1, beta1=0.5))
    saved = FusedOptimizer([other]).state_dict()
    with pytest.raises(CheckpointError, match=r"beta1=0\.5"):
        FusedOptimizer([lookup]).load_state_dict(saved)
    with pytest.raises(CheckpointError, match="lacks"):
        FusedOptimizer([lookup]).load_state_dict({"state": {}})
    with pytest.raises(CheckpointError, match="not optimized here"):
        renamed = FusedOptimizer([lookup], lambda table: f"x.{table}")
        renamed.load_state_dict({"state": {**saved["state"], **renamed.state_dict()["state"]}})
    wide = {
        name: {key: torch.zeros(1, 1) for key in state} for name, state in saved["state"].items()
    }
    with pytest.raises(CheckpointError, match=r"shape \(1, 1\)"):
        FusedOptimizer([lookup]).load_state_dict({"state": wide})


class Still(KeyedOptimizer):
    """An optimizer that does nothing."""

    def step(self, closure=None) -> None:
        pass


def test_a_fresh_optimizer_takes_no_state_of_another() -> None:
    first, second = dense_model(), dense_model()
    a = KeyedOptimizerWrapper(
        dict(first.named_parameters()), lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)
    )
    dense_step(first, a)
    with pytest.raises(
        CheckpointError,
        match=r"'0.weight' holds \['momentum_buffer'\], this optimizer's "
        r"\['exp_avg', 'exp_avg_sq', 'step'\]",
    ):
        keyed_adam(second).load_state_dict(a.state_dict())
    with pytest.raises(CheckpointError, match=r"\['exp_avg', 'exp_avg_sq', 'foreign', 'step'\]"):
        b = keyed_adam(first)
        dense_step(first, b)
        saved = b.state_dict()
        saved["state"]["0.bias"]["foreign"] = torch.zeros(4)
        keyed_adam(second).load_state_dict(saved)
    with pytest.raises(ConfigError, match=r"shape \(3,\), which has no name"):
        Still(dict(first.named_parameters()), {torch.zeros(3): {}}, [])


def pickled(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda keyed: keyed,
        lambda keyed: CombinedOptimizer([("a", keyed)]),
        lambda keyed: GradientClippingOptimizer(keyed, GradientClipping.NORM, 0.5),
        lambda keyed: WarmupOptimizer(
            CombinedOptimizer([GradientClippingOptimizer(keyed)]),
            [WarmupStage(max_iters=9, value=0.0)],
        ),
    ],
    ids=["keyed", "combined", "clipped", "all"],
)
def test_a_copy_trains_on_as_the_original_and_apart_from_it(wrap, duplicate) -> None:
    model = dense_model()
    optimizer = wrap(keyed_adam(model))
    # puts a `step` of its own on the optimizer
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for _ in range(2):
        dense_step(model, optimizer)
    twin_model, twin = duplicate((model, optimizer))
    before = [p.detach().clone() for p in twin_model.parameters()]
    for _ in range(2):
        dense_step(model, optimizer)
    assert all(torch.equal(p, w) for p, w in zip(twin_model.parameters(), before, strict=True))
    for _ in range(2):
        dense_step(twin_model, twin)
    assert all(
        torch.equal(p, w) for p, w in zip(twin_model.parameters(), model.parameters(), strict=True)
    )
    mine, theirs = optimizer.state_dict(), twin.state_dict()
    assert (
        mine["param_groups"] == theirs["param_groups"]
        and mine["state"].keys() == theirs["state"].keys()
    )
    twin.load_state_dict(mine)


def test_combined_state_keeps_each_part_its_own() -> None:
    models = [dense_model(0), dense_model(1)]

    def make() -> CombinedOptimizer:
        stages = [WarmupStage(max_iters=9, value=0.0)]
        return CombinedOptimizer(
            [("a", WarmupOptimizer(keyed_adam(models[0]), stages)), ("b", keyed_adam(models[1]))]
        )

    first = make()
    for _ in range(3):
        for model in models:
            model(torch.ones(2, 3)).sum().backward()
        first.step()
        first.zero_grad()
    saved = first.state_dict()
    assert {"a.0.weight", "b.0.weight", "a.__warmup"} <= set(saved["state"])
    second = make()
    second.load_state_dict(saved)
    assert second.param_groups[0]["lr"] == pytest.approx(0.1 * 3 / 9)
    for name, state in second.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(value, saved["state"][name][key])
    with pytest.raises(ConfigError, match="prefix"):
        CombinedOptimizer([keyed_adam(models[0]), keyed_adam(models[1])])


def test_a_rank_without_shards_has_an_optimizer_that_does_nothing() -> None:
    optimizer = CombinedOptimizer(
        [("dense", keyed_adam(dense_model())), ("tables", FusedOptimizer([]))]
    )
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())


# clipping


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_clipping_by_norm_takes_all_parameters_together(limit: float) -> None:
    model = dense_model()
    params = dict(model.named_parameters())
    optimizer = GradientClippingOptimizer(
        KeyedOptimizerWrapper(params, lambda p: torch.optim.SGD(p, 1.0)),
        GradientClipping.NORM,
        limit,
    )
    model(torch.ones(2, 3)).sum().backward()
    before = {name: p.detach().clone() for name, p in params.items()}
    grads = {name: p.grad.clone() for name, p in params.items()}
    norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
    optimizer.step()
    for name, p in params.items():
        torch.testing.assert_close(
            before[name] - p, grads[name] * min(1.0, limit / norm), rtol=1e-4, atol=1e-6
        )
    assert float(optimizer.last_total_grad_norm) == pytest.approx(norm)


def test_clipping_by_value_clamps_elements() -> None:
    model = dense_model()
    params = dict(model.named_parameters())
    optimizer = GradientClippingOptimizer(
        KeyedOptimizerWrapper(params, lambda p: torch.optim.SGD(p, 1.0)),
        GradientClipping.VALUE,
        0.25,
    )
    model(torch.ones(2, 3)).sum().backward()
    before, grads = (
        [p.detach().clone() for p in params.values()],
        [p.grad.clone() for p in params.values()],
    )
    optimizer.step()
    for p, w, g in zip(params.values(), before, grads, strict=True):
        torch.testing.assert_close(w - p, g.clamp(-0.25, 0.25))
    with pytest.raises(ConfigError, match="max_gradient=0"):
        GradientClippingOptimizer(keyed_adam(model), GradientClipping.VALUE, max_gradient=0.0)


@pytest.mark.parametrize("norm_type", [1, 2.0, "inf"])
def test_nothing_is_clipped_unless_told_and_the_norm_is_tracked_when_told(
    norm_type: float | str,
) -> None:
    model = dense_model()
    params = dict(model.named_parameters())
    sgd = KeyedOptimizerWrapper(params, lambda p: torch.optim.SGD(p, 1.0))
    plain, tracked = (
        GradientClippingOptimizer(sgd),
        GradientClippingOptimizer(sgd, norm_type=norm_type, track_grad_norm=True),
    )
    for optimizer in (plain, tracked):
        sgd.zero_grad()
        model(torch.full((2, 3), 9.0)).sum().backward()
        before, grads = (
            [p.detach().clone() for p in params.values()],
            [p.grad.clone() for p in params.values()],
        )
        optimizer.step()
        assert all(
            torch.equal(p, w - g) for p, w, g in zip(params.values(), before, grads, strict=True)
        )
    assert plain.last_total_grad_norm is None
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]), float(norm_type))
    torch.testing.assert_close(tracked.last_total_grad_norm, norm)
    sgd.zero_grad()
    tracked.step()
    assert tracked.last_total_grad_norm is None


def test_options_of_clipping_that_contradict_each_other_are_refused() -> None:
    params = dict(dense_model().named_parameters())
    sgd = KeyedOptimizerWrapper(params, lambda p: torch.optim.SGD(p, 1.0))
    with pytest.raises(ConfigError, match="norm_type=0"):
        GradientClippingOptimizer(sgd, norm_type=0)
    with pytest.raises(ConfigError, match="enable_global_grad_clip=True"):
        GradientClippingOptimizer(
            sgd, GradientClipping.NORM, param_to_pgs={params["0.weight"]: [object()]}
        )


# values and marks


@pytest.mark.parametrize("name", SPARSE_OPTIMIZERS)
def test_an_optimizer_is_rebuilt_from_its_name_and_constants(name: str) -> None:
    optimizer = SPARSE_OPTIMIZERS[name](lr=0.3, weight_decay=0.1, max_row_norm=2.0)
    assert sparse_optimizer(name, **optimizer.hyperparameters) == optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD(-1.0),
        lambda: SGD(math.nan),
        lambda: SGD(weight_decay=-0.1),
        lambda: SGD(max_row_norm=0.0),
        lambda: Adam(beta1=1.0),
        lambda: LAMB(beta2=1.5),
        lambda: LarsSGD(momentum=1.0),
        lambda: Adagrad(weight_decay_mode="L1"),
        lambda: sparse_optimizer("adamw", 0.1),
        lambda: sparse_optimizer("sgd", 0.1, eps=1e-3),
        lambda: WarmupStage(max_iters=0),
        lambda: WarmupStage(value=-1.0),
        lambda: WarmupStage(sgdr_period=0),
        lambda: WarmupStage(WarmupPolicy.INTERPOLATE, 4, end_value=1.0),
        lambda: WarmupStage(
            WarmupPolicy.INTERPOLATE, 4, start_interpolating_iters=4, end_value=1.0
        ),
    ],
)
def test_impossible_options_are_refused(make) -> None:
    with pytest.raises(ConfigError):
        make()


def collection() -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(10, 8, name=f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


@pytest.mark.parametrize(
    ("cls", "kwargs", "want"),
    [
        (RowWiseAdagrad, {"lr": 0.2, "eps": 1e-3}, RowWiseAdagrad(0.2, eps=1e-3)),
        (Adam, {"lr": 0.2, "betas": (0.5, 0.6)}, Adam(0.2, beta1=0.5, beta2=0.6)),
        (torch.optim.SGD, {"lr": 0.2}, SGD(0.2)),
        (torch.optim.SGD, {"lr": 0.2, "weight_decay": 0.1}, SGD(0.2, weight_decay=0.1)),
        (torch.optim.Adagrad, {}, Adagrad(0.01, eps=1e-10)),
        (
            torch.optim.Adam,
            {"weight_decay": 0.1},
            Adam(1e-3, weight_decay=0.1, weight_decay_mode="l2"),
        ),
        (
            torch.optim.AdamW,
            {"betas": (0.5, 0.6)},
            Adam(1e-3, beta1=0.5, beta2=0.6, weight_decay=0.01),
        ),
        (torch.optim.SparseAdam, {"lr": 0.2}, Adam(0.2, weight_decay_mode="l2")),
        (DenseRowWiseAdagrad, {"lr": 0.2}, RowWiseAdagrad(0.2, eps=1e-10)),
    ],
    ids=str,
)
def test_marks_are_read_back_as_specs(cls, kwargs, want) -> None:
    module = collection()
    apply_optimizer_in_backward(cls, module.embedding_bags["t0"].parameters(), kwargs)
    assert optimizer_of(module.embedding_bags["t0"].weight) == want
    assert optimizer_of(module.embedding_bags["t1"].weight) is None
    apply_optimizer_in_backward(cls, module, kwargs)  # the same again is no contradiction
    assert optimizer_of(module.embedding_bags["t1"].weight) == want


@pytest.mark.parametrize(
    ("cls", "kwargs", "match"),
    [
        (torch.optim.NAdam, {}, "no counterpart.*PartialRowWiseAdam"),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "momentum=0.9"),
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad"),
        (torch.optim.Adagrad, {"lr_decay": 0.1}, "lr_decay"),
        (torch.optim.SGD, {"rate": 0.1}, "rate"),
        (RowWiseAdagrad, {"rate": 0.1}, "rate"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(cls, kwargs, match) -> None:
    with pytest.raises(ConfigError, match=match):
        apply_optimizer_in_backward(cls, collection(), kwargs)


def test_two_different_marks_on_one_table_are_refused() -> None:
    module = collection()
    apply_optimizer_in_backward(SGD, module, {"lr": 0.1})
    with pytest.raises(ConfigError, match="marked with SGD"):
        apply_optimizer_in_backward(Adam, module, {"lr": 0.1})


# a torch optimizer with one state per row


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


@pytest.mark.parametrize("name", SPARSE_OPTIMIZERS)
def test_the_page_about_optimizers_has_its_line_and_state(name: str) -> None:
    kind = SPARSE_OPTIMIZERS[name]
    widths = list(kind.state_widths.values())
    rows, elements = widths.count("row"), widths.count("element")
    parts = ["D" if elements == 1 else f"{elements} D"] * bool(elements) + [str(rows)] * bool(rows)
    page = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith(f"| `{kind.__name__}(")]
    assert [cell.strip() for cell in line.split("|")][2:4] == [
        f"`{name}`",
        " + ".join(parts) or "none",
    ]
