"""What a user may tell the planner about one table. Standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rayrec.errors import ConfigError
from rayrec.layout.geometry import COLUMN_MULTIPLE
from rayrec.layout.kinds import KINDS


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterConstraints:
    """Limits and facts for one table.

    Attributes:
        kinds: the sharding kinds that may be used; None allows all.
        pooling_factor: mean ids per bag, of each feature of the table.
        min_partition: narrowest column block, in columns; None leaves it to the prices.
        weighted: the features carry a weight per id.
    Raises:
        ConfigError: an unknown kind, or a number that makes no sense.
    """

    kinds: Sequence[str] | None = None
    pooling_factor: float = 1.0
    min_partition: int | None = None
    weighted: bool = False

    def __post_init__(self) -> None:
        if self.kinds is not None:
            check_kinds(self.kinds)
        if not 0 < self.pooling_factor < float("inf"):
            raise ConfigError(f"pooling_factor={self.pooling_factor} must be positive: the mean number of ids per bag.")
        if self.min_partition is not None and (self.min_partition < COLUMN_MULTIPLE or self.min_partition % COLUMN_MULTIPLE):
            raise ConfigError(f"min_partition={self.min_partition} must be a positive multiple of {COLUMN_MULTIPLE} columns.")


def check_kinds(kinds: Sequence[str]) -> None:
    """Raise ConfigError unless `kinds` is a non-empty sequence of names in `KINDS`."""
    if isinstance(kinds, str) or not kinds:
        raise ConfigError(f"kinds={kinds!r} must be a non-empty list of {', '.join(KINDS)}.")
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"sharding kind {kind!r} is unknown{did_you_mean(kind, KINDS)}; the kinds are {', '.join(KINDS)}.")


def check_constraints(constraints: Mapping[str, ParameterConstraints], tables: Collection[str]) -> None:
    """Raise ConfigError when a constraint names a table that does not exist: it would silently do nothing."""
    for name in constraints:
        if name not in tables:
            raise ConfigError(f"constraints name table {name!r}, which is not among the {len(tables)} tables{did_you_mean(name, tables)}.")


def did_you_mean(name: str, known: Collection[str]) -> str:
    """ " (did you mean 'x'?)" when a known name is close, else ""."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
