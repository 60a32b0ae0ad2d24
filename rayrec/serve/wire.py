"""Messages between a client and a server: Arrow IPC streams of columns and of scores.

A request is one stream with the raw columns of its rows, as the schema of the training names them.
An answer is one stream with one record batch: a float32 column per task, a row per row of the
request. The metadata of its schema says which weights gave the scores. Needs pyarrow and numpy, and
no torch.

    # B rows of the request, C classes of a task
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rayrec.errors import InputError, ServingError
from rayrec.storage import one_line

SERVICE, METHOD, SCORE_METHOD = "rayrec.Serving", "Predict", "Score"
ARROW_TYPE = "application/vnd.apache.arrow.stream"
REQUEST = "the request"  # name of the rows in messages
SCORE = "score"  # the column of a model without named tasks
_VERSION, _STEP, _TASKS = b"rayrec.version", b"rayrec.step", b"rayrec.tasks"
_EVENT_TIME, _INGEST_TIME = b"rayrec.event_time", b"rayrec.ingest_time"

Columns: TypeAlias = "pa.RecordBatch | pa.Table | Mapping[str, Any] | Sequence[Mapping[str, Any]]"
Scores = NDArray[np.float32] | dict[str, NDArray[Any]]


class Answer(NamedTuple):
    """Scores, and the version of the weights that gave them.

    Attributes:
        scores: (B,) float32, or by name of the task; (B, C) of a multiclass task. Of lists of the
            best items "item" (B, k) int64 and "score" (B, k).
        version: version of the artifact; equal for equal manifests.
        step: training step of the weights.
        event_time: time of the newest event of a stream that they have learned from, seconds since
            1970; None where the run has no such times.
        ingest_time: when the newest rows that they have learned from left their stream, likewise.
    """

    scores: Scores
    version: str
    step: int
    event_time: int | None = None
    ingest_time: float | None = None


def request_bytes(rows: Columns) -> bytes:
    """Rows as a request.

    Args:
        rows: an Arrow record batch or table; a dict from column to a list or array of B values; or
            a list of B dicts from column to value.
    Raises:
        InputError: names the column whose values have no one type, or whose length is another; or
            no stream holds them.
    """
    data = rows
    if not isinstance(data, pa.RecordBatch | pa.Table):
        data = record_batch(data if isinstance(data, Mapping) else columns_of(data))
    sink = pa.BufferOutputStream()
    try:
        # a server takes a bounded number of batches
        data = data.combine_chunks() if isinstance(data, pa.Table) else data
        with pa.ipc.new_stream(sink, data.schema) as writer:
            writer.write(data)
    except pa.ArrowException as error:
        raise InputError(
            f"the request cannot be written as an Arrow stream: {one_line(error)}. Give numbers, "
            "text, or lists of either."
        ) from error
    written: bytes = sink.getvalue().to_pybytes()
    return written


def columns_of(
    rows: Sequence[Any], wanted: Sequence[str] | None = None, source: str = REQUEST
) -> dict[str, list[Any]]:
    """Rows as columns.

    Args:
        wanted: the columns that are taken; None takes all.
        source: name of the rows in messages.
    Raises:
        InputError: these are no rows, one is no dict, or it has not the columns of the first.
    """
    if isinstance(rows, str | bytes) or not isinstance(rows, Sequence):
        raise InputError(
            f"{source} is of {type(rows).__name__}; give an Arrow record batch or table, or a list "
            "of dicts from column to value; a client takes a dict from column to values, too."
        )
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InputError(
                f"row {number} of {source} is of {type(row).__name__}; a row is a dict from "
                "column to value."
            )
        different = row.keys() ^ rows[0].keys()
        if different and wanted is not None:
            different &= set(wanted)
        if different:
            name = min(different, key=str)
            lacks = number if name in rows[0] else 0
            raise InputError(
                f"row {lacks} of {source} has no {name!r}, which other rows have; write None where "
                "it is not known."
            )
    names = list(rows[0]) if rows else []
    if wanted is not None:
        names = [name for name in wanted if rows and name in rows[0]]
    return {name: [row[name] for row in rows] for name in names}


def record_batch(columns: Mapping[str, Any], source: str = REQUEST) -> pa.RecordBatch:
    """Columns, each of B values, as one record batch; `source` names them in messages.

    Raises:
        InputError: names the column whose values have no one type, or whose length is another.
    """
    arrays: list[pa.Array] = []
    names = list(columns)
    for name, values in columns.items():
        if not isinstance(name, str) or not _is_unicode(name):
            raise InputError(
                f"column {name!r} of {source} has no name of text that UTF-8 can hold; name it "
                "as the schema does."
            )
        if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
            raise InputError(
                f"column {name!r} of {source} is of {type(values).__name__}; give a list or an "
                "array with a value for each row."
            )
        try:
            array = values if isinstance(values, pa.Array) else _array_of(values)
        except OverflowError as error:
            raise InputError(
                f"column {name!r} of {source} holds a number beyond 64 bits, or both numbers below "
                "0 and numbers of 2**63 or more; ids have 64 bits, with a sign or without."
            ) from error
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise InputError(
                f"column {name!r} of {source} holds values of several types: {one_line(error)}. "
                "Give all rows the same."
            ) from error
        array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
        if arrays and len(array) != len(arrays[0]):
            raise InputError(
                f"column {name!r} of {source} has {len(array)} values and column {names[0]!r} "
                f"has {len(arrays[0])}; give every column a value for each row."
            )
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, names=names)


def _array_of(values: Any) -> pa.Array:
    """Return values as Arrow takes them; whole numbers, or lists of them, may have no sign.

    Raises:
        OverflowError: a number has no type of 64 bits, or not one with the others.
        ArrowException, TypeError, ValueError: they have no type in common.
    """
    try:
        return pa.array(values)
    except OverflowError:
        for kind in (pa.uint64(), pa.list_(pa.uint64())):
            with suppress(pa.ArrowException, OverflowError, TypeError, ValueError):
                return pa.array(values, kind)
        raise


def _is_unicode(text: str) -> bool:
    """Return True if a text can be encoded; one with a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def answer_bytes(answer: Answer) -> bytes:
    """Return an answer as the bytes that the server sends."""
    tasks = answer.scores if isinstance(answer.scores, dict) else {"": answer.scores}
    arrays, names = [], []
    for name, values in tasks.items():
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        if values.ndim == 2:
            flat = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
        arrays.append(flat)
        names.append(name or SCORE)
    said = {_VERSION: answer.version, _STEP: str(answer.step), _TASKS: json.dumps(list(tasks))}
    times = {_EVENT_TIME: answer.event_time, _INGEST_TIME: answer.ingest_time}
    said |= {key: repr(value) for key, value in times.items() if value is not None}
    batch = pa.RecordBatch.from_arrays(arrays, names=names).replace_schema_metadata(said)
    return request_bytes(batch)


