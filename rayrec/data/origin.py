"""The origin of the rows of a batch: file, row number, and columns that are carried along unread.

Predictions are matched to their rows by these. They are made only when they are asked for, cost one
array of each per shuffled block, and stay on the CPU when a batch moves to a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rayrec.data.column_types import one_batch


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


def join_origins(parts: Sequence[RowOrigin]) -> RowOrigin:
    """Return the rows of all parts, in order; at least one part."""
    kept = [part.columns for part in parts if part.columns is not None]
    columns = None
    if len(kept) == len(parts):
        tables = [pa.Table.from_batches([batch]) for batch in kept]
        table = pa.concat_tables(tables, promote_options="permissive")
        columns = one_batch(table) if table.num_rows else kept[0]
    return RowOrigin(
        np.concatenate([part.file for part in parts]),
        np.concatenate([part.row for part in parts]),
        columns,
    )
