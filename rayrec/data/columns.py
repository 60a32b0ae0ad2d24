"""Arrow columns to numpy: ids and list offsets as views, nothing copied that need not be.

`read_columns` turns a record batch into `Columns`: ids and offsets of each feature's bags, the
dense matrix and the labels, without a Python loop over rows. Nulls are empty bags; a null inside a
list is an error. A list's `values` ignores slices, its `offsets` and `flatten()` do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rayrec.data.column_types import id_problem, is_list, missing, number_problem
from rayrec.data.hashing import hash_bytes, hash_integers, to_buckets
from rayrec.data.origin import RowOrigin
from rayrec.errors import InputError
from rayrec.layout.schema import Feature, FeatureSchema

_INT64, _FLOAT32 = pa.int64(), pa.float32()

Where = Callable[[int], str]  # row of a record batch -> "row 5 of <file>", for messages


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
    labels: NDArray[np.float32]  # (B,)
    where: Where
    origin: RowOrigin | None = None


def read_columns(
    batch: pa.RecordBatch, schema: FeatureSchema, where: Where, binary_labels: bool = False
) -> Columns:
    """Read the schema's columns of one record batch.

    Args:
        batch: may be sliced or empty; other columns are ignored.
        where: names a row of `batch` in messages.
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

    bags = []
    for feature in schema.features:
        array = column(feature.column)
        bag = _plain_bags(array, feature)
        if bag is None:
            bag = _bags(array, feature.column, partial(_ids, feature=feature), where)
        if feature.weights is not None:
            use = f"weights of feature {feature.name!r}:"
            leaf = partial(_floats, column=feature.weights, use=use)
            weights = _bags(column(feature.weights), feature.weights, leaf, where)
            bag.weights = _checked_weights(bag, weights, feature, rows, where)
        bags.append(bag)
    labels = _labels(column(schema.label), schema.label, where, binary_labels)
    dense = _dense([column(spec.column) for spec in schema.dense], rows, schema, where)
    return Columns(rows, bags, dense, labels, where)


def _dense(
    arrays: Sequence[pa.Array], rows: int, schema: FeatureSchema, where: Where
) -> NDArray[np.float32]:
    dense = np.empty((rows, len(arrays)), np.float32)
    for i, (spec, array) in enumerate(zip(schema.dense, arrays, strict=True)):
        dense[:, i] = _floats(array, spec.column, "dense", spec.fill)
    if not np.isfinite(dense).all():
        row, i = (int(x) for x in np.argwhere(~np.isfinite(dense))[0])
        raise InputError(
            f"dense column {schema.dense[i].column!r} holds {dense[row, i]} in {where(row)}. "
            "Clean the data, or write null."
        )
    return dense


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
        return Bags(leaf(array.drop_null()), _offsets(_mask(array.is_valid())))
    if pa.types.is_fixed_size_list(kind):
        # `flatten` leaves out null lists, so their lengths are 0
        values = array.flatten()
        lengths = np.full(len(array), kind.list_size, np.int64)
        offsets = _offsets(lengths * _mask(array.is_valid()) if nulls else lengths)
    elif nulls:
        values = array.flatten()
        offsets = _offsets(np.diff(array.offsets.to_numpy()) * _mask(array.is_valid()))
    else:
        # a slice: its values begin where its first offset says, and offsets shall begin at 0
        offsets = array.offsets.to_numpy()
        first = int(offsets[0])
        values = array.values.slice(first, int(offsets[-1]) - first)
        if first:
            offsets = offsets - offsets.dtype.type(first)
    if values.null_count:
        row = Bags(values, offsets).row_of(_first(_mask(values.is_null())))
        raise InputError(
            f"column {column!r} has a null inside the list in {where(row)}. Drop null elements "
            "when writing the data."
        )
    return Bags(leaf(values), offsets)


def _mask(flags: pa.BooleanArray) -> NDArray[np.bool_]:
    return cast("NDArray[np.bool_]", flags.to_numpy(zero_copy_only=False))


