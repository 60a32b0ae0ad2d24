"""Columns of numbers: the dense matrix, labels and weights of rows as float32, times as seconds,
each value checked.

A column of float32 without nulls is a view; any other is converted once. Labels that are whole
numbers beyond 2**24, such as classes or amounts, become float64, which holds them exactly. What a
column may not hold (null, NaN, infinity, a negative weight) is an `InputError` that names column,
row and file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rayrec.data.column_types import number_problem, time_type_problem
from rayrec.errors import InputError
from rayrec.layout.dynamic import LATEST_S, time_problem
from rayrec.layout.schema import FeatureSchema

_FLOAT32 = pa.float32()
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_EXACT_32, _EXACT_64 = 2**24, 2**53  # whole numbers up to these are exact in floats
Labels = NDArray[np.float32] | NDArray[np.float64]

Where = Callable[[int], str]  # row of a record batch -> "row 5 of <file>", for messages


def row_name(first: int, source: str, row: int) -> str:
    """The name of a row of rows that begin with row `first` of a source, for messages."""
    return f"row {first + row} of {source}"


def dense_matrix(
    arrays: Sequence[pa.Array], rows: int, schema: FeatureSchema, where: Where
) -> NDArray[np.float32]:
    """(rows, I) float32 of the schema's dense columns.

    Raises:
        InputError: a column is no number, or holds NaN or infinity; names row and file.
    """
    dense = np.empty((rows, len(arrays)), np.float32)
    for i, (spec, array) in enumerate(zip(schema.dense, arrays, strict=True)):
        dense[:, i] = floats(array, spec.column, "dense", spec.fill)
    if not np.isfinite(dense).all():
        row, i = (int(x) for x in np.argwhere(~np.isfinite(dense))[0])
        raise InputError(
            f"dense column {schema.dense[i].column!r} holds {dense[row, i]} in {where(row)}. "
            "Clean the data, or write null."
        )
    return dense


def label_values(array: pa.Array, column: str, where: Where, binary: bool) -> Labels:
    """(B,) labels of one column; `binary` allows 0 and 1 alone.

    Raises:
        InputError: a null, NaN, infinity, a whole number that no float holds or, if binary,
            another number; names row and file.
    """
    remedy = "Drop rows without a label."
    refuse_null(array, f"label column {column!r}", where, remedy)
    labels: Labels = floats(array, column, "label")
    if not np.isfinite(labels).all():
        row = first_true(~np.isfinite(labels))
        raise InputError(f"label column {column!r} holds {labels[row]} in {where(row)}. {remedy}")
    if binary and ((labels != 0) & (labels != 1)).any():
        row = first_true((labels != 0) & (labels != 1))
        raise InputError(
            f"label column {column!r} holds {labels[row]:g} in {where(row)}; click models are "
            "trained on labels 0 and 1. Write 0 or 1, or name another label column in the schema."
        )
    if not binary and pa.types.is_integer(array.type):
        return _exact(array, labels, column, where)
    return labels


def _exact(array: pa.Array, labels: Labels, column: str, where: Where) -> Labels:
    """The labels, as float64 where float32 does not hold all of these whole numbers."""
    if not len(array) or array.type.bit_width <= 16:
        return labels
    values = array.to_numpy()
    if values.max() <= _EXACT_32 and values.min() >= -_EXACT_32:
        return labels
    beyond = (values > _EXACT_64) | (values < -_EXACT_64)
    if beyond.any():
        row = first_true(beyond)
        raise InputError(
            f"label column {column!r} holds {values[row]} in {where(row)}, beyond 2**53, up to "
            "which labels are exact. Number its values from 0, or cast the column to float64."
        )
    return values.astype(np.float64)


def row_weights(array: pa.Array, column: str, where: Where) -> NDArray[np.float32]:
    """(B,) weights of rows, finite and at least 0; InputError names row and file of another."""
    remedy = "A weight is a finite number of at least 0; write 0 to leave the row out."
    refuse_null(array, f"weight column {column!r}", where, remedy)
    weights = floats(array, column, "weight")
    # NaN compares as false, so the good values are asked for
    good = (weights >= 0) & (weights < np.inf)
    if not good.all():
        row = first_true(~good)
        raise InputError(
            f"weight column {column!r} holds {weights[row]:g} in {where(row)}. {remedy}"
        )
    return weights


def times_of(array: pa.Array, column: str, where: Where) -> NDArray[np.int64]:
    """(B,) times of rows in seconds since 1970; InputError names row and file of what is none."""
    problem = time_type_problem(array.type, column)
    if problem is not None:
        raise InputError(problem)
    remedy = "Write the time of the row, or drop it."
    refuse_null(array, f"time column {column!r}", where, remedy)
    per_second = 1
    if pa.types.is_timestamp(array.type):
        per_second = PER_SECOND[array.type.unit]
        array = array.view(pa.int64())
    times = array.to_numpy() // per_second
    beyond = (times < 0) | (times > LATEST_S)
    if beyond.any():
        row = first_true(beyond)
        raise InputError(f"time column {column!r} in {where(row)}: {time_problem(int(times[row]))}")
    return cast("NDArray[np.int64]", times.astype(np.int64, copy=False))


def floats(array: pa.Array, column: str, use: str, fill: float = 0.0) -> NDArray[np.float32]:
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


def refuse_null(array: pa.Array | pa.ChunkedArray, column: str, where: Where, remedy: str) -> None:
    """Raise InputError for the first null of a column, which is named in words."""
    if array.null_count:
        place = where(first_true(mask(array.is_null())))
        raise InputError(f"{column} holds null in {place}. {remedy}")


def mask(flags: pa.BooleanArray) -> NDArray[np.bool_]:
    """The flags as numpy has them."""
    return cast("NDArray[np.bool_]", flags.to_numpy(zero_copy_only=False))


def first_true(flags: NDArray[np.bool_]) -> int:
    """Index of the first True."""
    return int(np.flatnonzero(flags)[0])
