"""`StreamWindows`: the windows of a run that is fed by a stream, opened on all ranks together.

Rank 0 cuts; the others are told of each window and read its rows from the run's folder. While no
window is there, the ranks look at their stop flags together, so that a run that waits ends at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rayrec.checkpoint import CheckpointManager, read_manifest
from rayrec.data import TimeWindow
from rayrec.errors import CheckpointError, InputError
from rayrec.fields.json_text import of_json
from rayrec.fields.writing import record_of
from rayrec.machine.memory import give_back
from rayrec.streams import StreamDataset, StreamWindow
from rayrec.streams.cutting import WindowCutter
from rayrec.streams.kept import WindowFolder
from rayrec.train.events import StreamProgress
from rayrec.train.run_state import LiveRun
from rayrec.train.scoring import binary_labels
from rayrec.train.window import gather_objects

POLL_S = 0.2
POLLS = 5  # between two calls of on_wait
GIVE_BACK_S = 60.0  # from window to window; it costs some 0.2 s
_TOLD = ("rows", "cut_s", "newest_event", "late", "refused", "lag_rows", "lag_s", "best_auc")


class StreamWindows:
    """Windows of a stream; all ranks call the same methods together.

    Attributes:
        ended: the stream is over, as its config says.
        current: the window that is open, or None.
    """

    def __init__(self, live: LiveRun, data: StreamDataset) -> None:
        assert live.spec.run_path is not None, "the driver has checked it"
        self._live, self._data, self._run_path = live, data, live.spec.run_path
        self._folder = WindowFolder(self._run_path, data.config.source_name)
        self._cutter: WindowCutter | None = None
        self._newest: str | None = None
        self._epochs: dict[int, int] = {}  # windows of the checkpoints that are kept
        self._gave_back = time.monotonic()
        self.current: StreamWindow | None = None
        self.ended = False

    def ready(self, should_stop: Callable[[], bool], on_wait: Callable[[float], None]) -> bool:
        """Wait until there are batches of a window; return False if the run is to end before.

        Args:
            on_wait: receives the seconds that have passed, every second or so of a wait.
        """
        cursor = self._live.cursor
        if self.current is None and cursor.batch:
            self._folder.check_cut(cursor.epoch, is_begun=True)
        while self.current is None or not cursor.left:
            number = cursor.epoch if self.current is None else cursor.epoch + 1
            if self._is_past(number):
                self.ended = True
                return False
            window = self._wait(number, should_stop, on_wait)
            if window is None:
                return False
            self._open(window)
        return True

    def _is_past(self, number: int) -> bool:
        """Return True for a window behind the last one that the config allows."""
        config = self._data.config
        if config.stop_after_windows is not None and number >= config.stop_after_windows:
            return True
        if config.stop_after_rows is None or not number:
            return False
        before = self._folder.read(number - 1)
        return before is not None and before.total_rows >= config.stop_after_rows

    def after_save(self, newest: str | None) -> None:
        """Delete the windows that no checkpoint goes on from, once there is a newer one.

        Args:
            newest: path of the newest checkpoint of the run.
        """
        if newest == self._newest or not self._live.spec.checkpoint.num_to_keep:
            return
        self._newest = newest
        if self._live.rank == 0:
            # a save behind the training may delete a checkpoint between two looks at it
            with suppress(CheckpointError):
                self._prune()

    def _prune(self) -> None:
        manager = CheckpointManager(self._run_path)
        kept = {step: self._epochs.get(step) for step in manager.steps()}
        self._epochs = {
            step: int(read_manifest(manager.path(step)).cursor["epoch"]) if epoch is None else epoch
            for step, epoch in kept.items()
        }
        self._folder.prune(min(self._epochs.values(), default=0))

    def newest(self) -> tuple[int | None, float | None]:
        """Return the newest event time that was trained on, and when its window was cut."""
        window = self.current
        if window is not None and self._live.cursor.left:
            # its end may be what is newest
            window = self._folder.read(window.number - 1) if window.number else None
        return (None, None) if window is None else (window.newest_event, window.cut_s)

    def after_window(self) -> None:
        """Tell the run which events the last step has passed, if it ended a window."""
        self._live.newest_events = None
        window = self.current
        if window is not None and not self._live.cursor.left and window.number:
            before = self._folder.read(window.number - 1)
            times = (None if before is None else before.newest_event), window.newest_event
            if times[0] is not None and times[1] is not None:
                self._live.newest_events = times[0], times[1]

    def close(self) -> None:
        """End the thread that cuts."""
        if self._cutter is not None:
            self._cutter.close()

    def _wait(
        self, number: int, should_stop: Callable[[], bool], on_wait: Callable[[float], None]
    ) -> StreamWindow | None:
        polls, since = 0, time.perf_counter()
        while True:
            seconds = time.perf_counter() - since
            told = gather_objects((self._look(number), seconds, should_stop()))
            (record, is_over), passed, _ = told[0]
            if record is not None:
                window: StreamWindow = of_json(StreamWindow, record, self._folder.path, InputError)
                return window
            if is_over or any(stop for _, _, stop in told):
                self.ended = is_over
                return None
            self._live.on_phase("waiting for rows of the stream")
            polls += 1
            if polls % POLLS == 0:
                on_wait(passed)
                since = time.perf_counter()
            if self._cutter is not None:
                # the other ranks wait in the exchange
                self._cutter.wait(POLL_S)

    def _look(self, number: int) -> tuple[Any, bool]:
        """Return the record of a window that rank 0 has, or None; and True at the stream's end."""
        if self._live.rank != 0:
            return None, False
        cutter, idle = self._cutting(), self._data.config.stop_when_idle_s
        window = cutter.window(number)
        if window is not None:
            return record_of(window), False
        return None, idle is not None and cutter.is_idle(idle)

    def _cutting(self) -> WindowCutter:
        if self._cutter is None:
            data = self._data
            binary = binary_labels(self._live.spec.tasks, data)
            source = data.config.open(data.whole_columns())
            self._cutter = WindowCutter(self._folder, source, data.config, data.schema, binary)
        return self._cutter

    def _open(self, window: StreamWindow) -> None:
        if time.monotonic() - self._gave_back >= GIVE_BACK_S:
            give_back()
            self._gave_back = time.monotonic()
        rows = self._data.window(self._run_path, window)
        self.current = window
        self._live.cursor.open(TimeWindow(window.number, window.number + 1, rows))
        last = self._data.config.stop_after_windows
        if self._cutter is not None and (last is None or window.number + 1 < last):
            self._cutter.begin(window.number + 1)
        if not self._live.cursor.batch:
            told = {name: getattr(window, name) for name in _TOLD}
            self._live.announce(StreamProgress(step=self._live.step, window=window.number, **told))
