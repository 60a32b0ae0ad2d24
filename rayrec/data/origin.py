"""The origin of the rows of a batch: file, row number, and columns that are carried along unread.

Predictions are matched to their rows by these. They are made only when they are asked for, cost one
array of each per shuffled block, and stay on the CPU when a batch moves to a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rayrec.data.listing import Chunk
    from rayrec.data.order import ChunkRange


class RowOrigin(NamedTuple):
    """The origin of B rows.

    Attributes:
        file: (B,) int32, index into the data set's `files`.
        row: (B,) int64, number of the row in its file, from 0.
        columns: B rows of the columns that were asked for, or None when none were.
    """

    file: NDArray[np.int32]
    row: NDArray[np.int64]
    columns: pa.RecordBatch | None

    def slice(self, start: int, stop: int) -> RowOrigin:
        """Return rows [start, stop), as views."""
        columns = None if self.columns is None else self.columns.slice(start, stop - start)
        return RowOrigin(self.file[start:stop], self.row[start:stop], columns)


def origin_of_block(
    chunks: Sequence[Chunk],
    file_numbers: dict[str, int],
    ranges: Sequence[ChunkRange],
    places: NDArray[np.int64] | None,
    columns: pa.RecordBatch | None,
    numbers: NDArray[np.int64] | None = None,
) -> RowOrigin:
    """Return the origin of one block of rows.

    Args:
        file_numbers: path of a file -> its index in the data set.
        ranges: the parts of chunks that make up the block, in order.
        places: which row of the block in that order comes i-th; None for the order as it is.
        columns: the columns to carry along, in the order of `places`.
        numbers: (B,) number of each row in its file, in the order of `places`, where chunks give a
            part of their rows; None where they give all.
    """
    files, rows = [], []
    for part in ranges:
        chunk, count = chunks[part.chunk], part.stop - part.start
        files.append(np.full(count, file_numbers[chunk.file.path], np.int32))
        first = chunk.first_row + part.start
        rows.append(np.arange(first, first + count, dtype=np.int64))
    file = np.concatenate(files) if files else np.zeros(0, np.int32)
    row = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    if places is not None:
        file, row = file[places], row[places]
    return RowOrigin(file, row if numbers is None else numbers, columns)


def join_origins(parts: Sequence[RowOrigin]) -> RowOrigin:
    """Return the rows of all parts, in order; at least one part."""
    kept = [part.columns for part in parts if part.columns is not None]
    columns = None
    if len(kept) == len(parts):
        tables = [pa.Table.from_batches([batch]) for batch in kept]
        table = pa.concat_tables(tables, promote_options="permissive")
        columns = table.combine_chunks().to_batches()[0] if table.num_rows else kept[0]
    return RowOrigin(
        np.concatenate([part.file for part in parts]),
        np.concatenate([part.row for part in parts]),
        columns,
    )
