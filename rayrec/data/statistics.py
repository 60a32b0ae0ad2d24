"""Bad values found before training, by the statistics that Parquet files keep of every row group.

A writer stores the least and the largest value and the number of nulls of each column of a row
group. Where they say that an id lies outside of its table, that a label is missing or is neither 0
nor 1, that a weight is missing or negative, or that a dense value is beyond float32, that row group
is read and converted as training would, which raises the error that names the row. Nothing else is
read, so this costs the files' metadata. Values that statistics do not tell of, such as NaN, are
found by the rank that reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from rayrec.data.column_types import binary_columns
from rayrec.data.columns import read_columns
from rayrec.data.convert import Part, assemble
from rayrec.data.files import FileDataset
from rayrec.data.listing import DataFile
from rayrec.data.numeric import row_name
from rayrec.data.readers import FileReader, column_statistics
from rayrec.data.selected import ROW
from rayrec.layout.schema import FeatureSchema
from rayrec.layout.tables import MAX_FLOAT32, UNBOUNDED

MAX_COLUMNS = 200_000  # column chunks looked at; about a second


def check_statistics(data: FileDataset, binary_labels: bool | Sequence[str] = True) -> None:
    """Find bad ids and labels that the statistics of a data set's files tell of.

    Args:
        data: what to train on or to score; only Parquet files keep statistics.
        binary_labels: the label columns that must hold 0 and 1 alone; True for all of them.
    Raises:
        ConfigError: `binary_labels` names a column that is no label.
        InputError: names feature, column, row, file and value of the first bad entry, and the
            remedy.
    """
    looked_at, binary = 0, binary_columns(data.schema, binary_labels)
    ignored = set(data.schema.columns()) - set(data.columns)
    for file in data.files:
        reader = data.open(file)
        metadata = reader.metadata
        if metadata is None:
            return
        first_row = 0
        for group, rows in enumerate(file.chunk_rows):
            looked_at += metadata.num_columns
            # A data set of very many row groups would hold up the start; the ranks find the rest as
            # they read it.
            if looked_at > MAX_COLUMNS:
                return
            # read as training would read it, which raises the error that names the row
            told = column_statistics(metadata, group)
            if rows and any(_is_bad(*both, data.schema, binary, ignored) for both in told):
                _convert(data, file, reader, group, first_row, binary)
            first_row += rows


def _convert(
    data: FileDataset,
    file: DataFile,
    reader: FileReader,
    group: int,
    first_row: int,
    binary: Sequence[str],
) -> None:
    """Convert the rows of a row group that are taken, so that the first bad one raises."""
    numbers, source = [ROW] if data.filters_rows else [], repr(file.path)
    rows = reader.read(group, [*data.columns, *numbers])
    for batch in rows.to_batches() if isinstance(rows, pa.Table) else [rows]:
        where = partial(row_name, first_row, source)
        if data.filters_rows:
            where = partial(_numbered, batch.column(ROW), source)
        read = read_columns(batch, data.schema, where, binary, data.with_labels)
        assemble([Part(read, 0, batch.num_rows)], data.schema, batch.num_rows)
        first_row += batch.num_rows


def _numbered(numbers: pa.Array, source: str, row: int) -> str:
    return f"row {numbers[row]} of {source}"


def _is_bad(
    name: str,
    statistics: Any,
    schema: FeatureSchema,
    binary: Sequence[str],
    ignored: Collection[str],
) -> bool:
    """Tell from the statistics of a column of a row group that training refuses a value of it.

    Args:
        ignored: columns of the schema that are not read.
    """
    if statistics is None or name in ignored:
        return False
    if name in schema.labels or name == schema.weight:
        if statistics.has_null_count and statistics.null_count > 0:
            return True
        if not statistics.has_min_max:
            return False
        if name == schema.weight and statistics.min < 0:
            return True
        return name in binary and not 0 <= statistics.min <= statistics.max <= 1
    if any(name == dense.column for dense in schema.dense):
        if not statistics.has_min_max or not isinstance(statistics.min, int | float):
            return False
        return not (-MAX_FLOAT32 <= statistics.min <= statistics.max <= MAX_FLOAT32)
    limits = schema.limits()
    for feature in schema.features:
        if feature.column != name or feature.hash_buckets is not None:
            continue
        if not statistics.has_min_max or not isinstance(statistics.min, int):
            continue
        limit = limits[feature.name]
        if limit == UNBOUNDED:
            # a range that spans -1 does not say that it occurs
            if -1 in (statistics.min, statistics.max):
                return True
        elif statistics.min < 0 or statistics.max >= limit:
            return True
    return False
