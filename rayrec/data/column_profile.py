"""The profile of a sample of a column: nulls, lengths, range, distinct values, most frequent one.

`profile_column` works on whole columns by Arrow and numpy and costs less than decoding them. Nulls,
ranges and NaN are those of all values of the sample; how often values occur is counted in an even
part of at most `COUNTED` of them. Distinct values of all rows are estimated from how many occur
once and twice (Chao's estimator, a lower bound).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rayrec.data.column_types import is_list, is_text

COUNTED = 32_768


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of the lists of a column, without those that are null."""

    least: int
    mean: float
    most: int
    empty: float  # share of the lists


@dataclass(frozen=True, slots=True)
class Counts:
    """How often values occur.

    Attributes:
        counted: so many values were counted.
        distinct: different values among them.
        once, twice: so many of these occur once, and twice.
        top, top_share: the most frequent value, and its share of the values.
    """

    counted: int
    distinct: int
    once: int
    twice: int
    top: int | str
    top_share: float

    def estimate(self, values: int) -> int:
        """Different values that are likely among so many."""
        unseen = self.once * (self.once - 1) / (2 * (self.twice + 1))
        if self.counted >= values:
            unseen = 0.0
        return max(self.distinct, min(values, int(self.distinct + unseen)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnProfile:
    """The profile of a sample of one column.

    Attributes:
        kind: what the values are, inside of lists: integers, fractions, texts, or other.
        rows, nulls: rows of the sample, and those that are null.
        lengths: of a column of lists.
        values: values that are not null, inside of lists.
        inner_nulls: nulls inside of lists.
        unreal: values that are NaN or infinite.
        low, high: of the numbers, without those.
        binary, mean: whether all of the numbers are 0 or 1, and then their mean.
        whole: whether all of the numbers are whole.
        counts: how often integers and texts occur; None where there are none.
    """

    name: str
    type: str
    kind: str
    rows: int
    nulls: int
    lengths: Lengths | None = None
    values: int = 0
    inner_nulls: int = 0
    unreal: int = 0
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    binary: bool = False
    whole: bool = False
    counts: Counts | None = None

    @property
    def null_share(self) -> float:
        """Share of the rows that are null."""
        return self.nulls / self.rows if self.rows else 0.0

    @property
    def constant(self) -> bool:
        """True when the values are all the same, or there are none."""
        if self.counts is not None and self.counts.distinct > 1:
            return False
        return self.low == self.high and not self.unreal


def profile_column(name: str, column: pa.ChunkedArray) -> ColumnProfile:
    """Look at one column of a sample.

    Args:
        column: (B,) of any type.
    Cost: a few passes over its values.
    """
    kind = column.type
    told: dict[str, Any] = {"name": name, "type": str(kind), "rows": len(column)}
    told["nulls"] = column.null_count
    if is_list(kind):
        told["lengths"] = _lengths(column)
        column = pc.list_flatten(column)
        told["inner_nulls"] = column.null_count
    if column.null_count:
        column = column.drop_null()
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    told["values"], leaf = len(column), column.type
    t = pa.types
    if t.is_integer(leaf) or t.is_boolean(leaf):
        return ColumnProfile(kind="integers", **told, **_integers(column))
    if t.is_floating(leaf) or t.is_decimal(leaf):
        return ColumnProfile(kind="fractions", **told, **_fractions(column))
    if is_text(leaf):
        return ColumnProfile(kind="texts", **told, counts=_texts(column))
    return ColumnProfile(kind="other", **told)


def _lengths(column: pa.ChunkedArray) -> Lengths | None:
    lengths = pc.list_value_length(column).drop_null().to_numpy()
    if not len(lengths):
        return None
    empty = float((lengths == 0).mean())
    return Lengths(int(lengths.min()), float(lengths.mean()), int(lengths.max()), empty)


def _integers(column: pa.ChunkedArray) -> dict[str, Any]:
    values: NDArray[Any] = column.to_numpy()
    if not len(values):
        return {}
    if values.dtype == np.bool_:
        values = values.astype(np.uint8)
    told = _range(values, whole=True)
    low, high = told["low"], told["high"]
    part = values[:: -(-len(values) // COUNTED)]
    first = 0
    if high - low > COUNTED:
        seen, counts = np.unique(part, return_counts=True)
    else:
        first = low
        # modulo 2**64, since neither 8 bits nor those with a sign would hold the differences
        above = part.astype(np.uint64) - np.uint64(low % 2**64)
        counts = np.bincount(above.view(np.int64))
        seen = np.flatnonzero(counts)
        counts = counts[seen]
    return told | {"counts": _counts(counts, first + seen[counts.argmax()].item())}


def _range(values: NDArray[Any], whole: bool) -> dict[str, Any]:
    """The range of some numbers, and the mean of those that are 0 and 1 alone."""
    low, high = values.min().item(), values.max().item()
    told = {"low": low, "high": high, "whole": whole}
    if whole and 0 <= low <= high <= 1:
        told |= {"binary": True, "mean": float(values.mean(dtype=np.float64))}
    return told


def _counts(counts: NDArray[Any], top: int | str) -> Counts:
    """How often values occur, from the count of each and the most frequent one."""
    counted, most = int(counts.sum()), int(counts.max())
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return Counts(counted, len(counts), once, twice, top, float(most / counted))


def _fractions(column: pa.ChunkedArray) -> dict[str, Any]:
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64(), safe=False)
    values: NDArray[Any] = column.to_numpy()
    if not len(values):
        return {}
    unreal = 0
    # one NaN makes both NaN, so the usual column needs no look at each value
    if not (np.isfinite(values.min()) and np.isfinite(values.max())):
        real = values[np.isfinite(values)]
        values, unreal = real, len(values) - len(real)
        if not len(values):
            return {"unreal": unreal}
    first = values[:1000]
    whole = bool((first == np.floor(first)).all() and (values == np.floor(values)).all())
    return _range(values, whole) | {"unreal": unreal}


def _texts(column: pa.ChunkedArray) -> Counts | None:
    if not len(column):
        return None
    part = column.take(pa.array(np.arange(0, len(column), -(-len(column) // COUNTED))))
    pairs = pc.value_counts(part.combine_chunks())
    counts = pairs.field("counts").to_numpy()
    word = pairs.field("values")[int(counts.argmax())].as_py()
    return _counts(counts, word.decode(errors="replace") if isinstance(word, bytes) else word)
