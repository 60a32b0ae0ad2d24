"""Arrow columns to numpy: ids and list offsets as views, nothing copied that need not be.

`read_columns` turns a record batch into `Columns`: ids and offsets of each feature's bags, the
dense matrix, labels and weights of rows, without a Python loop over rows. Nulls are empty bags; a
null inside a list is an error. `numeric` reads the columns of numbers. A list's `values` ignores
slices, its `offsets` and `flatten()` do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rayrec.data.column_types import group_problem, id_problem, is_list, missing
from rayrec.data.hashing import hash_bytes, hash_integers, to_buckets, to_ids
from rayrec.data.numeric import (
    Labels,
    Where,
    dense_matrix,
    first_true,
    floats,
    label_values,
    mask,
    row_weights,
    times_of,
)
from rayrec.data.origin import RowOrigin
from rayrec.errors import InputError
from rayrec.layout.schema import FeatureSchema
from rayrec.layout.schema_columns import Feature

_INT64 = pa.int64()


@dataclass(slots=True)
class Bags:
    """One feature's bags: row i holds values[offsets[i]:offsets[i + 1]].

    Without `offsets`, row i holds values[i] alone.
    """

    values: NDArray[Any]  # (N,) any integer type; float32 for weights
    offsets: NDArray[Any] | None  # (B + 1,) int32 or int64; offsets[0] is 0 where there are weights
    weights: NDArray[np.float32] | None = None  # (N,), None for all ones

    def lengths(self, rows: int) -> NDArray[np.int64]:
        """(rows,) ids per bag."""
        if self.offsets is None:
            return np.ones(rows, np.int64)
        return np.diff(self.offsets).astype(np.int64)

    def row_of(self, position: int) -> int:
        """The row whose bag holds the value at `position`."""
        if self.offsets is None:
            return position
        return int(np.searchsorted(self.offsets, position, side="right")) - 1

    def count(self, start: int, stop: int) -> int:
        """Ids in rows [start, stop)."""
        if self.offsets is None:
            return stop - start
        return self.offsets.item(stop) - self.offsets.item(start)


@dataclass(slots=True)
class Columns:
    """The columns of one record batch, in the schema's order."""

    rows: int
    bags: list[Bags]
    dense: NDArray[np.float32]  # (B, I)
    labels: Labels  # (B,), or (B, T) of several labels
    where: Where
    row_weights: NDArray[np.float32] | None = None  # (B,)
    origin: RowOrigin | None = None
    groups: dict[str, NDArray[np.int64]] = field(default_factory=dict)  # (B,) each
    times: NDArray[np.int64] | None = None  # (B,) seconds


def read_columns(
    batch: pa.RecordBatch,
    schema: FeatureSchema,
    where: Where,
    binary: Sequence[str] = (),
    with_labels: bool = True,
) -> Columns:
    """Read the schema's columns of one record batch.

    Args:
        batch: may be sliced or empty; other columns are ignored.
        where: names a row of `batch` in messages.
        binary: the label columns that may hold nothing but 0 and 1.
        with_labels: read labels, weights of rows, groups and times; else labels are zeros, and
            rows weigh 1.
    Raises:
        InputError: a column is missing, of a wrong type, or holds a bad label, number or null.
    Cost: views for integer columns without nulls; one pass over dense columns and labels. The range
    of ids is checked in `assemble`.
    """
    rows, arrays, index = batch.num_rows, batch.columns, batch.schema.get_field_index

    def column(name: str) -> pa.Array:
        number = index(name)
        if number < 0:
            raise InputError(missing(name, batch.schema, where(0)))
        return arrays[number]

    bags, unbounded = [], schema.unbounded()
    for feature in schema.features:
        array = column(feature.column)
        bag = _plain_bags(array, feature)
        if bag is None:
            ids = partial(_ids, feature=feature, unbounded=feature.name in unbounded)
            bag = _bags(array, feature.column, ids, where)
        if feature.weights is not None:
            use = f"weights of feature {feature.name!r}:"
            leaf = partial(floats, column=feature.weights, use=use)
            weights = _bags(column(feature.weights), feature.weights, leaf, where)
            bag.weights = _checked_weights(bag, weights, feature, rows, where)
        bags.append(bag)
    if with_labels:
        each = [label_values(column(name), name, where, name in binary) for name in schema.labels]
    else:
        each = [np.zeros(rows, np.float32)] * len(schema.labels)
    labels = each[0] if len(each) == 1 else cast("Labels", np.stack(each, axis=1))
    weight_of_row = None
    if schema.weight is not None and not with_labels:
        weight_of_row = np.ones(rows, np.float32)
    elif schema.weight is not None:
        weight_of_row = row_weights(column(schema.weight), schema.weight, where)
    dense = dense_matrix([column(spec.column) for spec in schema.dense], rows, schema, where)
    groups = {}
    if with_labels:
        groups = {name: _groups(column(name), name, where) for name in schema.groups}
    times = None
    if with_labels and schema.time is not None:
        times = times_of(column(schema.time), schema.time, where)
    return Columns(rows, bags, dense, labels, where, weight_of_row, groups=groups, times=times)


