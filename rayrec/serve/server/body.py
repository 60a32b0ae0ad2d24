"""Bodies of HTTP: what is asked, and the answer, as JSON for people or as an Arrow stream."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pyarrow as pa

from rayrec import checks
from rayrec.errors import InputError
from rayrec.serve.server.untrusted import RequestReader
from rayrec.serve.wire import ARROW_TYPE, Answer, columns_of, record_batch, request_bytes

JSON_TYPE = "application/json"


class Asked(NamedTuple):
    """A request: its rows, its size in bytes as an Arrow stream, and how long the caller waits."""

    rows: pa.RecordBatch
    size: int
    timeout_s: float | None


def type_trouble(content_type: str) -> str:
    """Why bodies of a type are not read, or ""."""
    if content_type in (JSON_TYPE, ARROW_TYPE):
        return ""
    return f"content-type {content_type} is not read; send {JSON_TYPE} or {ARROW_TYPE}."


def asked(reader: RequestReader, content_type: str, body: bytes) -> Asked:
    """Read a body of one of the two types.

    Raises:
        InputError: it is no whole Arrow stream, or no JSON of columns or rows.
    """
    if content_type == ARROW_TYPE:
        return Asked(reader.read(body), len(body), None)
    given = _json_object(body)
    timeout_s = given.pop("timeout_ms", None)
    if timeout_s is not None:
        timeout_s = checks.positive("timeout_ms", timeout_s) / 1000
        checks.seconds("timeout_ms / 1000", timeout_s)
    if set(given) == {"columns"} and isinstance(given["columns"], dict):
        columns = given["columns"]
    elif set(given) == {"rows"} and isinstance(given["rows"], list):
        columns = columns_of(given["rows"])
    else:
        raise InputError(
            f"the body has the fields {sorted(given)}; give one of "
            '"columns": {"name": [value, ...]} and "rows": [{"name": value}, ...].'
        )
    # the same checks as for bytes: text of JSON can be as wrong
    whole = request_bytes(record_batch(columns))
    return Asked(reader.read(whole), len(whole), timeout_s)


def as_json(answer: Answer) -> dict[str, Any]:
    """An answer as JSON data."""
    scores: Any = answer.scores
    listed = (
        {name: part.tolist() for name, part in scores.items()}
        if isinstance(scores, dict)
        else scores.tolist()
    )
    return {"scores": listed, "version": answer.version, "step": answer.step}


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is no JSON: {error}.") from error
    if not isinstance(given, dict):
        raise InputError(f"the body is a JSON {type(given).__name__}; send an object.")
    return given
