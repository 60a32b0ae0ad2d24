"""Arrow columns to numpy: ids and list offsets as views, nothing copied that need not be.

`read_columns` turns a record batch into `Columns`: for each feature the ids and offsets of its bags
(views of Arrow's buffers for integer columns; new arrays where nulls, hashes or dictionaries force
them), the dense matrix and the labels. No Python loop over rows. Nulls are empty bags; a null
inside a list is an error, since a bag cannot tell it from a missing id. Slices are honoured
everywhere: a list's `values` ignores them, its `offsets` and `flatten()` do not, and a null list
may still span values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

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
        return (
            np.ones(rows, np.int64)
            if self.offsets is None
            else np.diff(self.offsets).astype(np.int64)
        )

    def count(self, start: int, stop: int) -> int:
        """Ids in rows [start, stop)."""
        return (
            stop - start
            if self.offsets is None
            else self.offsets.item(stop) - self.offsets.item(start)
        )


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
        binary_labels: refuse labels other than 0 and 1.
    Raises:
        InputError: a column is missing, has a type that its use does not take, or holds a bad
            label, dense value, weight or null.
    Cost: views for integer columns without nulls; one pass over dense columns and labels. The range
    of ids is checked in `assemble`.
    """
    rows, arrays, index = batch.num_rows, batch.columns, batch.schema.get_field_index

    def column(name: str) -> pa.Array:
        found = index(name)
        if found < 0:
            raise InputError(missing(name, batch.schema, where(0)))
        return arrays[found]

    bags = []
    for feature in schema.features:
        array = column(feature.column)
        bag = _plain_bags(array, feature) or _bags(
            array, feature.column, partial(_ids, feature=feature), where
        )
        if feature.weights is not None:
            weights = _bags(
                column(feature.weights), feature.weights, partial(_weights, feature=feature), where
            )
            bag.weights = _checked_weights(bag, weights, feature, rows, where)
        bags.append(bag)
    labels = _labels(column(schema.label), schema.label, where, binary_labels)
    return Columns(
        rows,
        bags,
        _dense([column(spec.column) for spec in schema.dense], rows, schema, where),
        labels,
        where,
    )


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


def missing(name: str, schema: pa.Schema, where: str) -> str:
    """The message for a column that is not there, or there more than once."""
    if name in schema.names:
        return (
            f"column {name!r} occurs {schema.names.count(name)} times ({where}). Rename the others."
        )
    return f"column {name!r} is missing ({where}); the columns are {schema.names}. Write it, or change the schema."


def _bags(
    array: pa.Array, column: str, leaf: Callable[[pa.Array], NDArray[Any]], where: Where
) -> Bags:
    """Offsets and leaf values of a column of scalars or lists; nulls are empty bags."""
    kind = array.type
    nulls = array.null_count
    if pa.types.is_null(kind):
        return Bags(np.zeros(0, np.int64), np.zeros(len(array) + 1, np.int64))
    if not is_list(kind):
        if not nulls:
            return Bags(leaf(array), None)
        return Bags(
            leaf(array.drop_null()), _offsets(array.is_valid().to_numpy(zero_copy_only=False))
        )
    if pa.types.is_fixed_size_list(kind):
        values = array.flatten()  # leaves out null lists
        lengths = np.full(len(array), kind.list_size, np.int64)
        if nulls:
            lengths *= array.is_valid().to_numpy(zero_copy_only=False)
        offsets = _offsets(lengths)
    else:
        offsets = array.offsets.to_numpy()
        if nulls:
            offsets = _offsets(np.diff(offsets) * array.is_valid().to_numpy(zero_copy_only=False))
            values = array.flatten()
        else:
            first = int(offsets[0])
            values = array.values.slice(first, int(offsets[-1]) - first)
            if first:
                offsets = offsets - offsets.dtype.type(first)
    if values.null_count:
        hole = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        row = int(np.searchsorted(offsets, hole, side="right")) - 1
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
    return Bags(np.from_dlpack(leaf), np.from_dlpack(array.offsets))  # the quickest way to a view


