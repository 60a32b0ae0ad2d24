"""Types of rows and gradients on the wire between ranks, and their cost.

The types are TorchRec's (`QCommsConfig`); `rayrec.comm.codec` codes them. Their cost is bytes on
the wire and passes over memory, told per byte of float32, which rows are at either end.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, NamedTuple

from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields

BLOCK = 128  # values that share a scale in the int8 codec
EXTRA = 8  # bytes of scale and offset per block
INT8_SIZE = (BLOCK + EXTRA) / (4 * BLOCK)


class CommType(Enum):
    """Precision on the wire."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"

    @property
    def coding(self) -> Coding:
        """Cost of this type: bytes on the wire and passes over memory."""
        return _CODINGS[self]


@dataclass(frozen=True)
class QCommsConfig:
    """Precision of the pooled exchange, forward and backward set apart."""

    forward_precision: CommType = CommType.FP32
    backward_precision: CommType = CommType.FP32

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Coding:
    """The cost of one type on the wire.

    Attributes:
        size: bytes on the wire. passes: bytes read and written to encode, and as many again to
            decode; 0 where nothing is coded.
    """

    size: float = 1.0
    passes: float = 0.0

    @property
    def copies(self) -> float:
        """Bytes of extra copies that either end holds: the coded rows, and float32 outside of the
        exchange's own memory.
        """
        return 1 + self.size if self.passes else 0.0


_CODINGS = {
    CommType.FP32: Coding(),
    CommType.FP16: Coding(0.5, 1 + 0.5),
    CommType.BF16: Coding(0.5, 1 + 0.5),
    # messages are padded to whole blocks by a copy
    CommType.INT8: Coding(INT8_SIZE, 2 + 1 + INT8_SIZE),
}


class Wire(NamedTuple):
    """The costs of both directions: rows home, and gradients to the owners."""

    forward: Coding = Coding()
    backward: Coding = Coding()


FLOAT32 = Wire()
WIRE_PRECISIONS = tuple(kind.value for kind in CommType)


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """Options of the exchange of rows, on which a plan's prices and every rank must agree.

    Attributes:
        qcomms_forward, qcomms_backward: precision of pooled rows and of their gradients between
            ranks, one of WIRE_PRECISIONS.
        share_tables: CPU ranks of one host read each other's rows in place where they can; see
            `DistributedModelParallel`.
    Raises:
        ConfigError: a precision is unknown; lists those that exist.
    """

    qcomms_forward: str = CommType.FP32.value
    qcomms_backward: str = CommType.FP32.value
    share_tables: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        for direction in ("qcomms_forward", "qcomms_backward"):
            name = getattr(self, direction)
            if name not in WIRE_PRECISIONS:
                raise ConfigError(
                    f"{direction}={name!r} is unknown; the types on the wire are "
                    f"{', '.join(WIRE_PRECISIONS)}."
                )

    def exchange(self) -> dict[str, Any]:
        """Return these options by name, for another value that has them."""
        return {f.name: getattr(self, f.name) for f in fields(ExchangeOptions)}

    @property
    def qcomms(self) -> QCommsConfig:
        """Both precisions, as `DistributedModelParallel` takes them."""
        return QCommsConfig(CommType(self.qcomms_forward), CommType(self.qcomms_backward))

    @property
    def wire(self) -> Wire:
        """Their costs."""
        config = self.qcomms
        return Wire(config.forward_precision.coding, config.backward_precision.coding)
