"""The sparse optimizers, each with its options, formula, state and FBGEMM kernel side by side.

Formulas: w weight, g summed gradient, t the iteration of the kernel (counts its backward passes),
means and norms |.| over one row. Under a layout with column blocks these are taken over each
block's own columns; with one column block no result depends on the layout. Each optimizer trains on
CPU and on CUDA. To add one, write its class here and name it in `__all__` and SPARSE_OPTIMIZERS:
the product needs no more.

Source: Duchi et al. 2011 (Adagrad); Naumov et al. 2019 (row-wise); Kingma and Ba 2015 (Adam); You
et al. 2017 (LARS), 2020 (LAMB).
"""

# U touched rows, D width; formulas write `weight` and `state`, and use `grad` as scratch

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, ClassVar

from rayrec.errors import ConfigError
from rayrec.spec.optimizer import Decaying, DecayMode, Fbgemm, SparseOptimizer, StateWidth

if TYPE_CHECKING:
    from torch import Tensor

    State = dict[str, Tensor]

__all__ = [
    "LAMB",
    "SGD",
    "SPARSE_OPTIMIZERS",
    "Adagrad",
    "Adam",
    "LarsSGD",
    "PartialRowWiseAdam",
    "RMSprop",
    "RowWiseAdagrad",
    "SparseOptimizer",
    "sparse_optimizer",
]


@dataclass(frozen=True)
class SGD(Decaying):
    """w -= lr * g."""

    name: ClassVar[str] = "sgd"
    fbgemm: ClassVar[Fbgemm | None] = Fbgemm(name="EXACT_SGD", on_cpu=True)
    torch_names: ClassVar[tuple[str, ...]] = ("SGD",)

    def formula(self, lr: float, t: int, weight: Tensor, grad: Tensor, state: State) -> None:
        """Subtract lr times the gradient."""
        weight.add_(grad, alpha=-lr)


@dataclass(frozen=True)
class Adagrad(Decaying):
    """s += g^2; w -= lr * g / (sqrt(s) + eps), per element."""

    eps: float = 1e-8
    name: ClassVar[str] = "adagrad"
    state_widths: ClassVar[dict[str, StateWidth]] = {"momentum1": "element"}
    fbgemm: ClassVar[Fbgemm | None] = Fbgemm(name="EXACT_ADAGRAD", on_cpu=True)
    torch_names: ClassVar[tuple[str, ...]] = ("Adagrad",)

    def formula(self, lr: float, t: int, weight: Tensor, grad: Tensor, state: State) -> None:
        """Add the squared gradient to the state of each element, and step by its root."""
        sum_UD = state["momentum1"].addcmul_(grad, grad)
        weight.addcdiv_(grad, sum_UD.sqrt().add_(self.eps), value=-lr)


@dataclass(frozen=True)
class RowWiseAdagrad(Decaying):
    """s += mean(g^2); w -= lr * g / (sqrt(s) + eps), with one s per row."""

    eps: float = 1e-8
    name: ClassVar[str] = "rowwise_adagrad"
    state_widths: ClassVar[dict[str, StateWidth]] = {"momentum1": "row"}
    fbgemm: ClassVar[Fbgemm | None] = Fbgemm(
        name="EXACT_ROWWISE_ADAGRAD", decays=("l2", "decoupled"), on_cpu=True
    )

    def formula(self, lr: float, t: int, weight: Tensor, grad: Tensor, state: State) -> None:
        """Add the mean square of a row's gradient to its one value, and step by its root."""
        sum_U = state["momentum1"].add_(_mean_square(grad))
        weight.sub_(grad.mul_((lr / (sum_U.sqrt() + self.eps)).unsqueeze(1)))