def _bags(
    array: pa.Array, column: str, leaf: Callable[[pa.Array], NDArray[Any]], where: Where
) -> Bags:
    """Offsets and leaf values of a column of scalars or lists; nulls are empty bags."""
    kind = array.type
    nulls = array.null_count
    # A column of nulls alone has no type; all of its bags are empty.
    if pa.types.is_null(kind):
        return Bags(np.zeros(0, np.int64), np.zeros(len(array) + 1, np.int64))
    if not is_list(kind):
        if not nulls:
            return Bags(leaf(array), None)
        return Bags(leaf(array.drop_null()), _offsets(mask(array.is_valid())))
    if pa.types.is_fixed_size_list(kind):
        # `flatten` leaves out null lists, so their lengths are 0
        values = array.flatten()
        lengths = np.full(len(array), kind.list_size, np.int64)
        offsets = _offsets(lengths * mask(array.is_valid()) if nulls else lengths)
    elif nulls:
        values = array.flatten()
        offsets = _offsets(np.diff(array.offsets.to_numpy()) * mask(array.is_valid()))
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


def _plain_bags(array: pa.Array, feature: Feature) -> Bags | None:
    """Lists of int64 without nulls, hashing or weights, by few calls; None for any other column."""
    if feature.hash_buckets is not None or feature.weights is not None:
        return None
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


def _ids(leaf: pa.Array, feature: Feature, unbounded: bool) -> NDArray[Any]:
    """Ids of non-null leaves: integers as they are or hashed, text hashed."""
    problem = id_problem(leaf.type, feature, unbounded)
    if problem is not None:
        raise InputError(problem)
    if pa.types.is_null(leaf.type) or not len(leaf):
        return np.zeros(0, np.int64)
    if pa.types.is_dictionary(leaf.type):
        if leaf.dictionary.null_count:
            raise InputError(
                f"column {feature.column!r} of feature {feature.name!r} has a null in its "
                "dictionary. Encode nulls as nulls."
            )
        # Each word of the dictionary is hashed once, however often it occurs.
        words = _ids(leaf.dictionary, feature, unbounded)
        return words[leaf.indices.to_numpy(zero_copy_only=False)]
    if pa.types.is_integer(leaf.type):
        values = leaf.to_numpy()
        if values.dtype == np.uint64:
            # beyond int64 turns negative: reported, or hashed by its bits
            values = values.view(np.int64)
        if feature.hash_buckets is None:
            return values
        return hash_integers(values, feature.hash_buckets)
    if feature.hash_buckets is None:
        return to_ids(_text_hashes(leaf))
    return to_buckets(_text_hashes(leaf), feature.hash_buckets)


def _text_hashes(leaf: pa.Array) -> NDArray[np.uint64]:
    # Text of fixed size has no offsets; the cast gives it some.
    if pa.types.is_fixed_size_binary(leaf.type):
        leaf = leaf.cast(pa.binary())
    # Arrow's buffers of text: offsets into the bytes, 64 bits wide for the large types
    wide = pa.types.is_large_string(leaf.type) or pa.types.is_large_binary(leaf.type)
    _, starts, data = leaf.buffers()
    all_offsets: NDArray[Any] = np.frombuffer(starts, np.int64 if wide else np.int32)
    offsets = all_offsets[leaf.offset : leaf.offset + len(leaf) + 1]
    text = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return hash_bytes(text, offsets)


def _groups(array: pa.Array, column: str, where: Where) -> NDArray[np.int64]:
    """(B,) numbers of the groups of rows: whole numbers as they are, text by its hash."""
    problem = group_problem(array.type, column)
    if problem is not None:
        raise InputError(problem)
    if array.null_count:
        row = first_true(mask(array.is_null()))
        raise InputError(
            f"group column {column!r} holds null in {where(row)}. Write a number or a word for "
            "rows of no group, which are then one."
        )
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_integer(array.type):
        return array.to_numpy().astype(np.int64, copy=False)
    return _text_hashes(array).view(np.int64)


def _checked_weights(
    bag: Bags, weights: Bags, feature: Feature, rows: int, where: Where
) -> NDArray[np.float32]:
    ids, given = bag.lengths(rows), weights.lengths(rows)
    # Lengths are compared row by row: equal sums could hide weights of other ids.
    if (ids != given).any():
        row = first_true(ids != given)
        raise InputError(
            f"feature {feature.name!r} has {ids[row]} ids in column {feature.column!r} and "
            f"{given[row]} weights in column {feature.weights!r} in {where(row)}. Write one "
            "weight per id."
        )
    if not np.isfinite(weights.values).all():
        at = first_true(~np.isfinite(weights.values))
        row = weights.row_of(at)
        raise InputError(
            f"weights column {feature.weights!r} holds {weights.values[at]} in {where(row)}. Clean "
            "the data."
        )
    return weights.values
