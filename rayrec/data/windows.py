"""Windows of rows in time: training walks them in order, and each is scored before it is trained.

A `WindowedDataset` is one pass over the rows of a data set, window after window; rows are shuffled
inside of a window, and no batch holds rows of two. Which rows a window has follows from a column of
the data, so that neither a resume nor another number of ranks changes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rayrec.checks import whole_number
from rayrec.data.batch import Batch
from rayrec.data.files import FileDataset
from rayrec.data.listing import DataFile
from rayrec.data.order import count_batches
from rayrec.data.predicate import Junction, Term
from rayrec.data.selected import Selection
from rayrec.errors import ConfigError, InputError
from rayrec.fields.typed import check_fields

MOST_WINDOWS = 10_000
_LEAST, _MOST = -(2**63), 2**63 - 1  # of the column's numbers

Counts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeWindows:
    """Cut of rows into windows by a column of whole numbers, such as a day or seconds since 1970.

    Window k holds the rows whose column is in [start + k * size, start + (k + 1) * size).

    Attributes:
        column: of the files or of their folders.
        size: of a window, in the unit of the column.
        start: of the first window; None takes the smallest value of the rows.
        stop: rows from this value on are left out; None takes all.
    Raises:
        ConfigError: the size is not positive, stop is not above start, or a number has more than
            64 bits.
    """

    column: str
    size: int = 1
    start: int | None = None
    stop: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        whole_number("size", self.size, most=_MOST)
        for name in ("start", "stop"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), _LEAST, _MOST)
        if self.start is not None and self.stop is not None and self.start >= self.stop:
            raise ConfigError(f"start={self.start} and stop={self.stop}: stop must be above start.")


class TimeWindow(NamedTuple):
    """Rows of one window: the values [start, stop) of the column, and the data set of its rows."""

    start: int
    stop: int
    data: FileDataset


class WindowedDataset(FileDataset):
    """Rows of a data set, window after window; windows without rows are left out.

    Args:
        data: the rows, of which those before the first window and behind the last are left out.
        cut: the windows.
    Attributes:
        windows: in their order.
    Raises:
        InputError: the column is not there, holds no whole numbers, or is null in a row; or no row
            is in a window.
        ConfigError: there are more than 10,000 windows.
    Cost: the column is read once.
    """

    windows: tuple[TimeWindow, ...]

    def __init__(self, data: FileDataset, cut: TimeWindows) -> None:
        vars(self).update(vars(data))
        self.READER, self._cut = data.READER, cut
        counted = [_counted(data, file, cut) for file in data.files]
        found = np.unique(np.concatenate([values for file in counted for values, _ in file]))
        if not len(found):
            raise InputError(
                f"{data.path!r} has no rows in windows of {cut.column!r} with start={cut.start} "
                f"and stop={cut.stop}; give others."
            )
        first = int(found[0]) if cut.start is None else cut.start
        numbers = np.unique(_numbers(found, first, cut.size))
        if len(numbers) > MOST_WINDOWS:
            raise ConfigError(
                f"column {cut.column!r} of {data.path!r} makes {len(numbers)} windows of size "
                f"{cut.size}; the most are {MOST_WINDOWS}. Give a larger size."
            )
        by_file = []
        for file in counted:
            rows = np.zeros((len(file), len(numbers)), np.int64)
            for chunk, (values, counts) in enumerate(file):
                places = np.searchsorted(numbers, _numbers(values, first, cut.size))
                rows[chunk] = np.bincount(places, counts, len(numbers))
            by_file.append(rows.T.tolist())
        self.windows = tuple(
            _window(data, cut, first + int(number) * cut.size, [file[k] for file in by_file])
            for k, number in enumerate(numbers)
        )

    @property
    def num_rows(self) -> int:
        """Rows of all windows."""
        return sum(window.data.num_rows for window in self.windows)

    def num_batches(self, global_batch_size: int, drop_last: bool = False) -> int:
        """Global batches of all windows; no batch has rows of two."""
        return self.first_batches(global_batch_size, drop_last)[-1]

    def first_batches(self, global_batch_size: int, drop_last: bool = False) -> list[int]:
        """Return the number of global batches before each window, and before the end."""
        rows = (window.data.num_rows for window in self.windows)
        batches = (count_batches(count, global_batch_size, drop_last) for count in rows)
        return list(accumulate(batches, initial=0))

    def fingerprint(self) -> str:
        """A short hash of all that the order of samples depends on."""
        cut = [self._cut.column, *([one.start, one.stop] for one in self.windows)]
        return hashlib.sha256(json.dumps([super().fingerprint(), cut]).encode()).hexdigest()[:32]

    def loader(  # type: ignore[override]
        self,
        rank: int,
        num_ranks: int,
        global_batch_size: int,
        seed: int = 0,
        epoch: int = 0,
        start_batch: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        **options: Any,
    ) -> Iterator[Batch]:
        """Yield one rank's parts of the global batches from `start_batch` on, window after window.

        Args:
            options: see `RowDataset.loader`.
        """
        firsts = self.first_batches(global_batch_size, drop_last)
        for number, (window, first) in enumerate(zip(self.windows, firsts, strict=False)):
            if firsts[number + 1] > max(first, start_batch):
                yield from window.data.loader(
                    rank,
                    num_ranks,
                    global_batch_size,
                    seed=seed,
                    # each window is shuffled in an order of its own
                    epoch=epoch * len(self.windows) + number,
                    start_batch=max(0, start_batch - first),
                    shuffle=shuffle,
                    drop_last=drop_last,
                    **options,
                )


def _numbers(values: Counts, first: int, size: int) -> NDArray[np.uint64]:
    """Return the number of the window of each value, from `first` on."""
    # without a sign, the distance of any two numbers of 64 bits has 64 bits
    return (values.view(np.uint64) - np.uint64(first % 2**64)) // np.uint64(size)


def _counted(data: FileDataset, file: DataFile, cut: TimeWindows) -> list[tuple[Counts, Counts]]:
    """Return the values of the column that are in a window, and their rows, of each chunk."""
    reader, source = data.open(file), f"file {file.path!r}"
    if reader.schema.names.count(cut.column) != 1:
        raise InputError(
            f"{source} has no column {cut.column!r} for the windows; its columns are "
            f"{reader.schema.names}."
        )
    kind = reader.schema.field(cut.column).type
    if not pa.types.is_integer(kind):
        raise InputError(
            f"{source}: column {cut.column!r} of the windows has type {kind}; cast it to int64, "
            "such as whole seconds or days since 1970."
        )
    counted = []
    for chunk in range(len(file.chunk_rows)):
        parts = [np.empty(0, np.int64)]
        for piece in reader.pieces(chunk, [cut.column]):
            column = piece.column(0)
            if column.null_count:
                raise InputError(
                    f"{source}: column {cut.column!r} of the windows is null in {column.null_count}"
                    f" rows of chunk {chunk}; fill it, or leave these rows out by a filter."
                )
            try:
                parts.append(pc.cast(column, pa.int64()).to_numpy())
            except pa.ArrowInvalid as error:
                raise InputError(
                    f"{source}: column {cut.column!r} of the windows holds a number that int64 "
                    f"does not: {error}."
                ) from error
        values, counts = np.unique(np.concatenate(parts), return_counts=True)
        low = 0 if cut.start is None else np.searchsorted(values, cut.start)
        high = len(values) if cut.stop is None else np.searchsorted(values, cut.stop)
        counted.append((values[low:high], counts[low:high]))
    return counted


def _window(data: FileDataset, cut: TimeWindows, start: int, rows: list[list[int]]) -> TimeWindow:
    stop = start + cut.size if cut.stop is None else min(start + cut.size, cut.stop)
    # a literal has 64 bits, and no number of the column is larger
    end = Term(cut.column, "<", (stop,)) if stop <= _MOST else Term(cut.column, "<=", (_MOST,))
    terms = (Term(cut.column, ">=", (start,)), end)
    taken = data._found.selection
    predicate = Junction("and", terms if taken.predicate is True else (taken.predicate, *terms))
    part = copy(data)
    part._found = replace(data._found, selection=Selection(predicate, taken.partitions))
    part.where = part._found.where
    part.files = tuple(
        replace(file, chunk_rows=tuple(chunk_rows))
        for file, chunk_rows in zip(data.files, rows, strict=True)
        if any(chunk_rows)
    )
    return TimeWindow(start, stop, part)
