"""Checks that the columns of a file fit a schema, before any row is read.

Every function gives a message that names the column, its type and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from rayrec.errors import ConfigError, InputError
from rayrec.layout.schema import FeatureSchema
from rayrec.layout.schema_columns import Feature, SequenceColumn

_FORGOTTEN = b"rayrec.forgotten"  # in the metadata of a field
_MOST_JOINED = 1 << 31  # bytes of all columns below which no text overflows offsets of 32 bits
_LISTS = pa.list_(pa.null()), pa.large_list(pa.null()), pa.list_(pa.null(), 1)
_NESTED = {kind.id for kind in (*_LISTS, pa.dictionary(pa.int8(), pa.null()))}
_PLAIN = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
_VIEWS = {kind.id for kind in _PLAIN}


def check_columns(
    arrow: pa.Schema, schema: FeatureSchema, source: str, with_labels: bool = True
) -> None:
    """Check that a file has the schema's columns, in types that their uses take.

    Args:
        with_labels: whether labels, weights of rows, groups and time are among them.
    Raises:
        InputError: names the column, its type, `source` and the remedy.
    """
    wanted = schema.columns(with_labels)
    for name in wanted:
        if arrow.get_field_index(name) < 0:
            raise InputError(missing(name, arrow, source))
    types = {name: plain_type(arrow.field(name).type) for name in wanted}
    problems: list[str | None] = []
    if with_labels:
        problems += [number_problem(types[name], name, "label") for name in schema.labels]
        if schema.weight is not None:
            problems.append(number_problem(types[schema.weight], schema.weight, "weight"))
        problems += [group_problem(types[name], name) for name in schema.groups]
        if schema.time is not None and schema.tells_time:
            problems.append(time_type_problem(types[schema.time], schema.time))
    problems += [number_problem(types[c.column], c.column, "dense") for c in schema.dense]
    unbounded = schema.unbounded()
    problems += [id_problem(types[f.source], f, f.name in unbounded) for f in schema.features]
    problems += [sequence_problem(_leaf(types[s.source]), s) for s in schema.sequences]
    for feature in schema.features:
        if feature.weights is not None:
            problems.append(
                number_problem(_leaf(types[feature.weights]), feature.weights, "weights")
            )
    for problem in problems:
        if problem is not None:
            raise InputError(f"{source}: {problem}")


def binary_columns(schema: FeatureSchema, binary_labels: bool | Sequence[str]) -> tuple[str, ...]:
    """The label columns that may hold nothing but 0 and 1.

    Args:
        binary_labels: True for all labels of the schema, False for none, or their names.
    Raises:
        ConfigError: a name is no label of the schema.
    """
    if isinstance(binary_labels, bool):
        return schema.labels if binary_labels else ()
    names = (binary_labels,) if isinstance(binary_labels, str) else tuple(binary_labels)
    for name in names:
        if name not in schema.labels:
            raise ConfigError(
                f"binary_labels names {name!r}, which is no label; the labels are "
                f"{list(schema.labels)}."
            )
    return names


def missing(name: str, schema: pa.Schema, where: str) -> str:
    """The message for a column that is not there, or there more than once."""
    count = schema.names.count(name)
    if count:
        return f"column {name!r} occurs {count} times ({where}). Rename the others."
    return (
        f"column {name!r} is missing ({where}); the columns are {schema.names}. Write it, or "
        "change the schema."
    )


def forgotten(field: pa.Field) -> pa.Field:
    """Return the field of a column whose values were partly forgotten, and are null."""
    metadata = {**(field.metadata or {}), _FORGOTTEN: b"1"}
    return field.with_nullable(True).with_metadata(metadata)


def is_forgotten(field: pa.Field) -> bool:
    """Return True for the field of such a column."""
    return _FORGOTTEN in (field.metadata or {})


def is_list(kind: pa.DataType) -> bool:
    """True for the types of lists that are read."""
    t = pa.types
    return (
        t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind) or is_list_view(kind)
    )


def is_list_view(kind: pa.DataType) -> bool:
    """True for lists that say where each begins and how long it is, so that they may overlap."""
    return pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)


def plain_text(rows: pa.Table | pa.RecordBatch) -> pa.Table | pa.RecordBatch:
    """The rows, with views of text and bytes as plain ones: Arrow can neither take rows of views
    nor join them with text.
    """
    # asked of every request, so by the numbers of types
    if not any(map(_has_view, rows.schema.types)):
        return rows
    schema = plain_schema(rows.schema)
    # the cast of a whole refuses a null in a column that says it has none, which is read elsewhere
    arrays = [column.cast(field.type) for column, field in zip(rows.columns, schema, strict=True)]
    return type(rows).from_arrays(arrays, schema=schema)


def _has_view(kind: pa.DataType) -> bool:
    while kind.id in _NESTED:
        kind = kind.value_type
    return kind.id in _VIEWS


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The columns of rows as `plain_text` gives them."""
    fields = [field.with_type(plain_type(field.type)) for field in schema]
    return pa.schema(fields, schema.metadata)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """A type without views of text or bytes; Arrow casts none in list views."""
    if pa.types.is_dictionary(kind) and kind.value_type in _PLAIN:
        return pa.dictionary(kind.index_type, _PLAIN[kind.value_type], kind.ordered)
    if is_list(kind) and not is_list_view(kind):
        leaf = plain_type(kind.value_type)
        if leaf != kind.value_type:
            fixed = pa.types.is_fixed_size_list(kind)
            return pa.list_(leaf, kind.list_size) if fixed else pa.large_list(leaf)
    return _PLAIN.get(kind, kind)


