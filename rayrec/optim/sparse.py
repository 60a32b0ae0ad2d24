"""Sparse optimizers as values: what to tell the fused kernel, and what state a row has.

The kernel (FBGEMM's table-batched embeddings) sums the gradients of equal ids and updates each touched row once, inside the backward
pass. `state_widths` says which state tensors exist and whether they hold one value per row or one per element; checkpoints and the
planner's memory model read it. All three train on CPU and on CUDA.

Source: Duchi et al. 2011 (Adagrad); row-wise Adagrad as in DLRM (Naumov et al. 2019): the accumulator holds the mean of squares of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rayrec.errors import ConfigError

StateWidth = Literal["row", "element"]


@dataclass(frozen=True)
class SparseOptimizer:
    """Base of the sparse optimizers; use a subclass.

    Attributes:
        lr: learning rate.
        name: as written on the command line, in plans and in checkpoints.
        state_widths: state tensor name -> one value per "row" or per "element".
    """

    lr: float = 0.01
    name: ClassVar[str] = ""
    state_widths: ClassVar[dict[str, StateWidth]] = {}

    def __post_init__(self) -> None:
        if not self.lr >= 0:
            raise ConfigError(f"{type(self).__name__}(lr={self.lr}): the learning rate must be zero or more.")

    @property
    def hyperparameters(self) -> dict[str, float]:
        """Every number that defines the update, by name."""
        return {"lr": self.lr}


@dataclass(frozen=True)
class SGD(SparseOptimizer):
    """w -= lr * g, with g summed over equal ids."""

    name: ClassVar[str] = "sgd"


@dataclass(frozen=True)
class Adagrad(SparseOptimizer):
    """s += g^2; w -= lr * g / (sqrt(s) + eps), per element."""

    eps: float = 1e-8
    name: ClassVar[str] = "adagrad"
    state_widths: ClassVar[dict[str, StateWidth]] = {"momentum1": "element"}

    @property
    def hyperparameters(self) -> dict[str, float]:
        """Every number that defines the update, by name."""
        return {"lr": self.lr, "eps": self.eps}


@dataclass(frozen=True)
class RowWiseAdagrad(SparseOptimizer):
    """s += mean(g^2) over the row; w -= lr * g / (sqrt(s) + eps), with one s per row.

    Under a layout with column blocks the mean is taken over each block's own columns, as every column-sharded implementation does; with
    one column block the result does not depend on the layout.
    """

    eps: float = 1e-8
    name: ClassVar[str] = "rowwise_adagrad"
    state_widths: ClassVar[dict[str, StateWidth]] = {"momentum1": "row"}

    @property
    def hyperparameters(self) -> dict[str, float]:
        """Every number that defines the update, by name."""
        return {"lr": self.lr, "eps": self.eps}


SPARSE_OPTIMIZERS: dict[str, type[SparseOptimizer]] = {cls.name: cls for cls in (SGD, Adagrad, RowWiseAdagrad)}


def sparse_optimizer(name: str, lr: float) -> SparseOptimizer:
    """The optimizer called `name` with learning rate `lr`.

    Raises:
        ConfigError: no such optimizer; lists those that exist.
    """
    if name not in SPARSE_OPTIMIZERS:
        raise ConfigError(f"no sparse optimizer {name!r}; choose one of {', '.join(sorted(SPARSE_OPTIMIZERS))}.")
    return SPARSE_OPTIMIZERS[name](lr=lr)
