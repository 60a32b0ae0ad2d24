"""The columns that a schema reads into features: dense ones, and those of ids."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseColumn:
    """One numeric column of the dense features; nulls become `fill`."""

    column: str
    fill: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.column:
            raise ConfigError("a dense column has no name; give it 'column'.")
        if not math.isfinite(self.fill):
            raise ConfigError(
                f"dense column {self.column!r} has fill={self.fill}; it must be finite."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """One sparse feature: a column of ids, or of lists of ids, that makes one bag per row.

    Attributes:
        name: key of the feature in the batch; unique.
        column: column of integers, strings or lists of them.
        hash_buckets: None takes integers as they are, and strings or bytes, which only dynamic
            tables take then, by their hash of 64 bits; a number hashes integers, strings or bytes
            into [0, hash_buckets).
        weights: column of per-id weights of the same shape as `column`, or None for weight 1.
    """

    name: str
    column: str
    hash_buckets: int | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