def read_answer(data: bytes) -> Answer:
    """Read what `answer_bytes` wrote.

    Raises:
        ServingError: these are no scores of a rayrec server.
    """
    try:
        with pa.ipc.open_stream(data) as reader:
            batch = reader.read_next_batch()
        said = batch.schema.metadata or {}
        names = json.loads(said[_TASKS])
        scores = {name: _matrix(batch.column(at)) for at, name in enumerate(names)}
        version, step = said[_VERSION].decode(), int(said[_STEP])
        event_time = int(said[_EVENT_TIME]) if _EVENT_TIME in said else None
        ingest_time = float(said[_INGEST_TIME]) if _INGEST_TIME in said else None
    except (pa.ArrowException, OSError, ValueError, LookupError, StopIteration) as error:
        raise ServingError(
            f"the answer is no stream of scores: {one_line(error)}. See that the address is that "
            "of rayrec serve, and its version that of this client."
        ) from error
    whole = scores[""] if names == [""] else scores
    return Answer(whole, version, step, event_time, ingest_time)


def _matrix(column: pa.Array) -> NDArray[np.float32]:
    """(B,), or (B, C) of a column of lists."""
    if not pa.types.is_fixed_size_list(column.type):
        values: NDArray[np.float32] = column.to_numpy()
        return values
    flat: NDArray[np.float32] = column.flatten().to_numpy()
    return flat.reshape(len(column), column.type.list_size)
