"""Seconds of this rank's steps over a run, by part; hindsight and profiles show them.

Windows of steps are counted one by one, so that what happens between them (checkpoints, agreements)
is no part of a step.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass

from rayrec.observe.timer import StepTimer
from rayrec.observe.times import STEP_PARTS, PartTimes, RankTimes


@dataclass(frozen=True, slots=True)
class _Reading:
    clock: float
    usage: resource.struct_rusage
    waits: int
    parts: dict[str, PartTimes]


class StepTimes:
    """Sums of the step times of a run, window by window.

    Args:
        timer: timer of the model whose steps are counted; without one nothing is counted.
        warm_up: leave out the first window, whose step loads kernels and touches memory for the
            first time.
    Attributes:
        last: mean seconds of a step of the last window, by part.
    """

    def __init__(self, timer: StepTimer | None, warm_up: bool = False) -> None:
        self._timer, self._skip = timer, warm_up
        self._steps, self._seconds, self._cpu_s = 0, 0.0, 0.0
        self._faults, self._waits = 0, 0
        self._parts = dict.fromkeys(STEP_PARTS, PartTimes())
        self._before: _Reading | None = None
        self.last: dict[str, float] = {}

    def begin(self) -> None:
        """Begin a window."""
        self._before = self._read()

    def add(self, steps: int) -> None:
        """End the window, which had `steps` steps, and add its times."""
        before, now = self._before, self._read()
        if before is None or now is None:
            return
        for part, total in now.parts.items():
            self.last[part] = (total.seconds - before.parts[part].seconds) / max(1, steps)
        if self._skip:
            self._skip = False
            return
        self._steps += steps
        self._seconds += now.clock - before.clock
        self._cpu_s += now.usage.ru_utime - before.usage.ru_utime
        self._cpu_s += now.usage.ru_stime - before.usage.ru_stime
        self._faults += now.usage.ru_minflt - before.usage.ru_minflt
        self._waits += now.waits - before.waits
        for part, total in self._parts.items():
            triples = zip(total, now.parts[part], before.parts[part], strict=True)
            self._parts[part] = PartTimes(*(t + n - b for t, n, b in triples))

    def mean(self) -> RankTimes | None:
        """Return the times of the mean step so far; None when nothing was counted."""
        if not self._steps:
            return None
        n = self._steps
        parts = {}
        for part, total in self._parts.items():
            parts[part] = PartTimes(*(value / n for value in total))
        return RankTimes(
            parts=parts,
            step_s=self._seconds / n,
            waits=self._waits / n,
            faults=self._faults / n,
            cpu_s=self._cpu_s / n,
        )

    def _read(self) -> _Reading | None:
        if self._timer is None:
            return None
        return _Reading(
            self._timer.clock(),
            resource.getrusage(resource.RUSAGE_SELF),
            self._timer.waits,
            self._timer.read(),
        )
