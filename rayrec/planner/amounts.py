"""Amounts of work of a step on one rank, counted by part, and their price.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple


class Amounts(NamedTuple):
    """Work of one part of a step on one rank, in the terms of `PartRates`.

    Attributes:
        stream: bytes read and written in order or from a cache.
        rows: bytes of distinct rows touched.
        near, far: bytes exchanged with ranks of this host, and of other hosts.
    """

    slots: float = 0.0
    home_slots: float = 0.0
    items: float = 0.0
    stream: float = 0.0
    rows: float = 0.0
    near: float = 0.0
    far: float = 0.0


class StepAmounts(NamedTuple):
    """The amounts of all parts, in the order of `PARTS`."""

    input: Amounts = Amounts()
    lookup: Amounts = Amounts()
    output: Amounts = Amounts()
    gradient: Amounts = Amounts()
    update: Amounts = Amounts()

    def plus(self, other: StepAmounts) -> StepAmounts:
        """Return the sums of both, part by part."""
        pairs = zip(self, other, strict=True)
        return StepAmounts(*(Amounts(*map(sum, zip(*pair, strict=True))) for pair in pairs))


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step on one rank, by part; adds up over tables."""

    input_s: float = 0.0
    lookup_s: float = 0.0
    output_s: float = 0.0
    gradient_s: float = 0.0
    update_s: float = 0.0
    overhead_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all parts."""
        parts = self.input_s + self.lookup_s + self.output_s + self.gradient_s + self.update_s
        return parts + self.overhead_s

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))
