"""Bodies of requests and answers: JSON for people, Arrow streams, or protobuf with such in it."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rayrec import checks
from rayrec.errors import InputError
from rayrec.serve.protobuf import (
    MASKED,
    PROTOBUF_TYPE,
    ROWS,
    SCORES,
    USER,
    K,
    fields_of,
    message,
    numbers_of,
)
from rayrec.serve.server.untrusted import RequestReader
from rayrec.serve.wire import (
    ARROW_TYPE,
    Answer,
    answer_bytes,
    columns_of,
    record_batch,
    request_bytes,
)

JSON_TYPE = "application/json"
_TYPES = (JSON_TYPE, ARROW_TYPE, PROTOBUF_TYPE)


class Asked(NamedTuple):
    """Request as it was read from a body.

    Attributes:
        rows: rows to score; the candidates where there is a user.
        size: size in bytes, as Arrow streams.
        timeout_s: seconds that the caller waits; None for ever.
        user: one row of the columns that are the same for all rows; None where rows have all.
        k, masked: of the lists of the best items, see `Predictor.predict_top`.
    """

    rows: pa.RecordBatch
    size: int
    timeout_s: float | None = None
    user: pa.RecordBatch | None = None
    k: int | None = None
    masked: bool = False

    @property
    def ranks(self) -> bool:
        """True if lists of the best items are asked for by an option."""
        return self.k is not None or self.masked


def type_trouble(content_type: str) -> str:
    """Return the reason why bodies of a content type are refused, or ""."""
    if content_type in _TYPES:
        return ""
    return f"content-type {content_type} is not read; send {', '.join(_TYPES)}."


def asked(reader: RequestReader, content_type: str, body: bytes) -> Asked:
    """Read a body of one of the types.

    Raises:
        InputError: it is no whole Arrow stream, or no JSON of columns or rows.
    """
    if content_type == ARROW_TYPE:
        return Asked(reader.read(body), len(body))
    if content_type == PROTOBUF_TYPE:
        fields = fields_of(body)
        user = reader.read(fields[USER]) if USER in fields else None
        numbers = numbers_of(body)
        rows, k, masked = fields.get(ROWS, b""), numbers.get(K) or None, bool(numbers.get(MASKED))
        return _whole(Asked(reader.read(rows), len(body), None, user, k, masked))
    return _of_json(reader, _json_object(body))


def _of_json(reader: RequestReader, given: dict[str, Any]) -> Asked:
    timeout_s = given.pop("timeout_ms", None)
    if timeout_s is not None:
        timeout_s = checks.positive("timeout_ms", timeout_s) / 1000
        checks.seconds("timeout_ms / 1000", timeout_s)
    user, k, masked = (given.pop(name, None) for name in ("user", "k", "masked"))
    if k is not None:
        checks.whole_number("k", k)
    if not isinstance(masked, bool | None):
        raise InputError(f"masked={masked!r}; it must be true or false.")
    if user is not None and not isinstance(user, dict):
        raise InputError(
            f"the user is a JSON {type(user).__name__}; give one row, an object from column to "
            "value."
        )
    if set(given) == {"columns"} and isinstance(given["columns"], dict):
        columns = given["columns"]
    elif set(given) == {"rows"} and isinstance(given["rows"], list):
        reader.check_rows(len(given["rows"]))
        columns = columns_of(given["rows"], reader.columns)
    else:
        raise InputError(
            f"the body has the fields {sorted(given)}; give one of "
            '"columns": {"name": [value, ...]} and "rows": [{"name": value}, ...].'
        )
    rows, size = _read(reader, columns)
    # candidates may be none at all
    if not rows.num_columns and (user is None or any(given.values())):
        raise reader.nothing_in("the request")
    if user is None:
        return Asked(rows, size, timeout_s, k=k, masked=bool(masked))
    one, more = _read(reader, {name: [value] for name, value in user.items()})
    if not one.num_columns:
        raise reader.nothing_in("the user's row")
    return _whole(Asked(rows, size + more, timeout_s, one, k, bool(masked)))


def _whole(one: Asked) -> Asked:
    """Return a request, unless its options contradict each other."""
    if one.user is not None and one.ranks:
        raise InputError(
            "k and masked rank all items, and a user is given with candidates; leave one of both "
            "out."
        )
    return one


def _read(reader: RequestReader, columns: Mapping[str, Any]) -> tuple[pa.RecordBatch, int]:
    """Return columns as a batch, checked like Arrow bytes, since JSON can be as wrong."""
    kept = {name: columns[name] for name in reader.columns if name in columns}
    for values in kept.values():
        if isinstance(values, Sequence):
            reader.check_rows(len(values))
    whole = request_bytes(record_batch(kept))
    return reader.read(whole), len(whole)


def written(answer: Answer, content_type: str) -> bytes:
    """Return an answer as a body of the request's content type."""
    if content_type == ARROW_TYPE:
        return answer_bytes(answer)
    if content_type == PROTOBUF_TYPE:
        return message({SCORES: answer_bytes(answer)})
    scores = answer.scores
    listed = (
        {name: _listed(part) for name, part in scores.items()}
        if isinstance(scores, dict)
        else _listed(scores)
    )
    said: dict[str, Any] = {"scores": listed, "version": answer.version, "step": answer.step}
    times = {"event_time": answer.event_time, "ingest_time": answer.ingest_time}
    said |= {name: time for name, time in times.items() if time is not None}
    return json.dumps(said).encode()


def _listed(scores: NDArray[np.float32]) -> list[Any]:
    """Return scores as lists for JSON, with null for NaN and infinity, which JSON lacks."""
    values = scores.astype(object)
    values[~np.isfinite(scores)] = None
    listed: list[Any] = values.tolist()
    return listed


def _json_object(body: bytes) -> dict[str, Any]:
    was_on = gc.isenabled()
    # no value of JSON is in a cycle, and looking for one while a million are made takes seconds
    gc.disable()
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is no JSON: {error}.") from error
    finally:
        if was_on:
            gc.enable()
    if not isinstance(given, dict):
        raise InputError(f"the body is a JSON {type(given).__name__}; send an object.")
    return given
