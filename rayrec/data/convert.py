"""Record batches to a `Batch`: each feature's bags are copied once, and every id is checked.

A batch is assembled from parts, row ranges of `Columns` (views of Arrow memory): one copy writes
all ids key-major, one subtraction per part and feature the lengths. Ids are checked where they
land: viewed as unsigned, a negative id is huge, so one maximum per feature finds both ends of the
range. Only a bad id pays for finding its row and file.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayrec.data.bags import Bags
from rayrec.data.batch import Batch
from rayrec.data.column_types import binary_columns, check_columns
from rayrec.data.columns import Columns, read_columns
from rayrec.data.numeric import row_name
from rayrec.data.origin import join_origins
from rayrec.errors import InputError
from rayrec.layout.schema import FeatureSchema
from rayrec.layout.schema_columns import SequenceColumn
from rayrec.layout.tables import UNBOUNDED
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor


class Part(NamedTuple):
    """Rows [start, stop) of some columns."""

    columns: Columns
    start: int
    stop: int

    @property
    def rows(self) -> slice:
        """The rows as a slice of the columns."""
        return slice(self.start, self.stop)


def to_batch(
    data: pa.RecordBatch | pa.Table,
    schema: FeatureSchema,
    source: str = "the batch",
    first_row: int = 0,
    binary_labels: bool | Sequence[str] = False,
    with_labels: bool = True,
) -> Batch:
    """Convert one record batch or table.

    Args:
        data: may be sliced, chunked or empty.
        source, first_row: name of the data and number of its first row, for messages.
        binary_labels: refuse labels other than 0 and 1: of all label columns, or of these.
        with_labels: read labels, weights of rows, groups and times; else labels are zeros, and
            rows weigh 1.
    Raises:
        ConfigError: `binary_labels` names a column that is no label.
        InputError: names feature, column, row, `source` and value of the first bad entry, and the
            remedy.
    """
    parts, row, binary = [], first_row, binary_columns(schema, binary_labels)
    for batch in data.to_batches() if isinstance(data, pa.Table) else [data]:
        where = partial(row_name, row, source)
        columns = read_columns(batch, schema, where, binary, with_labels)
        parts.append(Part(columns, 0, columns.rows))
        row += batch.num_rows
    # An empty table has no chunk that would be checked, and must still have the columns.
    if isinstance(data, pa.Table) and not parts and with_labels:
        check_columns(data.schema, schema, source)
    return assemble(parts, schema, global_rows=data.num_rows)


def assemble(
    parts: Sequence[Part], schema: FeatureSchema, global_rows: int, pin_memory: bool = False
) -> Batch:
    """Join parts into one batch, rows in the order of the parts.

    Args:
        pin_memory: write into page-locked memory (needs CUDA).
    Raises:
        InputError: an id is negative or not below `num_embeddings` of a table that its feature
            looks up.
    Cost: one copy of the ids and one pass of checks.
    """
    rows = sum([stop - start for _, start, stop in parts])
    counts = [0] * len(schema.features)
    for columns, start, stop in parts:
        for f, bags in enumerate(columns.bags):
            counts[f] += bags.count(start, stop)
    ids = sum(counts)
    values = _new(ids, np.int64, pin_memory)
    lengths = _new(len(schema.features) * rows, np.int32, pin_memory)
    weights = _new(ids, np.float32, pin_memory).fill_(1.0) if schema.is_weighted else None
    dense = _new((rows, len(schema.dense)), np.float32, pin_memory)
    several = len(schema.labels) > 1
    exact = any(part.columns.labels.dtype == np.float64 for part in parts)
    labels = _new(
        (rows, len(schema.labels)) if several else rows,
        np.float64 if exact else np.float32,
        pin_memory,
    )
    row_weights = None if schema.weight is None else _new(rows, np.float32, pin_memory)
    weight_array = None if weights is None else weights.numpy()
    _write_bags(parts, schema, values.numpy(), weight_array, lengths.numpy())
    if parts:
        np.concatenate([part.columns.dense[part.rows] for part in parts], out=dense.numpy())
        np.concatenate([part.columns.labels[part.rows] for part in parts], out=labels.numpy())
        if row_weights is not None:
            _join_row_weights(parts, row_weights.numpy())
    sequences = {
        spec.name: _sequence(
            [(part.columns.sequences[s], *part[1:]) for part in parts], spec, rows, pin_memory
        )
        for s, spec in enumerate(schema.sequences)
    }
    groups = {}
    for name in parts[0].columns.groups if parts else schema.groups:
        groups[name] = _new(rows, np.int64, pin_memory)
        if parts:
            pieces = [part.columns.groups[name][part.rows] for part in parts]
            np.concatenate(pieces, out=groups[name].numpy())
    origins = [
        columns.origin.slice(start, stop)
        for columns, start, stop in parts
        if columns.origin is not None
    ]
    kjt = KeyedJaggedTensor(
        keys=list(schema.feature_names()),
        values=values,
        weights=weights,
        lengths=lengths,
        stride=rows,
        # known here; on a GPU the host would have to wait for it
        length_per_key=counts,
        time=_time(parts),
    )
    return Batch(
        dense_features=dense,
        sparse_features=kjt,
        labels=labels,
        global_rows=global_rows,
        weights=row_weights,
        origin=join_origins(origins) if origins else None,
        groups=groups,
        sequences=sequences,
    )


def _time(parts: Sequence[Part]) -> int | None:
    """Return the largest time of the parts' rows, where they have one."""
    of_parts = [
        int(part.columns.times[part.rows].max())
        for part in parts
        if part.columns.times is not None and part.stop > part.start
    ]
    return max(of_parts, default=None)


