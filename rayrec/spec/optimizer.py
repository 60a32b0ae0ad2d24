"""Base of the sparse optimizers: options, state per row, and the update of touched rows.

A lookup kernel sums the gradients of equal ids over the global batch and updates each touched row
once, inside the backward pass; rows that no id touched keep weight and state as they are, decay
included. An optimizer is a frozen dataclass with everything about it: the options, the formula, the
state, and what FBGEMM's kernel of the same name can do. Checkpoints, the planner's memory and
prices, the choice of a kernel and the names on command lines follow from that.
`rayrec.spec.optimizers` holds all of them.

A formula works on copies of U rows as float32 and knows nothing of tables, ids or devices. It costs
a few passes over (U, D) temporaries, so callers hand in blocks of rows that fit a cache.
"""

# U touched rows, D width

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields

if TYPE_CHECKING:
    from torch import Tensor

StateWidth = Literal["row", "element"]
DecayMode = Literal["l2", "decoupled"]

STATE_BYTES = 4  # optimizer state is float32
LARGEST = (2 - 2**-23) * 2.0**127  # that float32 holds


@dataclass(frozen=True, kw_only=True)
class Fbgemm:
    """FBGEMM's kernel of an optimizer, as far as it makes exactly the update that is defined here.

    Attributes:
        name: member of `EmbOptimType`.
        decays: the weight decays that its CUDA kernel applies. A kernel of several modes is told
            which.
        on_cpu: True if there is a CPU kernel; it applies no decay.
        on_cuda: True if there is a CUDA kernel for all rows. Those of LAMB and LARS divide by the
            norm of the update, and make NaN of a row whose gradient is 0.
        float16: True if its CUDA kernel trains float16 tables.
    """

    name: str
    decays: tuple[DecayMode, ...] = ()
    on_cpu: bool = False
    on_cuda: bool = True
    float16: bool = True


@dataclass(frozen=True)
class SparseOptimizer(ABC):
    """Base of the sparse optimizers; use a subclass.

    Attributes:
        lr: learning rate.
        max_gradient: each element of a bag's gradient is clamped to +- this before the sum over
            equal ids.
        max_row_norm: a row's summed gradient is scaled down to at most this 2-norm before the
            update.
        weight_decay: factor of the decay of touched rows.
        name: name on the command line, in plans and in checkpoints.
        state_widths: state tensor name -> one value per "row" or per "element".
        counts_updates: the formula reads t, so a checkpoint carries it.
        fbgemm: FBGEMM's kernel, or None where it has none.
        torch_names: the classes of torch.optim that mean this optimizer.
    Raises:
        ConfigError: a number is out of its range.
    """

    lr: float = 0.01
    max_gradient: float | None = field(default=None, kw_only=True)
    max_row_norm: float | None = field(default=None, kw_only=True)
    weight_decay: float = field(default=0.0, kw_only=True)
    name: ClassVar[str] = ""
    state_widths: ClassVar[dict[str, StateWidth]] = {}
    counts_updates: ClassVar[bool] = False
    fbgemm: ClassVar[Fbgemm | None] = None
    torch_names: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        self._require("lr", "zero or more", self.lr >= 0)
        for name in ("max_gradient", "max_row_norm"):
            limit = getattr(self, name)
            self._require(name, "above zero, or None for no limit", limit is None or limit > 0)
        self._require("weight_decay", "zero or more", self.weight_decay >= 0)
        if hasattr(self, "eps"):
            self._require("eps", "zero or more", self.eps >= 0)

    def _require(self, name: str, range_text: str, inside: bool) -> None:
        value = getattr(self, name)
        if isinstance(value, float | int) and not abs(value) <= LARGEST:
            range_text = f"{range_text}, and a number that float32 holds"
            inside = False
        if not inside:
            raise ConfigError(f"{type(self).__name__}({name}={value!r}): it must be {range_text}.")

    def _require_factors(self, *names: str) -> None:
        """Check the options that say which part of an earlier state remains after an update."""
        for name in names:
            self._require(name, "from 0 to below 1", 0 <= getattr(self, name) < 1)

    @property
    def hyperparameters(self) -> dict[str, float | str]:
        """Everything that defines the update, by name; options that are off are left out."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if not self.weight_decay:
            values.pop("weight_decay")
            values.pop("weight_decay_mode", None)
        return {name: value for name, value in values.items() if value is not None}

    @property
    def decay_mode(self) -> DecayMode | Literal["own"]:
        """Mode of a weight decay before the formula; "own" where it acts inside of the formula."""
        return "own"

    @classmethod
    def state_bytes(cls, width: int) -> int:
        """Bytes of state of one row of `width` columns."""
        values = (1 if per == "row" else width for per in cls.state_widths.values())
        return STATE_BYTES * sum(values)

    @classmethod
    def has_element_state(cls) -> bool:
        """Return True if some state has one value per element, and so the size of the table."""
        return "element" in cls.state_widths.values()

    def update_rows(
        self,
        lr: float,
        iteration: int,
        weight_UD: Tensor,
        grad_UD: Tensor,
        state: dict[str, Tensor],
    ) -> None:
        """Apply one update to rows, in place.

        Args:
            lr: learning rate of this update; `self.lr` is not read.
            iteration: t of bias correction, from 1 on.
            weight_UD: (U, D) float32; written.
            grad_UD: (U, D) float32, summed over equal ids; written over as scratch.
            state: per name of `state_widths` (U,) or (U, D) float32; written.
        """
        if self.max_row_norm is not None:
            norm_U = grad_UD.norm(dim=1)
            scale_U = (self.max_row_norm / norm_U).where(norm_U > self.max_row_norm, 1.0)
            grad_UD.mul_(scale_U.unsqueeze(1))
        if self.weight_decay and self.decay_mode == "l2":
            grad_UD.add_(weight_UD, alpha=self.weight_decay)
        elif self.weight_decay and self.decay_mode == "decoupled":
            weight_UD.mul_(1.0 - lr * self.weight_decay)
        self.formula(lr, iteration, weight_UD, grad_UD, state)

    @abstractmethod
    def formula(
        self, lr: float, t: int, weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        """Write weight and state by the formula in the class's docstring; see `update_rows`."""


@dataclass(frozen=True)
class Decaying(SparseOptimizer):
    """An optimizer whose weight decay acts before its formula.

    Attributes:
        weight_decay_mode: "l2" adds weight_decay * w to g, "decoupled" first scales w by
            1 - lr * weight_decay.
    """

    weight_decay_mode: DecayMode = field(default="l2", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(
            "weight_decay_mode",
            f"one of {get_args(DecayMode)}",
            self.weight_decay_mode in get_args(DecayMode),
        )

    @property
    def decay_mode(self) -> DecayMode | Literal["own"]:
        """Mode of the decay before the formula, as the user chose it."""
        return self.weight_decay_mode
