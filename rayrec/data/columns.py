"""Arrow columns to numpy: ids and list offsets as views, nothing copied that need not be.

`read_columns` turns a record batch into `Columns`: the bags of each feature, the sequences, the
dense matrix, labels and weights of rows, without a Python loop over rows. Nulls are empty bags; a
null inside a list is an error. `bags` reads lists, `numeric` the columns of numbers. A list's
`values` ignores slices, its `offsets` and `flatten()` do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rayrec.data.bags import Bags, plain_bags, read_bags
from rayrec.data.column_types import (
    group_problem,
    id_problem,
    is_forgotten,
    is_list,
    missing,
    plain_text,
    sequence_problem,
)
from rayrec.data.hashing import hash_bytes, hash_integers, to_buckets, to_ids
from rayrec.data.numeric import (
    Labels,
    Where,
    dense_matrix,
    first_true,
    floats,
    label_values,
    mask,
    refuse_null,
    row_weights,
    times_of,
)
from rayrec.data.origin import RowOrigin
from rayrec.errors import InputError
from rayrec.layout.schema import FeatureSchema
from rayrec.layout.schema_columns import Feature, SequenceColumn

_FORGOTTEN = np.iinfo(np.int64).min  # the group of rows that have none any more


@dataclass(slots=True)
class Columns:
    """The columns of one record batch, in the schema's order."""

    rows: int
    bags: list[Bags]
    sequences: list[Bags]
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
    batch = plain_text(batch)
    rows, arrays, index = batch.num_rows, batch.columns, batch.schema.get_field_index

    def column(name: str) -> pa.Array:
        number = index(name)
        if number < 0:
            raise InputError(missing(name, batch.schema, where(0)))
        return arrays[number]

    def group(name: str) -> NDArray[np.int64]:
        array = column(name)
        return _groups(array, name, where, is_forgotten(batch.schema.field(name)))

    unbounded = schema.unbounded()
    bags = []
    for feature in schema.features:
        bag = _feature_bags(column(feature.source), feature, feature.name in unbounded, where)
        if feature.weights is not None:
            use = f"weights of feature {feature.name!r}:"
            leaf = partial(floats, column=feature.weights, use=use)
            weights = read_bags(column(feature.weights), feature.weights, leaf, where)
            bag = bag.packed()
            bag.weights = _checked_weights(bag, weights.packed(), feature, rows, where)
        bags.append(bag)
    sequences = [_sequence(column(one.source), one, where) for one in schema.sequences]
    _check_aligned(bags, sequences, schema, rows, where)
    for specs, of_specs in ((schema.features, bags), (schema.sequences, sequences)):
        for place, spec in enumerate(specs):
            if spec.most_recent is not None:
                of_specs[place] = of_specs[place].last(spec.most_recent)
    weight_of_row = None
    if with_labels:
        each = [label_values(column(name), name, where, name in binary) for name in schema.labels]
        if schema.weight is not None:
            weight_of_row = row_weights(column(schema.weight), schema.weight, where)
    else:
        each = [np.zeros(rows, np.float32)] * len(schema.labels)
        weight_of_row = None if schema.weight is None else np.ones(rows, np.float32)
    labels = each[0] if len(each) == 1 else cast("Labels", np.stack(each, axis=1))
    dense = dense_matrix([column(spec.column) for spec in schema.dense], rows, schema, where)
    read = Columns(rows, bags, sequences, dense, labels, where, weight_of_row)
    if with_labels:
        read.groups = {name: group(name) for name in schema.groups}
        if schema.time is not None and schema.tells_time:
            read.times = times_of(column(schema.time), schema.time, where)
    return read


def _feature_bags(array: pa.Array, feature: Feature, unbounded: bool, where: Where) -> Bags:
    if feature.hash_buckets is None and feature.weights is None:
        bag = plain_bags(array)
        if bag is not None:
            return bag
    ids = partial(feature_ids, feature=feature, unbounded=unbounded)
    return read_bags(array, feature.column, ids, where)


