"""`ProcessSlot`: the place of one replica among those of a server, whichever process it is now;
and the back-off before what has ended is started again.
"""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 10.0
_MOST_DOUBLINGS = 10  # more reach beyond the longest wait, and some day beyond a float


def wait_before(failed: int) -> float:
    """Return the seconds before the next start, after so many ends in a row, at least one."""
    return min(_FIRST_WAIT_S * 2 ** min(failed - 1, _MOST_DOUBLINGS), _LONGEST_WAIT_S)


@dataclass(slots=True, eq=False)
class ProcessSlot:
    """State of one replica.

    Attributes:
        process: process of the replica; None while it waits to be restarted.
        said: connection on which it reports that it is ready, and that it has changed over.
        is_ready: it takes requests.
        is_told: the process was told to end.
        started: time of its last start, or of its end while it waits.
        ends: number of ends in a row, each after a short life but for the first.
    """

    number: int
    process: BaseProcess | None = None
    said: Connection | None = None
    is_ready: bool = False
    is_told: bool = False
    started: float = 0.0
    ends: int = 0

    @property
    def due(self) -> float:
        """Time of the next start, while it waits."""
        return self.started + wait_before(self.ends)

    def end(self) -> None:
        """Tell the process to end, once: a second signal may find it without ears for it."""
        if self.process is not None and self.process.pid is not None and not self.is_told:
            self.is_told = True
            self.process.terminate()
