"""What rows and their gradients cost between ranks by the type they travel as: bytes on the wire,
and passes over memory to code them.

The types are those of `rayrec.comm.codec`, which needs torch and stays out; a test holds this table
against it. Everything is told per byte of float32, which rows are at either end. Standard library
only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rayrec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Coding:
    """One type on the wire.

    Attributes:
        size: bytes on the wire. passes: bytes read and written to encode, and as many again to
            decode; 0 where nothing is coded.
    """

    size: float = 1.0
    passes: float = 0.0

    @property
    def copies(self) -> float:
        """Bytes that either end holds more of: what is coded, and float32 apart from the exchange's
        own memory.
        """
        return 1 + self.size if self.passes else 0.0


INT8_SIZE = (128 + 8) / (4 * 128)  # blocks of 128 values with a scale and an offset
CODINGS = {
    "fp32": Coding(),
    "fp16": Coding(0.5, 1 + 0.5),
    "bf16": Coding(0.5, 1 + 0.5),
    "int8": Coding(INT8_SIZE, 2 + 1 + INT8_SIZE),  # messages are padded to whole blocks by a copy
}


class Wire(NamedTuple):
    """The types of both directions: rows home, and gradients to the owners."""

    forward: Coding = CODINGS["fp32"]
    backward: Coding = CODINGS["fp32"]

    @classmethod
    def of(cls, forward: str, backward: str) -> Wire:
        """By the names of `CommType`.

        Raises:
            ConfigError: a name is unknown.
        """
        for direction, name in (("forward", forward), ("backward", backward)):
            if name not in CODINGS:
                raise ConfigError(
                    f"qcomms_{direction}={name!r} is unknown; the types on the wire "
                    f"are {', '.join(CODINGS)}."
                )
        return cls(CODINGS[forward], CODINGS[backward])


FLOAT32 = Wire()
