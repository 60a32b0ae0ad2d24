"""`Pulses`: heartbeats by which the parent tells a replica that hangs from one that is slow.

Every replica counts in memory that it shares with its parent, a step a second, from its event loop.
So nothing is sent, and neither waits for the other. The parent adds up the time without a step, but
only what the replica could have used: the time in which its threads waited for a core is left out
(the kernel counts it), and so is the time in which the parent itself did not come to look. A
process that is stopped, or waits for a lock that nobody gives back, waits for no core.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TURN_S = 1.0  # between two steps, and between two looks
SILENT_S = 20.0  # a replica that answers takes no step for so long: it hangs
STARTING_S = 300.0  # the same of one that has not answered yet


@dataclass(slots=True)
class _Heard:
    """Heartbeat count, core wait and silence of a replica at the last look."""

    steps: int = 0
    waited_s: float = 0.0
    silent_s: float = 0.0


class Pulses:
    """Heartbeat counters of some replicas; made before they are forked.

    Args:
        count: number of replicas.
    """

    def __init__(self, count: int) -> None:
        self._steps = memoryview(mmap.mmap(-1, 8 * count)).cast("Q")
        self._heard = [_Heard() for _ in range(count)]
        self._looked = time.monotonic()

    async def beat(self, replica: int) -> None:
        """Count heartbeats until cancelled; runs in the event loop of a replica."""
        while True:
            self._steps[replica] += 1
            await asyncio.sleep(TURN_S)

    def begin(self, replica: int) -> None:
        """Reset the silence of a replica that is started again."""
        self._heard[replica] = _Heard(self._steps[replica])

    def due_s(self) -> float:
        """Seconds until the next look."""
        return max(0.0, self._looked + TURN_S - time.monotonic())

    def look(self, pids: dict[int, int]) -> dict[int, float]:
        """Return the seconds that each replica gave no heartbeat though it had a core.

        Args:
            pids: process ids, by the numbers of the replicas.
        """
        now = time.monotonic()
        passed = min(now - self._looked, 2 * TURN_S)
        self._looked = now
        for replica, pid in pids.items():
            heard, steps, waited_s = self._heard[replica], self._steps[replica], core_wait_s(pid)
            silent_s = 0.0
            if steps == heard.steps:
                # the wait of a thread that has ended is not counted any more
                excused = max(0.0, waited_s - heard.waited_s)
                silent_s = heard.silent_s + max(0.0, passed - excused)
            self._heard[replica] = _Heard(steps, waited_s, silent_s)
        return {replica: self._heard[replica].silent_s for replica in pids}


def core_wait_s(pid: int) -> float:
    """Return the seconds that all threads of a process have waited for a core; 0 if unknown."""
    waited = 0
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError, ValueError, IndexError):
                waited += int((thread / "schedstat").read_text().split()[1])
    return waited / 1e9