def _new(shape: int | tuple[int, int], dtype: type[np.generic], pin_memory: bool) -> Tensor:
    """Uninitialized memory for a part of a batch."""
    # memory that earlier batches have freed serves again: malloc gives it to numpy with fewer page
    # faults than to torch; torch gives page-locked memory once copies to the device are done
    tensor = torch.from_numpy(np.empty(shape, dtype))
    return torch.empty_like(tensor, pin_memory=True) if pin_memory else tensor


def _write_bags(
    parts: Sequence[Part],
    schema: FeatureSchema,
    values: NDArray[np.int64],
    weights: NDArray[np.float32] | None,
    lengths: NDArray[np.int32],
) -> None:
    """Copy ids and weights key-major, subtract offsets, and check every id while it is in cache."""
    limits, unsigned = schema.limits(), values.view(np.uint64)
    first = end = row = 0
    for f, feature in enumerate(schema.features):
        for columns, start, stop in parts:
            own = None if weights is None else weights[end:]
            part_lengths = lengths[row : row + stop - start]
            end += columns.bags[f].write(start, stop, values[end:], part_lengths, own)
            row += stop - start
        # seen as unsigned, a negative id is above every limit
        if first < end and np.maximum.reduce(unsigned[first:end]) >= limits[feature.name]:
            rows = sum(stop - start for _, start, stop in parts)
            _raise_bad_id(values[first:end], lengths[row - rows : row], f, parts, schema)
        first = end


def _sequence(
    parts: Sequence[tuple[Bags, int, int]], spec: SequenceColumn, rows: int, pin_memory: bool
) -> JaggedTensor:
    """Join rows [start, stop) of several bags of numbers."""
    count = sum(bags.count(start, stop) for bags, start, stop in parts)
    values = _new(count, np.int64 if spec.dtype == "int64" else np.float32, pin_memory)
    lengths = _new(rows, np.int32, pin_memory)
    end = row = 0
    for bags, start, stop in parts:
        into = lengths.numpy()[row : row + stop - start]
        end += bags.write(start, stop, values.numpy()[end:], into)
        row += stop - start
    return JaggedTensor(values, lengths=lengths)


def _join_row_weights(parts: Sequence[Part], out: NDArray[np.float32]) -> None:
    arrays = []
    for columns, start, stop in parts:
        assert columns.row_weights is not None
        arrays.append(columns.row_weights[start:stop])
    np.concatenate(arrays, out=out)


def _raise_bad_id(
    values: NDArray[np.int64],
    lengths: NDArray[np.int32],
    index: int,
    parts: Sequence[Part],
    schema: FeatureSchema,
) -> None:
    """Find the row of the first bad id of one feature and say all about it."""
    feature = schema.features[index]
    limit = schema.limits()[feature.name]
    at = int(np.flatnonzero(values.view(np.uint64) >= limit)[0])
    row = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
    readers = [table for table in schema.tables if feature.name in table.feature_names]
    table = next(table.name for table in readers if table.id_limit == limit)
    takes = f"ids in [0, {limit})"
    remedy = "Raise num_embeddings, map the ids, or set hash_buckets on the feature"
    if limit == UNBOUNDED:
        takes = "any number of 64 bits but -1"
        remedy = "Leave the list of a row without an id empty, or map missing values to another id"
    for columns, start, stop in parts:
        if row < stop - start:
            number = values[at].astype(columns.bags[index].values.dtype)
            raise InputError(
                f"feature {feature.name!r} (column {feature.column!r}) holds id {number} in "
                f"{columns.where(start + row)}; table {table!r} takes {takes}. {remedy}."
            )
        row -= stop - start
    raise AssertionError("a bad id lies in one of the parts")
