"""Gradient clipping of dense parameters, by value or by the norm of all of them together.

Data-parallel training averages the dense gradients, so every rank holds the same ones, computes
the same norm and clips alike: no exchange is needed. Parameters of which each rank holds a part
(tensor parallelism of the user's own) are named in `param_to_pgs`; their norms are summed over
those groups. Names and defaults are TorchRec's: without `clipping` nothing is clipped.

Tables are clipped inside their lookup kernels, by the options of their optimizer: `max_gradient`
clamps the elements of a bag's gradient, `max_row_norm` scales down a row's summed gradient. A norm
over all tables would need a pass over the step's gradients before the first update, and does not
exist here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rayrec.errors import ConfigError
from rayrec.optim.keyed import KeyedOptimizer, OptimizerWrapper


class GradientClipping(Enum):
    """Ways to clip gradients."""

    NORM = "norm"  # all scaled by one factor, so that their joint norm is at most max_gradient
    VALUE = "value"  # each element clamped to +- max_gradient
    NONE = "none"


class GradientClippingOptimizer(OptimizerWrapper):
    """An optimizer that clips gradients before each step.

    Args:
        optimizer: its parameters' gradients are clipped; parameters without one are passed over.
        clipping: the way to clip; by default gradients stay as they are.
        max_gradient: the limit.
        norm_type: p of the p-norm; inf or "inf" for the largest element.
        enable_global_grad_clip: sum norms over the groups of `param_to_pgs`; every rank of them
            must then step together.
        param_to_pgs: the process groups over which a parameter is sharded, without overlap;
            parameters that it does not name are the same on every rank.
        track_grad_norm: compute the norm also where clipping does not need it.
    Raises:
        ConfigError: the limit or `norm_type` is not positive, or `param_to_pgs` is given without
            enable_global_grad_clip.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        clipping: GradientClipping = GradientClipping.NONE,
        max_gradient: float = 0.1,
        norm_type: float | str = 2.0,
        enable_global_grad_clip: bool = False,
        param_to_pgs: Mapping[Tensor, Sequence[dist.ProcessGroup]] | None = None,
        track_grad_norm: bool = False,
    ) -> None:
        if clipping is not GradientClipping.NONE and not max_gradient > 0:
            raise ConfigError(
                f"GradientClippingOptimizer(max_gradient={max_gradient}): the limit "
                "must be above zero."
            )
        if not float(norm_type) > 0:
            raise ConfigError(
                f"GradientClippingOptimizer(norm_type={norm_type}): it must be above zero."
            )
        if param_to_pgs and not enable_global_grad_clip:
            raise ConfigError(
                "GradientClippingOptimizer(param_to_pgs=...) is read with "
                "enable_global_grad_clip=True alone; give both or neither."
            )
        super().__init__(optimizer)
        self._clipping, self._max_gradient, self._norm_type = (
            clipping,
            max_gradient,
            float(norm_type),
        )
        sharded = param_to_pgs or {}
        self._groups_of = {p: tuple(sharded[p]) for p in self._parameters() if sharded.get(p)}
        self._track_grad_norm = track_grad_norm
        self._last_total_grad_norm: Tensor | None = None

    @property
    def last_total_grad_norm(self) -> Tensor | None:
        """Joint norm of the last step's gradients before clipping.

        None before the first step, without any gradient, and where it was not computed: see
        `track_grad_norm`.
        """
        return self._last_total_grad_norm

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip, then step."""
        self._last_total_grad_norm = None
        if self._clipping is GradientClipping.NORM or self._track_grad_norm:
            self._last_total_grad_norm = self._total_norm()
        parameters = [p for p in self._parameters() if p.grad is not None]
        if self._clipping is GradientClipping.VALUE and parameters:
            torch.nn.utils.clip_grad_value_(parameters, self._max_gradient)
        elif self._last_total_grad_norm is not None and self._clipping is GradientClipping.NORM:
            torch.nn.utils.clip_grads_with_norm_(
                parameters, self._max_gradient, self._last_total_grad_norm
            )
        super().step(closure)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _total_norm(self) -> Tensor | None:
        """Return the norm of all gradients; a collective over the groups of sharded parameters."""
        by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
        for p in self._parameters():
            if p.grad is not None and p.grad.numel():
                by_groups.setdefault(self._groups_of.get(p, ()), []).append(p.grad)
            elif p in self._groups_of:  # other ranks may have one, and wait for this rank
                by_groups.setdefault(self._groups_of[p], [p.detach().new_zeros(1)])
        norms = [self._norm_over(grads, groups) for groups, grads in by_groups.items()]
        if len(norms) < 2:
            return norms[0] if norms else None
        return torch.linalg.vector_norm(
            torch.stack([norm.to(norms[0].device) for norm in norms]), self._norm_type
        )

    def _norm_over(self, grads: Sequence[Tensor], groups: Sequence[dist.ProcessGroup]) -> Tensor:
        """Return the norm of some gradients and of those that the other ranks of `groups` hold."""
        norm = torch.nn.utils.get_total_norm(grads, self._norm_type)
        if not groups:
            return norm
        if math.isinf(self._norm_type):
            total, how = norm.clone(), dist.ReduceOp.MAX
        else:
            total, how = norm**self._norm_type, dist.ReduceOp.SUM
        for group in groups:
            dist.all_reduce(total, op=how, group=group)
        return total if math.isinf(self._norm_type) else total ** (1.0 / self._norm_type)