def _sequence(array: pa.Array, sequence: SequenceColumn, where: Where) -> Bags:
    """The numbers of a sequence, whose type and order are checked."""

    def leaf(values: pa.Array) -> NDArray[Any]:
        problem = sequence_problem(values.type, sequence)
        if problem is not None:
            raise InputError(problem)
        if sequence.dtype == "float32":
            return floats(values, sequence.column, "sequence")
        if pa.types.is_null(values.type):
            return np.zeros(0, np.int64)
        return cast("NDArray[Any]", values.to_numpy())

    bag = read_bags(array, sequence.column, leaf, where)
    if sequence.dtype == "float32" and not np.isfinite(bag.values).all():
        row = bag.row_with(~np.isfinite(bag.values))
        if row is not None:
            raise InputError(
                f"sequence column {sequence.column!r} holds NaN or infinity in {where(row)}. Clean "
                "the data."
            )
    if sequence.ascending and bag.offsets is not None:
        falls = np.zeros(len(bag.values), bool)
        np.less(bag.values[1:], bag.values[:-1], out=falls[1:])
        row = bag.row_with(falls, first=1)  # from one row to the next numbers may fall
        if row is not None:
            raise InputError(
                f"sequence column {sequence.column!r} does not ascend in {where(row)}. Sort the "
                "entries of every row by it, and those of the columns beside it."
            )
    return bag


def _check_aligned(
    bags: Sequence[Bags], sequences: Sequence[Bags], schema: FeatureSchema, rows: int, where: Where
) -> None:
    """Check that lists that belong together have as many entries, before any is shortened."""
    specs = [*schema.features, *schema.sequences]
    read = dict(zip([spec.name for spec in specs], [*bags, *sequences], strict=True))
    for spec in specs:
        if spec.aligned_with is None:
            continue
        other = next(one for one in specs if one.name == spec.aligned_with)
        own, theirs = (read[one.name].lengths(rows) for one in (spec, other))
        if (own != theirs).any():
            row = first_true(own != theirs)
            raise InputError(
                f"column {spec.column!r} of {spec.name!r} has {own[row]} entries and column "
                f"{other.column!r} of {other.name!r} has {theirs[row]} in {where(row)}; they are "
                "aligned. Write as many of each."
            )


def feature_ids(leaf: pa.Array, feature: Feature, unbounded: bool) -> NDArray[Any]:
    """Ids of non-null leaves: integers as they are or hashed, text hashed."""
    # a list in here is a list inside of a list, which `id_problem` would take for a column of lists
    kind = pa.list_(leaf.type) if is_list(leaf.type) else leaf.type
    problem = id_problem(kind, feature, unbounded)
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
        words = feature_ids(leaf.dictionary, feature, unbounded)
        return words[leaf.indices.to_numpy(zero_copy_only=False)]
    if pa.types.is_integer(leaf.type):
        values = leaf.to_numpy()
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
    count = leaf.offset + len(leaf) + 1  # the buffer may be longer, by any number of bytes
    all_offsets: NDArray[Any] = np.frombuffer(starts, np.int64 if wide else np.int32, count)
    offsets = all_offsets[leaf.offset :]
    text = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return hash_bytes(text, offsets)


def _groups(
    array: pa.Array, column: str, where: Where, may_be_null: bool = False
) -> NDArray[np.int64]:
    """(B,) numbers of the groups of rows: whole numbers as they are, text by its hash; rows whose
    group was forgotten are one.
    """
    problem = group_problem(array.type, column)
    if problem is not None:
        raise InputError(problem)
    if array.null_count and may_be_null:
        of_none, known = np.full(len(array), _FORGOTTEN, np.int64), mask(array.is_valid())
        of_none[known] = _groups(array.drop_null(), column, where)
        return of_none
    remedy = "Write a number or a word for rows of no group, which are then one."
    refuse_null(array, f"group column {column!r}", where, remedy)
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