@dataclass(frozen=True)
class RMSprop(Decaying):
    """v = alpha v + (1 - alpha) g^2; w -= lr * g / (sqrt(v) + eps), per element.

    The definition of torch.optim.RMSprop without momentum, neither centered; v of a row only moves
    when the row is touched.
    """

    eps: float = 1e-8
    alpha: float = 0.99
    name: ClassVar[str] = "rmsprop"
    state_widths: ClassVar[dict[str, StateWidth]] = {"momentum1": "element"}
    torch_names: ClassVar[tuple[str, ...]] = ("RMSprop",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_factors("alpha")

    def formula(self, lr: float, t: int, weight: Tensor, grad: Tensor, state: State) -> None:
        """Average the squared gradients with factor alpha, and step by the root."""
        mean_UD = state["momentum1"].mul_(self.alpha).addcmul_(grad, grad, value=1 - self.alpha)
        weight.addcdiv_(grad, mean_UD.sqrt().add_(self.eps), value=-lr)


@dataclass(frozen=True)
class Adam(Decaying):
    """m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; w -= lr * m / (1 - b1^t) / (sqrt(v / (1 -
    b2^t)) + eps).

    As in torch's SparseAdam, t counts all steps while m and v of a row only move when the row is
    touched.
    """

    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay_mode: DecayMode = field(default="decoupled", kw_only=True)
    name: ClassVar[str] = "adam"
    state_widths: ClassVar[dict[str, StateWidth]] = {"momentum1": "element", "momentum2": "element"}
    counts_updates: ClassVar[bool] = True
    # fbgemm-gpu 1.8.0 takes an optional state that nobody passes for a float16 table
    fbgemm: ClassVar[Fbgemm | None] = Fbgemm(name="ADAM", decays=("decoupled",), float16=False)
    torch_names: ClassVar[tuple[str, ...]] = ("Adam", "AdamW", "SparseAdam")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_factors("beta1", "beta2")

    def formula(self, lr: float, t: int, weight: Tensor, grad: Tensor, state: State) -> None:
        """Step along the mean gradient, divided by the root of the mean square of each element."""
        first_UD, root_UD, scale = _adam_moments(self, t, grad, state)
        weight.addcdiv_(first_UD, root_UD, value=-lr * scale)


@dataclass(frozen=True)
class PartialRowWiseAdam(Adam):
    """Adam with one second moment per row: v = b2 v + (1 - b2) mean(g^2)."""

    name: ClassVar[str] = "partial_rowwise_adam"
    state_widths: ClassVar[dict[str, StateWidth]] = {"momentum1": "element", "momentum2": "row"}
    fbgemm: ClassVar[Fbgemm | None] = Fbgemm(name="PARTIAL_ROWWISE_ADAM", decays=("decoupled",))
    torch_names: ClassVar[tuple[str, ...]] = ()

    def formula(self, lr: float, t: int, weight: Tensor, grad: Tensor, state: State) -> None:
        """Step as Adam does, with one mean square for each row."""
        second_U = state["momentum2"].mul_(self.beta2)
        second_U.add_(_mean_square(grad), alpha=1 - self.beta2)
        first_UD = state["momentum1"].lerp_(grad, 1 - self.beta1)
        root_U = (second_U / (1 - self.beta2**t)).sqrt_() + self.eps
        scale_U = lr / (1 - self.beta1**t) / root_U
        weight.sub_(first_UD * scale_U.unsqueeze(1))


@dataclass(frozen=True)
class LAMB(SparseOptimizer):
    """u = Adam's direction + weight_decay * w; w -= lr * |w| / |u| * u.

    The ratio is not bounded: a row of zeros never moves, as in FBGEMM's kernel, so initial values
    must not be zero.
    """

    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    name: ClassVar[str] = "lamb"
    state_widths: ClassVar[dict[str, StateWidth]] = {"momentum1": "element", "momentum2": "element"}
    counts_updates: ClassVar[bool] = True
    fbgemm: ClassVar[Fbgemm | None] = Fbgemm(name="LAMB", on_cuda=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_factors("beta1", "beta2")

    def formula(self, lr: float, t: int, weight: Tensor, grad: Tensor, state: State) -> None:
        """Scale Adam's step of each row by the norm of the row over that of the step."""
        import torch

        first_UD, root_UD, scale = _adam_moments(self, t, grad, state)
        step_UD = torch.div(first_UD, root_UD, out=root_UD).mul_(scale)
        if self.weight_decay:
            step_UD.add_(weight, alpha=self.weight_decay)
        ratio_U = _ratio(weight.norm(dim=1), step_UD.norm(dim=1))
        weight.sub_(step_UD.mul_(ratio_U.unsqueeze(1)), alpha=lr)


@dataclass(frozen=True)
class LarsSGD(SparseOptimizer):
    """r = lr * eta * |w| / (|g| + weight_decay |w|); m = momentum * m + r * (g + weight_decay w); w
    -= m.
    """

    momentum: float = 0.9
    eta: float = 0.001
    name: ClassVar[str] = "lars_sgd"
    state_widths: ClassVar[dict[str, StateWidth]] = {"momentum1": "element"}
    fbgemm: ClassVar[Fbgemm | None] = Fbgemm(name="LARS_SGD", on_cuda=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_factors("momentum")
        self._require("eta", "above zero", self.eta > 0)

    def formula(self, lr: float, t: int, weight: Tensor, grad: Tensor, state: State) -> None:
        """Add a step of the gradient, at a rate that each row's norms give, to the momentum."""
        norm_U = weight.norm(dim=1)
        below_U = grad.norm(dim=1) + self.weight_decay * norm_U
        rate_U = lr * self.eta * _ratio(norm_U, below_U)
        if self.weight_decay:
            grad.add_(weight, alpha=self.weight_decay)
        step_UD = grad.mul_(rate_U.unsqueeze(1))
        weight.sub_(state["momentum1"].mul_(self.momentum).add_(step_UD))


def _adam_moments(
    o: Adam | LAMB, t: int, grad: Tensor, state: State
) -> tuple[Tensor, Tensor, float]:
    """m, r and c such that Adam's direction is c m / r.

    Corrections of the bias are taken out of the rows, into c and eps.
    """
    import torch  # late: the planner reads this file where there is no torch

    first_UD = state["momentum1"].lerp_(grad, 1 - o.beta1)
    second_UD = state["momentum2"].lerp_(grad.square_(), 1 - o.beta2)
    correction = math.sqrt(1 - o.beta2**t)
    root_UD = torch.sqrt(second_UD, out=grad).add_(o.eps * correction)
    return first_UD, root_UD, correction / (1 - o.beta1**t)


def _mean_square(grad: Tensor) -> Tensor:
    return grad.square().mean(1)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """0 where the denominator is: nothing to scale there."""
    return (numerator / denominator).where(denominator > 0, 0.0)


SPARSE_OPTIMIZERS: dict[str, type[SparseOptimizer]] = {
    kind.name: kind
    for kind in (SGD, Adagrad, RowWiseAdagrad, RMSprop, Adam, PartialRowWiseAdam, LAMB, LarsSGD)
}


def optimizer_class(name: str) -> type[SparseOptimizer]:
    """The class of the optimizer called `name`.

    Raises:
        ConfigError: there is none; lists those that exist.
    """
    if name not in SPARSE_OPTIMIZERS:
        raise ConfigError(
            f"sparse_optimizer={name!r} is unknown; choose one of {', '.join(SPARSE_OPTIMIZERS)}."
        )
    return SPARSE_OPTIMIZERS[name]


def sparse_optimizer(name: str, lr: float, **options: float | str | None) -> SparseOptimizer:
    """The optimizer called `name` with learning rate `lr`; `sparse_optimizer(o.name,
    **o.hyperparameters)` updates as `o` does.

    Args:
        name: a key of SPARSE_OPTIMIZERS.
        lr: learning rate.
        options: fields of that optimizer, such as eps, beta1, weight_decay.
    Raises:
        ConfigError: no such optimizer or option; lists those that exist.
    """
    cls = optimizer_class(name)
    known = [f.name for f in fields(cls)]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"sparse optimizer {name!r} has no option {option!r}; it has {', '.join(known)}."
            )
    return cls(lr=lr, **options)  # type: ignore[arg-type]
