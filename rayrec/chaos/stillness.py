"""For how long a run has stood still by itself, by which a run under faults counts as hung.

It makes no step while it is struck again and again, and while its driver waits before ranks start
again, which the event of a failure announces. Neither is the run's own standstill.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

# a run that is struck whenever it starts would never come to a step
MOST_WITHOUT_STEP = 10


class Stillness:
    """Time in which a run made no step, was not struck, and did not wait as announced.

    It follows the run's file of events while the file grows.

    Args:
        now: seconds of a steady clock at the start of the run.
    Attributes:
        newest: newest step.
        recovers: the run recovers from a failure.
    """

    def __init__(self, path: Path, now: float) -> None:
        self._path, self._read, self._rest = path, 0, b""
        self._since, self._struck, self._told, self._paused_s = now, 0, 0, 0.0
        self.newest = 0
        self.recovers = False

    def look(self, now: float) -> float:
        """Read new events, and return the seconds for which the run has stood still."""
        if self.moved():
            self._since, self._struck, self._paused_s = now, 0, 0.0
        return max(0.0, now - self._since - self._paused_s)

    def struck(self, now: float) -> None:
        """Count a fault that struck the run."""
        self._since, self._struck = now, self._struck + 1

    @property
    def is_spared(self) -> bool:
        """True while the run has to make a step before the next fault strikes."""
        return self._struck >= MOST_WITHOUT_STEP

    def moved(self) -> bool:
        """Read new events; return True for a later step, or a score or checkpoint of the last."""
        try:
            if self._path.stat().st_size == self._read:
                return False
            with self._path.open("rb") as file:
                file.seek(self._read)
                content = file.read()
        except FileNotFoundError:
            return False
        self._read += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        before = self.newest, self._told
        for line in lines:
            # A killed driver leaves its last line cut; the next one begins a line of its own.
            with suppress(ValueError):
                self._take(json.loads(line))
        return (self.newest, self._told) != before

    def _take(self, event: dict[str, object]) -> None:
        step = event.get("step")
        if not isinstance(step, int):
            return
        if event.get("event") in ("failure", "recovery"):
            self.recovers = event["event"] == "failure"
            pause_s = event.get("pause_s")
            self._paused_s += pause_s if isinstance(pause_s, int | float) else 0.0
        if event.get("event") == "window":
            self.newest = max(self.newest, step)
        elif event.get("event") in ("evaluation", "checkpoint", "end") and step >= self.newest:
            self._told += 1
