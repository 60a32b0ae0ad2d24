"""Rows of a stream that cannot be trained on, found before training by the reader of batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.convert import to_batch
from rayrec.errors import InputError
from rayrec.layout.schema import FeatureSchema

Binary = bool | Sequence[str]


def sift(rows: pa.Table, schema: FeatureSchema, binary: Binary) -> tuple[pa.Table, pa.Table]:
    """Part rows into those that a batch can be made of, and the others.

    Cost: the rows are converted once, and about 2 log(n) times more for each bad row.
    """
    good: list[pa.Table] = [rows.slice(0, 0)]
    bad: list[pa.Table] = [rows.slice(0, 0)]
    waiting = [rows] if rows.num_rows else []
    while waiting:
        part = waiting.pop()
        try:
            to_batch(part, schema, binary_labels=binary)
        except InputError:
            if part.num_rows == 1:
                bad.append(part)
                continue
            half = part.num_rows // 2
            waiting += [part.slice(half), part.slice(0, half)]
        else:
            good.append(part)
    return pa.concat_tables(good), pa.concat_tables(bad)


def event_seconds(column: pa.ChunkedArray, unit: str) -> np.ndarray:
    """Return event times in seconds since 1970, with NaN for nulls and for what is no time.

    Args:
        column: timestamps, or whole numbers in `unit`.
        unit: "s" or "ms".
    """
    kind = column.type
    if pa.types.is_timestamp(kind):
        column, unit = pc.cast(column, pa.timestamp("ms"), safe=False), "ms"
        column = pc.cast(column, pa.int64())
    elif not pa.types.is_integer(kind):
        return np.full(len(column), np.nan)
    values = pc.cast(column, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return values / (1000.0 if unit == "ms" else 1.0)
