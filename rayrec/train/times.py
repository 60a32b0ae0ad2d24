"""How long this rank's steps took, by part, over a run: what hindsight compares with the plan's promises.

The first window, which is one step that loads kernels and touches memory for the first time, does not count. On a GPU parts are not
measured: the host's clock would see launches and not kernels.
"""

from __future__ import annotations

from rayrec.distributed import DistributedModelParallel
from rayrec.distributed.timing import PARTS
from rayrec.layout.hindsight import RankTimes


class StepTimes:
    """Counts the windows of one run.

    Args:
        model: whose parts are timed from now on.
    """

    def __init__(self, model: DistributedModelParallel) -> None:
        self._timer = model.time_parts() if model.device.type == "cpu" else None
        self._steps, self._seconds, self._warm = 0, 0.0, False

    def add(self, steps: int, seconds: float) -> None:
        """A window of so many steps has ended."""
        if self._timer is None:
            return
        if not self._warm:
            self._warm = True
            self._timer.reset()
            return
        self._steps += steps
        self._seconds += seconds

    def mean(self) -> RankTimes | None:
        """Of the mean step so far; None when nothing was counted."""
        if self._timer is None or not self._steps:
            return None
        seconds, waited = ([of[part] / self._steps for part in PARTS] for of in (self._timer.seconds, self._timer.waited))
        return RankTimes(seconds=tuple(seconds), waited=tuple(waited), step_s=self._seconds / self._steps, ahead=self._timer.ahead)
