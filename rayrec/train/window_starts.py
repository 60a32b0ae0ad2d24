"""`WindowStarts`: the steps at which a run begins a window in time, which is scored before."""

from __future__ import annotations

from rayrec.data import TimeWindow, WindowedDataset
from rayrec.train.run_state import LiveRun


class WindowStarts:
    """Starts of the windows of a run's data, alike on any number of ranks; none of other data."""

    def __init__(self, live: LiveRun) -> None:
        self._live = live
        self._windows: dict[int, TimeWindow] = {}
        spec = live.spec
        if isinstance(spec.data, WindowedDataset):
            firsts = spec.data.first_batches(spec.global_batch_size, spec.drop_last)
            for window, first, end in zip(spec.data.windows, firsts, firsts[1:], strict=False):
                if end > first:
                    self._windows[first] = window

    def next_step(self, step: int) -> int | None:
        """Return the step after which the next window begins; None where there is none."""
        batch = self._live.cursor.batch
        following = min((first for first in self._windows if first > batch), default=None)
        return None if following is None else step + following - batch

    def here(self) -> TimeWindow | None:
        """Return the window that begins with the next step, or None."""
        return self._windows.get(self._live.cursor.batch)
