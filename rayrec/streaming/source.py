"""`StreamSource`: the protocol of a source of events, which a run polls for rows after a cursor.

A source keeps no place of its own: the cursor is JSON in the run's folder, and a poll is a function
of it. What a run has taken is committed nowhere else, so a source needs no transactions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

Cursor = Mapping[str, Any]


class Refusal(NamedTuple):
    """Part of a source that is not trained on, such as a file or a message.

    Attributes:
        name: name of the part, for people.
        why: reason in one line.
    """

    name: str
    why: str


class Polled(NamedTuple):
    """Answer of a poll: the next rows, or what was refused in their place.

    Attributes:
        rows: the rows, in their order; None where everything was refused.
        cursor: place behind these rows and refusals, as JSON.
        ingested: seconds since 1970 at which the source got its newest row.
        refused: parts that were passed over.
    """

    rows: pa.Table | None
    cursor: Cursor
    ingested: float
    refused: tuple[Refusal, ...] = ()


class Lag(NamedTuple):
    """Distance of a cursor from the end of its source.

    Attributes:
        rows: rows that follow the cursor, as far as the source can tell.
        seconds: age of the oldest of them; 0 where there are none.
    """

    rows: int
    seconds: float


class StreamSource(Protocol):
    """Source of events, which one thread of one process polls.

    Attributes:
        name: name of the source in messages and fingerprints; it names the same events wherever the
            run goes on.
    """

    name: str

    def start(self) -> Cursor:
        """Return the cursor of a run that begins."""

    def poll(self, cursor: Cursor, most_rows: int) -> Polled | None:
        """Return up to `most_rows` rows that follow a cursor, or None if there are none now.

        It does not wait for long. The caller may ask once more from the same cursor, for the first
        part of the rows of the last answer; any process may go on from any cursor of the run.

        Raises:
            InputError: events after the cursor are gone, so that going on would lose them.
        """

    def lag(self, cursor: Cursor) -> Lag:
        """Return the distance of a cursor from the end of the source."""

    def close(self) -> None:
        """Close connections and files."""
