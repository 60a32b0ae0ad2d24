"""Errors of an event loop as lines, each at most once within some seconds.

A process without file descriptors would otherwise write hundreds of tracebacks a second.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from rayrec.storage import one_line

_AGAIN_S = 10.0
_MOST_KEPT = 100


class Complaints:
    """Exception handler of an event loop."""

    def __init__(self) -> None:
        self._said: dict[str, float] = {}

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        message, error = context["message"], context.get("exception")
        now = time.monotonic()
        if now < self._said.get(message, 0.0):
            return
        if len(self._said) >= _MOST_KEPT:
            self._said.clear()
        self._said[message] = now + _AGAIN_S
        if isinstance(error, OSError):
            print(f"{message}: {one_line(error)}", file=sys.stderr, flush=True)
        else:
            loop.default_exception_handler(context)
