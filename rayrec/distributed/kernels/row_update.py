"""The update of touched rows in vectorised torch: every sparse optimizer's formula, once.

A formula gets copies of U rows with their summed gradients and state, as float32, and leaves the
new values in them; it knows nothing of tables, ids or devices. `rayrec.optim.sparse` states each
formula; where FBGEMM has a CUDA kernel for it, this is the same definition. Costs a few passes over
(U, D) temporaries, so callers hand in blocks of rows that fit a cache.
"""

# U touched rows, D width

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rayrec.optim import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    LarsSGD,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    SparseOptimizer,
)

State = dict[str, Tensor]


def update_rows(
    optimizer: SparseOptimizer,
    lr: float,
    iteration: int,
    weight_UD: Tensor,
    grad_UD: Tensor,
    state: State,
) -> None:
    """Apply one update to rows, in place.

    Args:
        optimizer: the formula and its constants; its own `lr` is not read.
        lr: learning rate of this update.
        iteration: t of bias correction, from 1 on.
        weight_UD: (U, D) float32; written.
        grad_UD: (U, D) float32, summed over equal ids; written over as scratch.
        state: per name of `optimizer.state_widths` (U,) or (U, D) float32; written.
    """
    if optimizer.max_row_norm is not None:
        norm_U = grad_UD.norm(dim=1)
        grad_UD.mul_(
            torch.where(
                norm_U > optimizer.max_row_norm, optimizer.max_row_norm / norm_U, 1.0
            ).unsqueeze(1)
        )
    decay = getattr(optimizer, "weight_decay", 0.0)
    # LAMB and LARS have their own place for it
    if decay and hasattr(optimizer, "weight_decay_mode"):
        if optimizer.weight_decay_mode == "l2":
            grad_UD.add_(weight_UD, alpha=decay)
        else:
            weight_UD.mul_(1.0 - lr * decay)
    _FORMULAS[type(optimizer)](optimizer, lr, iteration, weight_UD, grad_UD, state)


def _sgd(o: SGD, lr: float, t: int, weight: Tensor, grad: Tensor, state: State) -> None:
    weight.add_(grad, alpha=-lr)


def _adagrad(o: Adagrad, lr: float, t: int, weight: Tensor, grad: Tensor, state: State) -> None:
    sum_UD = state["momentum1"].addcmul_(grad, grad)
    weight.addcdiv_(grad, sum_UD.sqrt().add_(o.eps), value=-lr)


def _rowwise_adagrad(
    o: RowWiseAdagrad, lr: float, t: int, weight: Tensor, grad: Tensor, state: State
) -> None:
    sum_U = state["momentum1"].add_(_mean_square(grad))
    weight.sub_(grad.mul_((lr / (sum_U.sqrt() + o.eps)).unsqueeze(1)))


def _adam(o: Adam, lr: float, t: int, weight: Tensor, grad: Tensor, state: State) -> None:
    first_UD, root_UD, scale = _adam_moments(o, t, grad, state)
    weight.addcdiv_(first_UD, root_UD, value=-lr * scale)


def _partial_rowwise_adam(
    o: PartialRowWiseAdam, lr: float, t: int, weight: Tensor, grad: Tensor, state: State
) -> None:
    second_U = state["momentum2"].mul_(o.beta2).add_(_mean_square(grad), alpha=1 - o.beta2)
    first_UD = state["momentum1"].lerp_(grad, 1 - o.beta1)
    scale_U = lr / (1 - o.beta1**t) / ((second_U / (1 - o.beta2**t)).sqrt_() + o.eps)
    weight.sub_(first_UD * scale_U.unsqueeze(1))


def _lamb(o: LAMB, lr: float, t: int, weight: Tensor, grad: Tensor, state: State) -> None:
    first_UD, root_UD, scale = _adam_moments(o, t, grad, state)
    step_UD = torch.div(first_UD, root_UD, out=root_UD).mul_(scale)
    if o.weight_decay:
        step_UD.add_(weight, alpha=o.weight_decay)
    ratio_U = _ratio(weight.norm(dim=1), step_UD.norm(dim=1))
    weight.sub_(step_UD.mul_(ratio_U.unsqueeze(1)), alpha=lr)


def _lars_sgd(o: LarsSGD, lr: float, t: int, weight: Tensor, grad: Tensor, state: State) -> None:
    norm_U = weight.norm(dim=1)
    rate_U = lr * o.eta * _ratio(norm_U, grad.norm(dim=1) + o.weight_decay * norm_U)
    if o.weight_decay:
        grad.add_(weight, alpha=o.weight_decay)
    weight.sub_(state["momentum1"].mul_(o.momentum).add_(grad.mul_(rate_U.unsqueeze(1))))


def _adam_moments(
    o: Adam | LAMB, t: int, grad: Tensor, state: State
) -> tuple[Tensor, Tensor, float]:
    """m, r and c such that Adam's direction is c m / r: corrections of the bias are taken out of
    the rows, into c and eps.
    """
    first_UD = state["momentum1"].lerp_(grad, 1 - o.beta1)
    second_UD = state["momentum2"].lerp_(grad.square_(), 1 - o.beta2)
    correction = math.sqrt(1 - o.beta2**t)
    return (
        first_UD,
        torch.sqrt(second_UD, out=grad).add_(o.eps * correction),
        correction / (1 - o.beta1**t),
    )


def _mean_square(grad: Tensor) -> Tensor:
    return grad.square().mean(1)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """0 where the denominator is: nothing to scale there."""
    return torch.where(denominator > 0, numerator / denominator, 0.0)


_FORMULAS: dict[type[SparseOptimizer], Callable[..., None]] = {
    SGD: _sgd,
    Adagrad: _adagrad,
    RowWiseAdagrad: _rowwise_adagrad,
    Adam: _adam,
    PartialRowWiseAdam: _partial_rowwise_adam,
    LAMB: _lamb,
    LarsSGD: _lars_sgd,
}
