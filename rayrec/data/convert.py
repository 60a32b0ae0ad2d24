"""Record batches to a `Batch`: gather the parts of each feature's bags, copied once, and check every id on the way.

A batch is assembled from parts, row ranges of `Columns` (views of Arrow memory): one copy writes all ids key-major, one subtraction
per part and feature the lengths. Ids are checked where they land: viewed as unsigned, a negative id is huge, so
one maximum per feature finds both ends of the range. Only a bad id pays for finding its row and file.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from rayrec.data.batch import Batch
from rayrec.data.columns import Bags, Columns, id_problem, is_list, missing, number_problem, read_columns
from rayrec.data.schema import FeatureSchema
from rayrec.errors import InputError
from rayrec.sparse import KeyedJaggedTensor


class Part(NamedTuple):
    """Rows [start, stop) of some columns."""

    columns: Columns
    start: int
    stop: int


def to_batch(data: pa.RecordBatch | pa.Table, schema: FeatureSchema, source: str = "the batch", first_row: int = 0) -> Batch:
    """Convert one record batch or table.

    Args:
        data: may be sliced, chunked or empty.
        source, first_row: name of the data and number of its first row, for messages.
    Raises:
        InputError: names feature, column, row, `source` and value of the first bad entry, and the remedy.
    """
    parts, row = [], first_row
    for batch in data.to_batches() if isinstance(data, pa.Table) else [data]:
        columns = read_columns(batch, schema, partial(_row_name, row, source))
        parts.append(Part(columns, 0, columns.rows))
        row += batch.num_rows
    if isinstance(data, pa.Table) and not parts:
        check_columns(data.schema, schema, source)
    return assemble(parts, schema, global_rows=data.num_rows)


def assemble(parts: Sequence[Part], schema: FeatureSchema, global_rows: int) -> Batch:
    """Join parts into one batch, rows in the order of the parts.

    Args:
        parts: may be empty: a batch of no rows.
        global_rows: rows of the global batch over all ranks.
    Raises:
        InputError: an id is negative or not below `num_embeddings` of a table that its feature looks up.
    Cost: one copy of the ids and one pass of checks.
    """
    rows = sum(stop - start for _, start, stop in parts)
    lengths_FB = np.empty((len(schema.features), rows), np.int32)
    spans: list[list[tuple[int, int]]] = []  # per feature and part, where its ids begin and end
    for f in range(len(schema.features)):
        row, found = 0, []
        for columns, start, stop in parts:
            found.append(_write_lengths(columns.bags[f], start, stop, lengths_FB[f, row : row + stop - start]))
            row += stop - start
        spans.append(found)
    total = sum(high - low for found in spans for low, high in found)
    values = np.empty(total, np.int64)
    weights = np.ones(total, np.float32) if schema.is_weighted else None
    limits = schema.limits()
    first = end = 0
    for f, feature in enumerate(schema.features):
        for (low, high), part in zip(spans[f], parts, strict=True):
            bags, start, end = part.columns.bags[f], end, end + high - low
            values[start:end] = bags.values[low:high]
            if weights is not None and bags.weights is not None:
                weights[start:end] = bags.weights[low:high]
        ids = values[first:end].view(np.uint64)  # still in cache
        if first < end and ids.max() >= limits[feature.name]:
            _raise_bad_id(values[first:end], lengths_FB[f], limits[feature.name], f, parts, schema)
        first = end
    dense = np.concatenate([p.columns.dense[p.start : p.stop] for p in parts]) if parts else np.empty((0, len(schema.dense)), np.float32)
    labels = np.concatenate([p.columns.labels[p.start : p.stop] for p in parts]) if parts else np.empty(0, np.float32)
    return Batch(
        dense_features=torch.from_numpy(dense),
        sparse_features=KeyedJaggedTensor(
            keys=list(schema.feature_names()),
            values=torch.from_numpy(values),
            weights=None if weights is None else torch.from_numpy(weights),
            lengths=torch.from_numpy(lengths_FB.reshape(-1)),
            stride=rows,
        ),
        labels=torch.from_numpy(labels),
        global_rows=global_rows,
    )


def check_columns(arrow: pa.Schema, schema: FeatureSchema, source: str) -> None:
    """Check that a file has the schema's columns, in types that their uses take.

    Raises:
        InputError: names the column, its type, `source` and the remedy.
    """
    for name in schema.columns():
        if arrow.get_field_index(name) < 0:
            raise InputError(missing(name, arrow, source))
    problems = [number_problem(arrow.field(schema.label).type, schema.label, "label")]
    problems += [number_problem(arrow.field(c.column).type, c.column, "dense") for c in schema.dense]
    problems += [id_problem(arrow.field(f.column).type, f) for f in schema.features]
    for feature in schema.features:
        if feature.weights is not None:
            kind = arrow.field(feature.weights).type
            problems.append(number_problem(kind.value_type if is_list(kind) else kind, feature.weights, "weights"))
    for problem in problems:
        if problem is not None:
            raise InputError(f"{source}: {problem}")


def _row_name(base: int, source: str, row: int) -> str:
    return f"row {base + row} of {source}"


def _write_lengths(bags: Bags, start: int, stop: int, out: NDArray[np.int32]) -> tuple[int, int]:
    """Lengths of rows [start, stop) into `out`; returns where their ids begin and end."""
    if bags.offsets is None:
        out.fill(1)
        return start, stop
    np.subtract(bags.offsets[start + 1 : stop + 1], bags.offsets[start:stop], out=out, casting="unsafe")
    return int(bags.offsets[start]), int(bags.offsets[stop])


def _raise_bad_id(
    values: NDArray[np.int64], lengths: NDArray[np.int32], limit: int, index: int, parts: Sequence[Part], schema: FeatureSchema
) -> None:
    """Find the row of the first bad id of one feature and say all about it."""
    at = int(np.flatnonzero(values.view(np.uint64) >= limit)[0])
    row = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
    feature = schema.features[index]
    table = next(t.name for t in schema.tables if feature.name in t.feature_names and t.num_embeddings == limit)
    for columns, start, stop in parts:
        if row < stop - start:
            raise InputError(
                f"feature {feature.name!r} (column {feature.column!r}) holds id {values[at]} in {columns.where(start + row)}; table "
                f"{table!r} takes ids in [0, {limit}). Raise num_embeddings, map the ids, or set hash_buckets on the feature."
            )
        row -= stop - start
    raise AssertionError("a bad id lies in one of the parts")
