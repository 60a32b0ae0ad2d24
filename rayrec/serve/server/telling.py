"""Lines of a server for its user, which goes on where its log is full, or where nobody reads it."""

from __future__ import annotations

import sys
from contextlib import suppress


def tell(line: str) -> None:
    """Print a line about the server to standard output."""
    with suppress(OSError):
        print(line, flush=True)


def say(line: str) -> None:
    """Print a line about what is wrong to standard error."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)
