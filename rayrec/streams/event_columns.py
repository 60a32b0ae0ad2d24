"""Columns that a stream reads beside those of its schema: event times, and planted truth."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.numeric import PER_SECOND
from rayrec.data.synthetic import bayes_scores
from rayrec.errors import InputError
from rayrec.layout.dynamic import LATEST_S

UNKNOWN = np.iinfo(np.int64).min  # in place of an event time that is null


def known_seconds(column: pa.ChunkedArray) -> np.ndarray | None:
    """Return event times as int64 seconds since 1970; None where the column has no times."""
    is_stamp = pa.types.is_timestamp(column.type)
    if not is_stamp and not pa.types.is_integer(column.type):
        return None
    times = np.asarray(pc.fill_null(pc.cast(column, pa.int64(), safe=False), UNKNOWN))
    if is_stamp:  # rounded down, as the loader does: a moment before 1970 is refused
        times = times // PER_SECOND[column.type.unit]
    # what is no time is refused with its row, and ends no window
    return np.where((times < 0) | (times > LATEST_S), UNKNOWN, times)


def logits_of(rows: pa.Table, column: str) -> np.ndarray:
    """Return the true logits of rows, float64."""
    values = rows[column]
    if not pa.types.is_floating(values.type) or values.null_count:
        raise InputError(
            f"column {column!r} of true logits has type {values.type} and {values.null_count} "
            "nulls; give a floating number to each row, or leave out data.stream.truth."
        )
    return np.asarray(pc.cast(values, pa.float64()))


def best_auc(rows: pa.Table, label: str, truth: str | None) -> float | None:
    """Return the AUC of the true logits of rows; None without a column of them, or of one class."""
    if truth is None:
        return None
    best = bayes_scores(logits_of(rows, truth), np.asarray(rows[label]) != 0)["bayes_auc"]
    return float(best) if np.isfinite(best) else None
