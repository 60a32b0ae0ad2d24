"""Clipping of dense gradients by norm and by value."""

from __future__ import annotations

import math

import pytest
import torch

from rayrec.errors import ConfigError
from rayrec.optim import GradientClipping, GradientClippingOptimizer, KeyedOptimizerWrapper
from tests.unit.optim_worlds import dense_model, keyed_adam


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