def _first(flags: NDArray[np.bool_]) -> int:
    """Where the first True is."""
    return int(np.flatnonzero(flags)[0])


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


def _ids(leaf: pa.Array, feature: Feature) -> NDArray[Any]:
    """Ids of non-null leaves: integers as they are or hashed, text hashed."""
    problem = id_problem(leaf.type, feature)
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
        return _ids(leaf.dictionary, feature)[leaf.indices.to_numpy(zero_copy_only=False)]
    if pa.types.is_integer(leaf.type):
        values = leaf.to_numpy()
        if values.dtype == np.uint64:
            # beyond int64 turns negative: reported, or hashed by its bits
            values = values.view(np.int64)
        if feature.hash_buckets is None:
            return values
        return hash_integers(values, feature.hash_buckets)
    assert feature.hash_buckets is not None
    # Text of fixed size has no offsets; the cast gives it some.
    if pa.types.is_fixed_size_binary(leaf.type):
        leaf = leaf.cast(pa.binary())
    # Arrow's buffers of text: offsets into the bytes, 64 bits wide for the large types
    wide = pa.types.is_large_string(leaf.type) or pa.types.is_large_binary(leaf.type)
    _, starts, data = leaf.buffers()
    all_offsets: NDArray[Any] = np.frombuffer(starts, np.int64 if wide else np.int32)
    offsets = all_offsets[leaf.offset : leaf.offset + len(leaf) + 1]
    text = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return to_buckets(hash_bytes(text, offsets), feature.hash_buckets)


def _checked_weights(
    bag: Bags, weights: Bags, feature: Feature, rows: int, where: Where
) -> NDArray[np.float32]:
    ids, given = bag.lengths(rows), weights.lengths(rows)
    # Lengths are compared row by row: equal sums could hide weights of other ids.
    if (ids != given).any():
        row = _first(ids != given)
        raise InputError(
            f"feature {feature.name!r} has {ids[row]} ids in column {feature.column!r} and "
            f"{given[row]} weights in column {feature.weights!r} in {where(row)}. Write one "
            "weight per id."
        )
    if not np.isfinite(weights.values).all():
        at = _first(~np.isfinite(weights.values))
        row = weights.row_of(at)
        raise InputError(
            f"weights column {feature.weights!r} holds {weights.values[at]} in {where(row)}. Clean "
            "the data."
        )
    return weights.values


def _floats(array: pa.Array, column: str, use: str, fill: float = 0.0) -> NDArray[np.float32]:
    """Numbers as float32, a view where they are; nulls become `fill`.

    Raises:
        InputError: they are no numbers.
    """
    if array.type == _FLOAT32 and not array.null_count:
        return cast("NDArray[np.float32]", np.from_dlpack(array))
    problem = number_problem(array.type, column, use)
    if problem is not None:
        raise InputError(problem)
    if pa.types.is_null(array.type):
        return np.full(len(array), fill, np.float32)
    if array.null_count or pa.types.is_decimal(array.type):
        array = array.cast(pa.float64(), safe=False).fill_null(fill)
    # a float64 beyond float32 becomes inf, which the caller reports
    with np.errstate(over="ignore"):
        values = array.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    return cast("NDArray[np.float32]", values)


def _labels(array: pa.Array, column: str, where: Where, binary: bool) -> NDArray[np.float32]:
    remedy = "Drop rows without a label."
    if array.null_count:
        place = where(_first(_mask(array.is_null())))
        raise InputError(f"label column {column!r} holds null in {place}. {remedy}")
    labels = _floats(array, column, "label")
    if not np.isfinite(labels).all():
        row = _first(~np.isfinite(labels))
        raise InputError(f"label column {column!r} holds {labels[row]} in {where(row)}. {remedy}")
    if binary and ((labels != 0) & (labels != 1)).any():
        row = _first((labels != 0) & (labels != 1))
        raise InputError(
            f"label column {column!r} holds {labels[row]:g} in {where(row)}; click models are "
            "trained on labels 0 and 1. Write 0 or 1, or name another label column in the schema."
        )
    return labels
