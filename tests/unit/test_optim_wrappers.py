"""The state of optimizers by parameter name: its order, copies, parts, and what is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from rayrec.errors import CheckpointError, ConfigError
from rayrec.optim import (
    Adagrad,
    Adam,
    CombinedOptimizer,
    FusedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    SparseOptimizer,
    WarmupOptimizer,
    WarmupStage,
)
from tests.unit.optim_worlds import dense_model, dense_step, kernel_of, keyed_adam, train


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
    """Neither its tables, of which it has none, nor dense parameters without a gradient change."""
    model = dense_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = CombinedOptimizer([("dense", keyed_adam(model)), ("tables", FusedOptimizer([]))])
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.state_dict()["state"]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
