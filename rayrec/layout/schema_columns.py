"""The columns that a schema reads: dense ones, those of ids, and sequences of plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields
from rayrec.layout.tables import MAX_FLOAT32


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseColumn:
    """One numeric column of the dense features; nulls become `fill`."""

    column: str
    fill: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.column:
            raise ConfigError("a dense column has no name; give it 'column'.")
        if not abs(self.fill) <= MAX_FLOAT32:  # a nan fails this comparison, too
            raise ConfigError(
                f"dense column {self.column!r} has fill={self.fill}; it must be finite in float32, "
                f"at most {MAX_FLOAT32:.4g}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ListColumn:
    """A column that gives a list to each row.

    Attributes:
        name: key in the batch; unique among features and sequences.
        column: column of values, each a list of one, or of lists of them.
        history: take, in place of the row's own value, the values of at most so many rows of the
            same user before it, oldest first; the schema names the `user`.
        most_recent: keep the last so many entries of every list.
        aligned_with: a feature or sequence whose lists have as many entries, row by row.
    """

    name: str
    column: str
    history: int | None = None
    most_recent: int | None = None
    aligned_with: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("history", "most_recent"):
            count = getattr(self, name)
            if count is not None and not 1 <= count < 2**31:
                raise ConfigError(
                    f"{self.name!r} has {name}={count}; it is a number of entries, at least 1 and "
                    "below 2**31."
                )
        if self.history is not None and self.most_recent is not None:
            raise ConfigError(
                f"{self.name!r} has history={self.history} and most_recent={self.most_recent}; a "
                "history is the most recent entries already. Leave one out."
            )

    @property
    def source(self) -> str:
        """The column that is read: `column`, or the one of cut histories that has its name."""
        return self.column if self.history is None else self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature(ListColumn):
    """One sparse feature: a column of ids, or of lists of ids, that makes one bag per row.

    Attributes:
        hash_buckets: None takes integers as they are, and strings or bytes, which only dynamic
            tables take then, by their hash of 64 bits; a number hashes integers, strings or bytes
            into [0, hash_buckets).
        weights: column of per-id weights of the same shape as `column`, or None for weight 1.
    """

    hash_buckets: int | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        # `super()` does not work in a dataclass with slots
        ListColumn.__post_init__(self)
        if self.history is not None and self.weights is not None:
            raise ConfigError(
                f"feature {self.name!r} has a history and weights; read the weights as a sequence "
                "with the same history, and weigh in the model."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceColumn(ListColumn):
    """Plain numbers that no table is asked for, such as the times of the events of a history.

    Attributes:
        dtype: int64 takes whole numbers as they are; float32 takes any number.
        ascending: refuse a list in which a number is less than the one before it.
    """

    dtype: Literal["int64", "float32"] = "int64"
    ascending: bool = False

    def __post_init__(self) -> None:
        ListColumn.__post_init__(self)
        if not self.column:
            raise ConfigError(f"sequence {self.name!r} has no column; give it 'column'.")
        if self.ascending and self.history is not None:
            raise ConfigError(
                f"sequence {self.name!r} is a history and ascending; the schema's 'time' has the "
                "order of a log checked. Leave ascending out."
            )
