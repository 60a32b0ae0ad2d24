"""Requests to end a run early, with a timeout for its ranks to obey."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rayrec.driver.rank_group import RankGroup
from rayrec.errors import TrainingFailed
from rayrec.machine.signals import Signals
from rayrec.train.events import Event


class Stopping:
    """Asks the ranks of one run to stop.

    Args:
        on_event: receives a line when the ranks are asked to stop.
        timeout_s: longest time from the request to the end.
        obeys: the task ends by itself when it is asked to; one that does not is ended at once by a
            signal.
    Attributes:
        signals: signals that this process received during the run.
    """

    def __init__(
        self, on_event: Callable[[Event], None], timeout_s: float, obeys: bool = True
    ) -> None:
        self.signals = Signals()
        self._on_event, self._timeout_s, self._obeys = on_event, timeout_s, obeys
        self._wanted = threading.Event()
        self._asked_at: float | None = None

    def want(self) -> None:
        """Request the end of the run, from any thread."""
        self._wanted.set()

    @property
    def wanted(self) -> bool:
        """True if the run was asked to end early, by a call or a signal."""
        return self._wanted.is_set() or self.signals.came

    def begin(self) -> None:
        """Forget an earlier request to the ranks, since they begin a task."""
        self._asked_at = None

    def ask(self, group: RankGroup) -> None:
        """Ask the ranks to stop, once, if the run is to end early.

        Raises:
            RunInterrupted: a signal came, and the task does not obey.
            TrainingFailed: the ranks were asked, and did not stop in time.
        """
        if not self.wanted:
            return
        if not self._obeys:
            self.signals.check()
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self._on_event(
                "asked to stop; the ranks finish their window and save what the run keeps"
            )
            group.request_stop()
        elif time.monotonic() - self._asked_at > self._timeout_s:
            raise TrainingFailed(
                f"the ranks were asked to stop and did not in {self._timeout_s:.0f} s; they were "
                "killed."
            )
