"""Small click data with planted truth, one of whose features has lists of ids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.data.planted import SyntheticConfig
from rayrec.data.synthetic import SyntheticPaths, write_synthetic

# 1003 rows: eight steps of 128 rows, the last one ragged
TINY = SyntheticConfig(
    rows_train=1003, rows_eval=10, num_features=5, num_lists=1, num_dense=2, dim=4, cap=50, seed=1
)

# wide and dense enough that a model learns from a few thousand rows
LEARNABLE = {"num_features": 6, "num_dense": 3, "dim": 8, "cap": 200, "seed": 3}
# twelve steps of 128 rows, the last one ragged
TWELVE_STEPS = {"rows_train": 1530, "rows_eval": 501, "num_dense": 3, "cap": 100, "seed": 3}


def write_clicks(folder: Path, **other: int) -> SyntheticPaths:
    """Write data like `TINY`, with other numbers where given."""
    return write_synthetic(folder, replace(TINY, **other))  # type: ignore[arg-type]


def write_spoilt(
    source: Path, target: Path, column: str, row: int, value: int, statistics: bool = True
) -> None:
    """Write a Parquet file or folder again, with another value in one row of a column.

    Args:
        statistics: without them a driver cannot see the value before the row is read.
    """
    table = pq.read_table(source)
    values = table[column].to_pylist()
    values[row] = value
    place = table.column_names.index(column)
    spoilt = table.set_column(place, column, pa.array(values, table[column].type))
    pq.write_table(spoilt, target, write_statistics=statistics)
