"""`GrowingWindow`: a window of a stream that is being filled."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from rayrec.streams.source import Cursor, Refusal


@dataclass(slots=True)
class GrowingWindow:
    """A window that is being filled.

    Attributes:
        cursor: place of the source behind what was read.
        newest: greatest event time of the windows before.
    """

    number: int
    cursor: Cursor
    newest: int | None
    total: int = 0  # rows of all windows before
    end: int | None = None  # the event time that it ends before
    table: pa.Table | None = None
    refusals: list[Refusal] = field(default_factory=list)
    told: int = 0  # refusals that are in the folder of refused rows
    since: float | None = None  # when the first of its rows, or of what is not told, was seen

    @property
    def rows(self) -> int:
        return 0 if self.table is None else len(self.table)