def _offsets(lengths: NDArray[Any]) -> NDArray[np.int64]:
    out = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=out[1:])
    return out


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this type holds lists that we read."""
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def is_text(kind: pa.DataType) -> bool:
    """Whether values of this type are hashed as bytes."""
    t = pa.types
    return any(
        is_(kind)
        for is_ in (
            t.is_string,
            t.is_large_string,
            t.is_binary,
            t.is_large_binary,
            t.is_fixed_size_binary,
        )
    )


def id_problem(kind: pa.DataType, feature: Feature) -> str | None:
    """Why a column of this type cannot serve the feature, with the remedy; None when it can."""
    leaf = kind.value_type if is_list(kind) else kind
    if pa.types.is_dictionary(leaf):
        leaf = leaf.value_type
    if pa.types.is_integer(leaf) or pa.types.is_null(leaf):
        return None
    if is_text(leaf):
        if feature.hash_buckets is not None:
            return None
        return f"column {feature.column!r} of feature {feature.name!r} holds {kind}. Set hash_buckets on the feature to hash it into ids."
    return (
        f"column {feature.column!r} of feature {feature.name!r} has type {kind}; ids are "
        "integers, or strings with hash_buckets, or lists of either. Cast the column to int64 or "
        "list<int64>."
    )


def number_problem(kind: pa.DataType, column: str, use: str) -> str | None:
    """Why a column of this type cannot be read as numbers, with the remedy; None when it can."""
    t = pa.types
    if (
        t.is_integer(kind)
        or t.is_floating(kind)
        or t.is_boolean(kind)
        or t.is_decimal(kind)
        or t.is_null(kind)
    ):
        return None
    return f"{use} column {column!r} has type {kind}; it must be a number. Cast it to float32."


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
        return _ids(leaf.dictionary, feature)[leaf.indices.to_numpy(zero_copy_only=False)]
    if pa.types.is_integer(leaf.type):
        values = leaf.to_numpy()
        if values.dtype == np.uint64:
            # beyond int64 turns negative: reported, or hashed by its bits
            values = values.view(np.int64)
        return (
            values if feature.hash_buckets is None else hash_integers(values, feature.hash_buckets)
        )
    assert feature.hash_buckets is not None
    if pa.types.is_fixed_size_binary(leaf.type):
        leaf = leaf.cast(pa.binary())
    wide = pa.types.is_large_string(leaf.type) or pa.types.is_large_binary(leaf.type)
    _, starts, data = leaf.buffers()
    offsets: NDArray[Any] = np.frombuffer(starts, np.int64 if wide else np.int32)[
        leaf.offset : leaf.offset + len(leaf) + 1
    ]
    text = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return to_buckets(hash_bytes(text, offsets), feature.hash_buckets)


def _weights(leaf: pa.Array, feature: Feature) -> NDArray[np.float32]:
    return _floats(leaf, str(feature.weights), f"weights of feature {feature.name!r}:")


def _checked_weights(
    bag: Bags, weights: Bags, feature: Feature, rows: int, where: Where
) -> NDArray[np.float32]:
    ids, given = bag.lengths(rows), weights.lengths(rows)
    if (ids != given).any():
        row = int(np.flatnonzero(ids != given)[0])
        raise InputError(
            f"feature {feature.name!r} has {ids[row]} ids in column {feature.column!r} and "
            f"{given[row]} weights in column {feature.weights!r} in {where(row)}. Write one "
            "weight per id."
        )
    if not np.isfinite(weights.values).all():
        at = int(np.flatnonzero(~np.isfinite(weights.values))[0])
        row = (
            at
            if weights.offsets is None
            else int(np.searchsorted(weights.offsets, at, side="right")) - 1
        )
        raise InputError(
            f"weights column {feature.weights!r} holds {weights.values[at]} in {where(row)}. "
            "Clean the data."
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
        return cast(
            "NDArray[np.float32]",
            array.to_numpy(zero_copy_only=False).astype(np.float32, copy=False),
        )


def _labels(array: pa.Array, column: str, where: Where, binary: bool) -> NDArray[np.float32]:
    if array.null_count:
        row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise InputError(
            f"label column {column!r} holds null in {where(row)}. Drop rows without a label."
        )
    labels = _floats(array, column, "label")
    if not np.isfinite(labels).all():
        row = int(np.flatnonzero(~np.isfinite(labels))[0])
        raise InputError(
            f"label column {column!r} holds {labels[row]} in {where(row)}. Drop rows without a "
            "label."
        )
    if binary and ((labels != 0) & (labels != 1)).any():
        row = int(np.flatnonzero((labels != 0) & (labels != 1))[0])
        raise InputError(
            f"label column {column!r} holds {labels[row]:g} in {where(row)}; click models are "
            "trained on labels 0 and 1. Write 0 or 1, or name another label column in the schema."
        )
    return labels
