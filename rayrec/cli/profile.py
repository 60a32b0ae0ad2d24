"""Pooling factors from a sample of the data, so that nobody has to guess them.

The mean number of ids per row of each feature's column, over the first rows of the data: 1 for a plain column, less where it has nulls.
Costs one read of the feature columns of the sample. Leaves out how often each id occurs, which the prices do not know.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from rayrec.cli.tables import SchemaTables
from rayrec.errors import ConfigError

SAMPLE_ROWS = 100_000
LEAST = 0.01  # of a feature without ids in the sample; prices need more than none
ARROW_SUFFIXES = (".arrow", ".feather", ".ipc")


def pooling_factors(schema: SchemaTables, path: str | Path, rows: int = SAMPLE_ROWS) -> dict[str, float]:
    """Mean ids per bag of each table, averaged over its features.

    Args:
        path: a file, or a folder of files: Parquet, or Arrow IPC by their suffix.
        rows: that are read at most.
    Raises:
        ConfigError: nothing can be read there, or a feature's column is missing.
    """
    wanted = sorted(set(schema.columns.values()))
    try:
        sample = ds.dataset(path, format=_format(Path(path))).head(rows, columns=wanted)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"cannot profile {path}: {error}") from None
    if sample.num_rows == 0:
        raise ConfigError(f"cannot profile {path}: it has no rows.")
    means = {name: _mean_ids(sample.column(column)) for name, column in schema.columns.items()}
    return {table.name: max(fmean(means[feature] for feature in table.feature_names), LEAST) for table in schema.tables}


def _format(path: Path) -> str:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith((".", "_")))
    return "ipc" if files and files[0].suffix in ARROW_SUFFIXES else "parquet"


def _mean_ids(column: pa.ChunkedArray) -> float:
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type):
        return (pc.sum(pc.list_value_length(column)).as_py() or 0) / len(column)  # a null list is an empty bag
    return 1.0 - column.null_count / len(column)
