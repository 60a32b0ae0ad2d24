"""Optimizers by parameter name, schedules that reach the lookup kernels, clipping, and marks on tables."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rayrec.distributed.lookup import make_lookup
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
    FusedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
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
    return max(float((state.weight - w).abs().max()) for state, w in zip(lookup.shard_states(), before, strict=True))


def dense_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def dense_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def keyed_adam(model: nn.Module) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(dict(model.named_parameters()), lambda params: torch.optim.Adam(params, lr=0.1))


# learning rates that reach the kernels


@pytest.mark.parametrize("optimizer", [SGD(0.1), RowWiseAdagrad(0.1), Adam(0.1)], ids=lambda o: o.name)
def test_a_written_learning_rate_reaches_the_kernel_at_once(optimizer: SparseOptimizer) -> None:
    lookup, work = kernel_of(optimizer)
    fused = FusedOptimizer([lookup])
    assert train(lookup, work) > 1e-3
    fused.param_groups[0]["lr"] = 0.0
    assert train(lookup, work) == 0.0
    fused.param_groups[0].update(lr=0.1)  # unseen by the group: the next step or zero_grad passes it on
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
    combined = CombinedOptimizer([("dense", keyed_adam(model)), ("tables", FusedOptimizer([lookup]))])
    stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=4, value=0.0), WarmupStage(policy=WarmupPolicy.CONSTANT, value=0.5)]
    optimizer = WarmupOptimizer(combined, stages)
    rates, moved = [], []
    for _ in range(6):
        rates.append([group["lr"] for group in optimizer.param_groups])
        moved.append(train(lookup, work))
        dense_step(model, optimizer)
    torch.testing.assert_close(torch.tensor(rates), torch.tensor([0, 0.25, 0.5, 0.75, 0.5, 0.5])[:, None] * torch.tensor([0.1, 0.4]))
    assert moved[0] == 0.0 and moved[3] > 1e-3


@pytest.mark.parametrize(
    ("stage", "factors"),
    [
        (WarmupStage(policy=WarmupPolicy.NONE, max_iters=3), [1, 1, 1]),
        (WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=4, value=0.2), [0.2, 0.4, 0.6, 0.8, 1.0]),
        (WarmupStage(policy=WarmupPolicy.CONSTANT, max_iters=2, value=0.3), [0.3, 0.3, 0.3]),
        (WarmupStage(policy=WarmupPolicy.POLY, max_iters=4, value=2.0), [1, 0.5625, 0.25, 0.0625, 0, 0]),
        (WarmupStage(policy=WarmupPolicy.STEP, max_iters=6, value=0.1, decay_iters=2), [1, 1, 0.1, 0.1, 0.01, 0.01, 0.001]),
        (WarmupStage(policy=WarmupPolicy.INVSQRT, max_iters=4), [1, 0.5**0.5, 3**-0.5, 0.5]),
        (WarmupStage(policy=WarmupPolicy.COSINE, max_iters=4, value=0.5), [1, 0.75 + 0.25 * 0.5**0.5, 0.75, 0.75 - 0.25 * 0.5**0.5, 0.5]),
        (WarmupStage(policy=WarmupPolicy.COSINE, max_iters=4, sgdr_period=2), [1, 0.5, 1, 0.5, 0]),
        (WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=2, lr_scale=3.0), [0, 1.5, 3]),
    ],
    ids=lambda v: v.policy.value if isinstance(v, WarmupStage) else "",
)
def test_factors_of_a_stage(stage: WarmupStage, factors: list[float]) -> None:
    assert [learning_rate_at(i, 2.0, [stage]) / 2 for i in range(len(factors))] == pytest.approx(factors)


def test_a_schedule_goes_on_where_it_was_saved() -> None:
    stages = [WarmupStage(max_iters=8)]
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
    assert all(torch.equal(x, y) for x, y in zip(first.parameters(), second.parameters(), strict=True))
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
    assert all(torch.equal(x, y) for x, y in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("optimizer", [Adagrad(0.1), Adam(0.1)], ids=lambda o: o.name)
def test_fused_state_restores_the_run(optimizer: SparseOptimizer) -> None:
    (trained, work), (restored, _) = kernel_of(optimizer), kernel_of(optimizer)
    train(trained, work, 3)
    saved = FusedOptimizer([trained], lambda t: f"ebc.embedding_bags.{t}.weight")
    assert "ebc.embedding_bags.t0.weight" in saved.state_dict()["state"]
    FusedOptimizer([restored], lambda t: f"ebc.embedding_bags.{t}.weight").load_state_dict(saved.state_dict())
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
    wide = {name: {key: torch.zeros(1, 1) for key in state} for name, state in saved["state"].items()}
    with pytest.raises(CheckpointError, match=r"shape \(1, 1\)"):
        FusedOptimizer([lookup]).load_state_dict({"state": wide})


def test_combined_state_keeps_each_part_its_own() -> None:
    models = [dense_model(0), dense_model(1)]

    def make() -> CombinedOptimizer:
        stages = [WarmupStage(max_iters=9)]
        return CombinedOptimizer([("a", WarmupOptimizer(keyed_adam(models[0]), stages)), ("b", keyed_adam(models[1]))])

    first = make()
    for _ in range(3):
        for model in models:
            model(torch.ones(2, 3)).sum().backward()
        first.step()
        first.zero_grad()
    saved = first.state_dict()
    assert {"a.0.weight", "b.0.weight"} <= set(saved["state"])
    second = make()
    second.load_state_dict(saved)
    assert second.param_groups[0]["lr"] == pytest.approx(0.1 * 3 / 9)
    for name, state in second.state_dict()["state"].items():
        assert torch.equal(state["exp_avg"], saved["state"][name]["exp_avg"])
    with pytest.raises(ConfigError, match="prefix"):
        CombinedOptimizer([keyed_adam(models[0]), keyed_adam(models[1])])


def test_a_rank_without_shards_has_an_optimizer_that_does_nothing() -> None:
    optimizer = CombinedOptimizer([("dense", keyed_adam(dense_model())), ("tables", FusedOptimizer([]))])
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())


# clipping


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_clipping_by_norm_takes_all_parameters_together(limit: float) -> None:
    model = dense_model()
    params = dict(model.named_parameters())
    optimizer = GradientClippingOptimizer(KeyedOptimizerWrapper(params, lambda p: torch.optim.SGD(p, 1.0)), GradientClipping.NORM, limit)
    model(torch.ones(2, 3)).sum().backward()
    before = {name: p.detach().clone() for name, p in params.items()}
    grads = {name: p.grad.clone() for name, p in params.items()}
    norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
    optimizer.step()
    for name, p in params.items():
        torch.testing.assert_close(before[name] - p, grads[name] * min(1.0, limit / norm), rtol=1e-4, atol=1e-6)
    assert float(optimizer.last_norm) == pytest.approx(norm)


def test_clipping_by_value_clamps_elements() -> None:
    model = dense_model()
    params = dict(model.named_parameters())
    optimizer = GradientClippingOptimizer(KeyedOptimizerWrapper(params, lambda p: torch.optim.SGD(p, 1.0)), GradientClipping.VALUE, 0.25)
    model(torch.ones(2, 3)).sum().backward()
    before, grads = [p.detach().clone() for p in params.values()], [p.grad.clone() for p in params.values()]
    optimizer.step()
    for p, w, g in zip(params.values(), before, grads, strict=True):
        torch.testing.assert_close(w - p, g.clamp(-0.25, 0.25))
    with pytest.raises(ConfigError, match="max_gradient=0"):
        GradientClippingOptimizer(keyed_adam(model), max_gradient=0.0)


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
        (torch.optim.Adam, {"weight_decay": 0.1}, Adam(1e-3, weight_decay=0.1, weight_decay_mode="l2")),
        (torch.optim.AdamW, {"betas": (0.5, 0.6)}, Adam(1e-3, beta1=0.5, beta2=0.6, weight_decay=0.01)),
        (torch.optim.SparseAdam, {"lr": 0.2}, Adam(0.2, weight_decay_mode="l2")),
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
        (torch.optim.RMSprop, {}, "no counterpart.*PartialRowWiseAdam"),
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
