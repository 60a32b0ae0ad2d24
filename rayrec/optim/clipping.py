"""Gradient clipping of dense parameters, by value or by the norm of all of them together.

Data-parallel training averages the dense gradients, so every rank holds the same ones, computes the same norm and clips alike: no
exchange is needed. Tables are clipped inside their lookup kernels, by the options of their optimizer: `max_gradient` clamps the elements
of a bag's gradient, `max_row_norm` scales down a row's summed gradient. A norm over all tables would need a pass over the step's
gradients before the first update, and does not exist here.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor

from rayrec.errors import ConfigError
from rayrec.optim.keyed import KeyedOptimizer, OptimizerWrapper


class GradientClipping(Enum):
    """How gradients are clipped."""

    NORM = "norm"  # all scaled by one factor, so that their joint norm is at most max_gradient
    VALUE = "value"  # each element clamped to +- max_gradient
    NONE = "none"


class GradientClippingOptimizer(OptimizerWrapper):
    """An optimizer that clips gradients before each step.

    Args:
        optimizer: whose parameters' gradients are clipped; those without a gradient are passed over.
        clipping: how.
        max_gradient: the limit.
        norm_type: of NORM; 2.0, or inf for the largest element.
    Raises:
        ConfigError: the limit is not positive.
    Attributes:
        last_norm: joint norm of the gradients before clipping, of the last step; None unless clipping by norm.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        clipping: GradientClipping = GradientClipping.NORM,
        max_gradient: float = 0.1,
        norm_type: float = 2.0,
    ) -> None:
        if clipping is not GradientClipping.NONE and not max_gradient > 0:
            raise ConfigError(f"GradientClippingOptimizer(max_gradient={max_gradient}): the limit must be above zero.")
        super().__init__(optimizer)
        self._clipping, self._max_gradient, self._norm_type = clipping, max_gradient, norm_type
        self.last_norm: Tensor | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip, then step."""
        parameters = [p for p in self.params.values() if p.grad is not None]
        if parameters and self._clipping is GradientClipping.NORM:
            self.last_norm = torch.nn.utils.clip_grad_norm_(parameters, self._max_gradient, self._norm_type)
        elif parameters and self._clipping is GradientClipping.VALUE:
            torch.nn.utils.clip_grad_value_(parameters, self._max_gradient)
        super().step(closure)
