"""Sparse optimizers as values: the update of a table's touched rows, and the state a row has.

A lookup kernel sums the gradients of equal ids over the global batch and updates each touched row
once, inside the backward pass; rows that no id touched keep weight and state as they are, decay
included. `state_widths` says which state tensors exist and whether they hold one value per row or
per element; checkpoints and the planner's memory model read it. Each of them trains on CPU and on
CUDA.

Formulas: w weight, g summed gradient, t the iteration of the kernel (counts its backward passes),
means and norms |.| over one row. Under a layout with column blocks these are taken over each
block's own columns; with one column block no result depends on the layout.

Source: Duchi et al. 2011 (Adagrad); Naumov et al. 2019 (row-wise); Kingma and Ba 2015 (Adam); You
et al. 2017 (LARS), 2020 (LAMB).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal, get_args

from rayrec.errors import ConfigError

StateWidth = Literal["row", "element"]
DecayMode = Literal["l2", "decoupled"]


@dataclass(frozen=True)
class SparseOptimizer:
    """Base of the sparse optimizers; use a subclass.

    Attributes:
        lr: learning rate.
        max_gradient: each element of a bag's gradient is clamped to +- this before the sum over
            equal ids.
        max_row_norm: a row's summed gradient is scaled down to at most this 2-norm before the
            update.
        name: as written on the command line, in plans and in checkpoints.
        state_widths: state tensor name -> one value per "row" or per "element".
    Raises:
        ConfigError: a number is out of its range.
    """

    lr: float = 0.01
    max_gradient: float | None = field(default=None, kw_only=True)
    max_row_norm: float | None = field(default=None, kw_only=True)
    name: ClassVar[str] = ""
    state_widths: ClassVar[dict[str, StateWidth]] = {}

    def __post_init__(self) -> None:
        self._require("lr", "zero or more", self.lr >= 0)
        for name in ("max_gradient", "max_row_norm"):
            limit = getattr(self, name)
            self._require(name, "above zero, or None for no limit", limit is None or limit > 0)

    def _require(self, name: str, range_text: str, inside: bool) -> None:
        value = getattr(self, name)
        if not inside or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError(f"{type(self).__name__}({name}={value!r}): it must be {range_text}.")

    @property
    def hyperparameters(self) -> dict[str, float | str]:
        """Everything that defines the update, by name; options that are off are left out."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if not values.get("weight_decay", 0.0):
            values.pop("weight_decay", None)
            values.pop("weight_decay_mode", None)
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class _Decaying(SparseOptimizer):
    """Weight decay of the touched rows: "l2" adds weight_decay * w to g, "decoupled" first scales w
    by 1 - lr * weight_decay.
    """

    weight_decay: float = field(default=0.0, kw_only=True)
    weight_decay_mode: DecayMode = field(default="l2", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("weight_decay", "zero or more", self.weight_decay >= 0)
        self._require(
            "weight_decay_mode",
            f"one of {get_args(DecayMode)}",
            self.weight_decay_mode in get_args(DecayMode),
        )


@dataclass(frozen=True)
class SGD(_Decaying):
    """w -= lr * g."""

    name: ClassVar[str] = "sgd"


@dataclass(frozen=True)
class Adagrad(_Decaying):
    """s += g^2; w -= lr * g / (sqrt(s) + eps), per element."""

    eps: float = 1e-8
    name: ClassVar[str] = "adagrad"
    state_widths: ClassVar[dict[str, StateWidth]] = {"momentum1": "element"}


@dataclass(frozen=True)
class RowWiseAdagrad(_Decaying):
    """s += mean(g^2); w -= lr * g / (sqrt(s) + eps), with one s per row."""

    eps: float = 1e-8
    name: ClassVar[str] = "rowwise_adagrad"
    state_widths: ClassVar[dict[str, StateWidth]] = {"momentum1": "row"}


@dataclass(frozen=True)
class Adam(_Decaying):
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

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_betas(self)


@dataclass(frozen=True)
class PartialRowWiseAdam(Adam):
    """Adam with one second moment per row: v = b2 v + (1 - b2) mean(g^2)."""

    name: ClassVar[str] = "partial_rowwise_adam"
    state_widths: ClassVar[dict[str, StateWidth]] = {"momentum1": "element", "momentum2": "row"}


@dataclass(frozen=True)
class LAMB(SparseOptimizer):
    """u = Adam's direction + weight_decay * w; w -= lr * |w| / |u| * u.

    The ratio is not bounded: a row of zeros never moves, as in FBGEMM's kernel, so initial values
    must not be zero.
    """

    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = field(default=0.0, kw_only=True)
    name: ClassVar[str] = "lamb"
    state_widths: ClassVar[dict[str, StateWidth]] = {"momentum1": "element", "momentum2": "element"}

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_betas(self)
        self._require("weight_decay", "zero or more", self.weight_decay >= 0)


@dataclass(frozen=True)
class LarsSGD(SparseOptimizer):
    """r = lr * eta * |w| / (|g| + weight_decay |w|); m = momentum * m + r * (g + weight_decay w); w
    -= m.
    """

    momentum: float = 0.9
    eta: float = 0.001
    weight_decay: float = field(default=0.0, kw_only=True)
    name: ClassVar[str] = "lars_sgd"
    state_widths: ClassVar[dict[str, StateWidth]] = {"momentum1": "element"}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("momentum", "from 0 to below 1", 0 <= self.momentum < 1)
        self._require("eta", "above zero", self.eta > 0)
        self._require("weight_decay", "zero or more", self.weight_decay >= 0)


def _require_betas(optimizer: Adam | LAMB) -> None:
    for name in ("beta1", "beta2"):
        optimizer._require(name, "from 0 to below 1", 0 <= getattr(optimizer, name) < 1)


SPARSE_OPTIMIZERS: dict[str, type[SparseOptimizer]] = {
    cls.name: cls for cls in (SGD, Adagrad, RowWiseAdagrad, Adam, PartialRowWiseAdam, LAMB, LarsSGD)
}


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
    if name not in SPARSE_OPTIMIZERS:
        raise ConfigError(
            f"no sparse optimizer {name!r}; choose one of {', '.join(sorted(SPARSE_OPTIMIZERS))}."
        )
    cls = SPARSE_OPTIMIZERS[name]
    known = [f.name for f in fields(cls)]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"sparse optimizer {name!r} has no option {option!r}; it has {', '.join(known)}."
            )
    return cls(lr=lr, **options)  # type: ignore[arg-type]
