"""Codes of a request's error: in gRPC, in HTTP, and among the metrics."""

from __future__ import annotations

import traceback
from typing import NamedTuple

from rayrec.errors import (
    ConfigError,
    DeadlineError,
    InputError,
    OverloadedError,
    RayrecError,
    UnavailableError,
)
from rayrec.serve.server.telling import say

OK = "ok"
INPUT = "input"
CANCELLED = "cancelled"
# gRPC sends the text in a header, of which all together have 8 KB
_MOST_TEXT = 1000
_HALF_TRACE = 8000


class ErrorReply(NamedTuple):
    """Codes and text of an error in an answer.

    Attributes:
        outcome: label of the metrics.
        code: name of the gRPC status code.
        status: status code of HTTP.
        error: name of the class that a client raises.
        text: message in one line.
    """

    outcome: str
    code: str
    status: int
    error: str
    text: str


_KINDS: dict[type[RayrecError], tuple[str, str, int]] = {
    InputError: (INPUT, "INVALID_ARGUMENT", 400),
    ConfigError: (INPUT, "INVALID_ARGUMENT", 400),
    OverloadedError: ("overloaded", "RESOURCE_EXHAUSTED", 503),
    DeadlineError: ("deadline", "DEADLINE_EXCEEDED", 504),
    UnavailableError: ("draining", "UNAVAILABLE", 503),
}
OUTCOMES = (OK, *dict.fromkeys(kind[0] for kind in _KINDS.values()), "defect", CANCELLED)


def fault_of(error: Exception) -> ErrorReply:
    """Return codes and text of an error; the traceback of a defect goes to standard error only."""
    for kind, (outcome, code, status) in _KINDS.items():
        if isinstance(error, kind):
            text = " ".join(str(error).split())
            return ErrorReply(outcome, code, status, kind.__name__, text[:_MOST_TEXT])
    trace = "".join(traceback.format_exception(error)).rstrip()
    if len(trace) > 2 * _HALF_TRACE:  # an error may quote a whole request
        trace = f"{trace[:_HALF_TRACE]}\n[...]\n{trace[-_HALF_TRACE:]}"
    say(trace)
    text = f"the server failed with {type(error).__name__}; its log has the traceback."
    return ErrorReply("defect", "INTERNAL", 500, "ServingError", text)
