"""Costs of a rank besides the wire, by part of a step: the constants of the planner's prices.

Every part of a step costs a fixed time, a time for each slot and each item, and bytes over the
memory's bandwidth; a calibration fits these constants to measured steps, and they can be edited by
hand. The defaults count nothing but slots and bytes. Standard library only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from rayrec.errors import ConfigError

PARTS = ("input", "lookup", "output", "gradient", "update")


def _check_rate(name: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        raise ConfigError(f"rate {name}={value} must be a finite number, 0 or more.")


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRates:
    """Constants of one part of a step on one rank.

    Attributes:
        fixed_s: once a step.
        slot_s: per slot (a feature in a shard) that the rank owns; in "input" per slot and source
            rank.
        home_slot_s: per slot of any owner, as home of the batch.
        item_s: per id; in "input" per id and bag that is sorted into row blocks, in "output" and
            "gradient" per piece of a row at home.
        stream: times the bytes that are read and written in order or from a cache. rows: times the
            bytes of distinct rows touched.
    Raises:
        ConfigError: a constant is negative or not finite.
    """

    fixed_s: float = 0.0
    slot_s: float = 0.0
    home_slot_s: float = 0.0
    item_s: float = 0.0
    stream: float = 1.0
    rows: float = 1.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            _check_rate(name, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Constants of all parts of a step.

    Attributes:
        input: ids are sent and sorted. lookup: rows are read and pooled.
        output: rows go home. gradient: gradients come back. update: rows are updated.
        step_s: once a step, outside of all parts.
    """

    # Orders of magnitude in seconds, which rank plans before anybody has calibrated.
    input: PartRates = field(default_factory=lambda: PartRates(slot_s=0.2e-6))
    lookup: PartRates = field(default_factory=lambda: PartRates(slot_s=1e-6, rows=0.0))
    output: PartRates = field(default_factory=lambda: PartRates(home_slot_s=0.1e-6))
    gradient: PartRates = field(default_factory=lambda: PartRates(home_slot_s=0.1e-6))
    update: PartRates = field(default_factory=lambda: PartRates(slot_s=1e-6))
    step_s: float = 0.0

    def __post_init__(self) -> None:
        _check_rate("step_s", self.step_s)

    def times(self, factor: float) -> Rates:
        """All constants of all parts times a factor."""
        parts = {}
        for part in PARTS:
            rates = asdict(getattr(self, part))
            parts[part] = PartRates(**{name: value * factor for name, value in rates.items()})
        return Rates(**parts, step_s=self.step_s)
