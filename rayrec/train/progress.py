"""Answer of a rank to a poll, as plain data: its state, and its events since the last poll.

The driver's policies read the answers. Why a rank failed is told by `rayrec.train.rank_error`.
Standard library only.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from rayrec.train.events import Event
from rayrec.train.rank_error import RankError

RankState = Literal["idle", "running", "done", "failed"]
# names a folder where the processes of ranks show what they do, for who strikes them on purpose
SHOWN_IN = "RAYREC_SHOWN_IN"
KEPT = 1000  # events of a rank whose events nobody asks for


def show(words: str) -> None:
    """Write the phase of this process to a file for fault injectors, if `SHOWN_IN` is set."""
    if folder := os.environ.get(SHOWN_IN):
        with suppress(OSError), open(f"{folder}/{os.getpid()}", "w") as file:
            file.write(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPoll:
    """A rank's answer to `poll(seen)`.

    Attributes:
        state: state of the rank's task.
        step: global steps done.
        phase: current phase of the task, in words that complete "while ...".
        beats: signs of progress since the task began.
        starts: the process still imports, and may not answer for long.
        events: reports and lines after the first `seen`.
        error, result: error or result of the task, once it has ended.
    """

    state: RankState
    step: int = 0
    phase: str = ""
    beats: int = 0
    starts: bool = False
    events: tuple[Event, ...] = ()
    error: RankError | None = None
    result: Any = None


@dataclass(kw_only=True, slots=True)
class ProgressLog:
    """Collects what a rank's thread reports; other threads read it and wait for news.

    Attributes:
        events: the newest events; those that were read are forgotten.
    """

    step: int = 0
    phase: str = "starting"
    beats: int = 0
    events: list[Event] = field(default_factory=list)
    _forgotten: int = 0
    _over: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self, event: Event) -> None:
        """Append an event and wake threads that wait for one."""
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def at_step(self, step: int) -> None:
        """Record the newest finished step; it makes no event, since steps are many."""
        self.step = step
        self.beats += 1

    def end(self) -> None:
        """Close the log: no event will follow."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait(self, seen: int, timeout_s: float) -> None:
        """Wait until there are more than `seen` events or the end, at most `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._count > seen, timeout_s)

    def after(self, seen: int) -> tuple[Event, ...]:
        """Return the events after the first `seen`, and forget those, which who asks has."""
        with self._changed:
            read = seen - self._forgotten
            if seen > self._count:
                # who polls a rank for its state alone asks for what lies behind all events
                read = len(self.events) - KEPT
            read = max(0, read)
            del self.events[:read]
            self._forgotten += read
            return () if seen > self._count else tuple(self.events)

    @property
    def _count(self) -> int:
        return self._forgotten + len(self.events)
