"""Bags of a column: ids or numbers with the place of each row's among them, as views of Arrow.

A column of lists becomes `Bags` without a copy, since Arrow holds a list column as one array of
values and offsets into it. Histories are lists that share values: those of a row lie at
[begin, end) of the log's own column, and are copied only when a batch is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rayrec.data.column_types import is_list, is_list_view
from rayrec.data.numeric import Where, first_true, mask
from rayrec.errors import InputError

_INT64 = pa.int64()


@dataclass(slots=True)
class Bags:
    """The bags of B rows: row i holds values[offsets[i]:offsets[i + 1]].

    Without `offsets`, row i holds values[i] alone. With `ends`, row i holds
    values[offsets[i]:ends[i]]: bags then lie in any order, and may share values.
    """

    values: NDArray[Any]  # (N,) any integer type for ids
    offsets: NDArray[Any] | None  # (B + 1,) int32 or int64; offsets[0] is 0 where there are weights
    weights: NDArray[np.float32] | None = None  # (N,), None for all ones
    ends: NDArray[np.int64] | None = None  # (B,); offsets are (B,) int64 then

    def lengths(self, rows: int) -> NDArray[np.int64]:
        """(rows,) entries per bag."""
        if self.offsets is None:
            return np.ones(rows, np.int64)
        begins, ends = self._spans()
        return (ends - begins).astype(np.int64, copy=False)

    def _spans(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """(B,) where the bag of each row begins among the values, and where it ends."""
        assert self.offsets is not None, "bags of one value each have no offsets"
        if self.ends is not None:
            return self.offsets, self.ends
        return self.offsets[:-1], self.offsets[1:]

    def row_of(self, position: int) -> int:
        """The row whose bag holds the value at `position`; of bags that follow each other."""
        if self.offsets is None:
            return position
        return int(np.searchsorted(self.offsets, position, side="right")) - 1

    def row_with(self, flags: NDArray[np.bool_], first: int = 0) -> int | None:
        """The first row whose bag holds a value that is flagged; None where there is no such row.

        Args:
            flags: (N,); a value that no bag holds may be flagged, since histories share the column
                of all events.
            first: place in a bag from which on its values count.
        """
        if self.offsets is None:
            return first_true(flags) if flags.any() else None
        begins, ends = self._spans()
        before = np.concatenate([[0], np.cumsum(flags)])
        held = before[ends] > before[np.minimum(begins + first, ends)]
        return first_true(held) if held.any() else None

    def count(self, start: int, stop: int) -> int:
        """Entries in rows [start, stop)."""
        if self.offsets is None:
            return stop - start
        if self.ends is not None:
            return int((self.ends[start:stop] - self.offsets[start:stop]).sum())
        return self.offsets.item(stop) - self.offsets.item(start)

    def last(self, count: int) -> Bags:
        """The last `count` entries of each bag, as views."""
        if self.offsets is None:
            return self
        begins, ends = (bounds.astype(np.int64, copy=False) for bounds in self._spans())
        return replace(self, offsets=np.maximum(begins, ends - count), ends=ends)

    def packed(self) -> Bags:
        """The same bags one after another, as those are that have weights."""
        if self.offsets is None or self.ends is None:
            return self
        offsets = _offsets(self.ends - self.offsets)
        values = np.empty(offsets[-1], self.values.dtype)
        rows = len(self.offsets)
        self.write(0, rows, values, np.empty(rows, np.int32))
        return Bags(values, offsets)

    def write(
        self,
        start: int,
        stop: int,
        values: NDArray[Any],
        lengths: NDArray[np.int32],
        weights: NDArray[np.float32] | None = None,
    ) -> int:
        """Copy rows [start, stop) to the beginning of the outputs.

        Args:
            lengths: (stop - start,).
            weights: left as they are where these bags have none.
        Returns:
            Number of entries written.
        """
        if self.values.dtype == np.uint64:
            values = values.view(np.uint64)  # numbers beyond int64 keep their bits
        if self.offsets is not None and self.ends is not None:
            return self._gather(start, stop, values, lengths, weights)
        if self.offsets is None:
            low, high = start, stop
            lengths.fill(1)
        else:
            low, high = self.offsets.item(start), self.offsets.item(stop)
            ends, begins = self.offsets[start + 1 : stop + 1], self.offsets[start:stop]
            np.subtract(ends, begins, lengths, casting="unsafe")
        # a plain copy, by vector loads: a fifth faster than memmove
        np.positive(self.values[low:high], values[: high - low])
        if weights is not None and self.weights is not None:
            weights[: high - low] = self.weights[low:high]
        return high - low

    def _gather(
        self,
        start: int,
        stop: int,
        values: NDArray[Any],
        lengths: NDArray[np.int32],
        weights: NDArray[np.float32] | None,
    ) -> int:
        assert self.offsets is not None and self.ends is not None
        begins, counts = self.offsets[start:stop], self.ends[start:stop] - self.offsets[start:stop]
        lengths[:] = counts
        written = np.cumsum(counts)
        total = int(written[-1]) if len(written) else 0
        # where each entry lies: its place in the output, moved by as much as its bag is
        places = np.repeat(begins - (written - counts), counts)
        places += np.arange(total)
        if self.values.dtype == values.dtype:
            # `clip` leaves out the check of every place
            np.take(self.values, places, out=values[:total], mode="clip")
        else:
            values[:total] = self.values[places]
        if weights is not None and self.weights is not None:
            weights[:total] = self.weights[places]
        return total


def read_bags(
    array: pa.Array, column: str, leaf: Callable[[pa.Array], NDArray[Any]], where: Where
) -> Bags:
    """Return the bags of a column of scalars or lists; nulls are empty bags.

    Args:
        leaf: turns values without nulls into numpy.
    Raises:
        InputError: a null inside a list; names row and file.
    """
    kind = array.type
    nulls = array.null_count
    # A column of nulls alone has no type; all of its bags are empty.
    if pa.types.is_null(kind):
        return Bags(np.zeros(0, np.int64), np.zeros(len(array) + 1, np.int64))
    if not is_list(kind):
        if not nulls:
            return Bags(leaf(array), None)
        leaf(array[:0])  # a type that does not fit, whose nulls Arrow may not be able to drop
        return Bags(leaf(array.drop_null()), _offsets(mask(array.is_valid())))
    if is_list_view(kind) and not nulls and not array.values.null_count:
        begins = array.offsets.to_numpy().astype(np.int64)
        return Bags(leaf(array.values), begins, ends=begins + array.sizes.to_numpy())
    if nulls or is_list_view(kind) or pa.types.is_fixed_size_list(kind):
        # `flatten` leaves out null lists, so their lengths are 0
        values = array.flatten()
        offsets = _offsets(pc.list_value_length(array).fill_null(0).to_numpy())
    else:
        # a slice: its values begin where its first offset says, and offsets shall begin at 0
        offsets = array.offsets.to_numpy()
        first = int(offsets[0])
        values = array.values.slice(first, int(offsets[-1]) - first)
        if first:
            offsets = offsets - offsets.dtype.type(first)
    if values.null_count:
        row = Bags(values, offsets).row_of(first_true(mask(values.is_null())))
        raise InputError(
            f"column {column!r} has a null inside the list in {where(row)}. Drop null elements "
            "when writing the data."
        )
    return Bags(leaf(values), offsets)


def plain_bags(array: pa.Array) -> Bags | None:
    """Return lists of int64 without nulls by few calls; None for any other column."""
    if array.null_count or not isinstance(array, (pa.ListArray, pa.LargeListArray)):
        return None
    leaf = array.values
    if leaf.type != _INT64 or leaf.null_count:
        return None
    # of all ways to a view, dlpack is the quickest
    return Bags(np.from_dlpack(leaf), np.from_dlpack(array.offsets))


def _offsets(lengths: NDArray[Any]) -> NDArray[np.int64]:
    out = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=out[1:])
    return out