def roomy(rows: pa.Table) -> pa.Table:
    """Rows whose texts and lists have offsets of 64 bits, so that any may be taken from them.

    Of other columns Arrow takes none where all texts of the table are more than 2 GiB.
    """
    fields = [field.with_type(_roomy_type(field.type)) for field in rows.schema]
    return rows.cast(pa.schema(fields, rows.schema.metadata))


def one_batch(rows: pa.Table) -> pa.RecordBatch:
    """All rows as one record batch; of 2 GiB and more they become `roomy`, or Arrow would join a
    part of the texts, or none.
    """
    whole = (rows if rows.nbytes < _MOST_JOINED else roomy(rows)).combine_chunks()
    batches = whole.to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=whole.schema)


def _roomy_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.large_list(_roomy_type(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_roomy_type(kind.value_type), kind.list_size)
    return {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(kind, kind)


def _leaf(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if is_list(kind) else kind


def is_text(kind: pa.DataType) -> bool:
    """True for the types whose values are hashed as bytes."""
    t = pa.types
    if t.is_string(kind) or t.is_large_string(kind):
        return True
    return t.is_binary(kind) or t.is_large_binary(kind) or t.is_fixed_size_binary(kind)


def id_problem(kind: pa.DataType, feature: Feature, unbounded: bool) -> str | None:
    """Why a column of this type cannot serve the feature, with the remedy; None when it can.

    Args:
        unbounded: all tables of the feature are dynamic.
    """
    leaf = _leaf(kind)
    if pa.types.is_dictionary(leaf):
        leaf = leaf.value_type
    if pa.types.is_integer(leaf) or pa.types.is_null(leaf):
        return None
    if leaf in _PLAIN:  # `plain_text` has left those in list views
        return (
            f"column {feature.column!r} of feature {feature.name!r} has list views of {kind}, "
            "which Arrow does not cast. Write plain lists, such as list<string>."
        )
    if is_text(leaf):
        if feature.hash_buckets is not None or unbounded:
            return None
        return (
            f"column {feature.column!r} of feature {feature.name!r} holds {kind}. Set hash_buckets "
            "on the feature to hash it into rows of its tables, or make all of its tables dynamic, "
            "which take every hash of 64 bits as an id."
        )
    return (
        f"column {feature.column!r} of feature {feature.name!r} has type {kind}; ids are "
        "integers, or strings with hash_buckets or of dynamic tables, or lists of either. Cast the "
        "column to int64 or list<int64>."
    )


def group_problem(kind: pa.DataType, column: str, use: str = "group") -> str | None:
    """Why a column of this type cannot name groups of rows, with the remedy; None when it can."""
    leaf = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_integer(leaf) or is_text(leaf):
        return None
    return f"{use} column {column!r} has type {kind}; cast it to int64 or to string."


def time_type_problem(kind: pa.DataType, column: str) -> str | None:
    """Why a column of this type cannot hold times, with the remedy; None when it can."""
    if pa.types.is_integer(kind) or pa.types.is_timestamp(kind):
        return None
    return f"time column {column!r} has type {kind}; cast it to whole seconds or to timestamp."


def number_problem(kind: pa.DataType, column: str, use: str) -> str | None:
    """Why a column of this type cannot be read as numbers, with the remedy; None when it can."""
    t = pa.types
    if t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind):
        return None
    if t.is_decimal(kind) or t.is_null(kind):
        return None
    return f"{use} column {column!r} has type {kind}; it must be a number. Cast it to float32."


def sequence_problem(kind: pa.DataType, sequence: SequenceColumn) -> str | None:
    """Why values of this type cannot be a sequence, with the remedy; None when they can."""
    if sequence.dtype == "float32":
        return number_problem(kind, sequence.column, f"sequence {sequence.name!r}:")
    t = pa.types
    # uint64 may hold numbers that int64 does not
    if (t.is_integer(kind) and not t.is_uint64(kind)) or t.is_null(kind):
        return None
    return (
        f"column {sequence.column!r} of sequence {sequence.name!r} holds {kind}; it must hold "
        "whole numbers of at most 64 bits with a sign. Cast it to int64, or give the sequence "
        "dtype float32."
    )
