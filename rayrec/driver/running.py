"""`Running`: polls the ranks of a run while they train, for the controller."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rayrec.driver.blame import Blame, Observation
from rayrec.driver.placed import Placed
from rayrec.driver.progress import RunProgress
from rayrec.driver.recovery import Recovery
from rayrec.driver.states import Turn
from rayrec.driver.stopping import Stopping
from rayrec.driver.table_transfer import ANSWER_S, POLL_S, Judging
from rayrec.train.events import Began, Event


class Running:
    """Polls the ranks of one run, and passes their events on.

    Args:
        stopping: asks the ranks to stop where that was requested.
        progress: tracks the progress of the ranks.
        recovery: account of failures.
        judging: judges the health of the ranks.
        on_event: receives every report and line.
        resizes: the number of ranks may change on the way.
    Attributes:
        results: result of each rank, once all have ended their task.
    """

    def __init__(
        self,
        stopping: Stopping,
        progress: RunProgress,
        recovery: Recovery,
        judging: Judging,
        on_event: Callable[[Event], None],
        *,
        resizes: bool,
    ) -> None:
        self._stopping, self._progress, self._recovery = stopping, progress, recovery
        self._judging, self._on_event, self._resizes = judging, on_event, resizes
        self._shown = 0
        self.results: tuple[Any, ...] = ()

    def begin(self) -> None:
        """Reset the number of passed events, since the ranks begin a task."""
        self._shown = 0
        self._judging.begin()

    def look(self, placed: Placed) -> Turn | Blame:
        """Poll the ranks once; return the next transition, or the blame for a failure."""
        group = placed.group
        self._stopping.ask(group)
        ranks = group.observe(POLL_S, ANSWER_S)
        self._tell(placed)
        self._progress.see(ranks)
        now = time.monotonic()
        self._recovery.at_step(self._progress.step, now)
        verdict = self._judging.of(ranks)
        if verdict.action == "finish":
            return self._finished(placed, ranks, now)
        if verdict.failure is not None:
            return verdict.failure
        if self._resizes and not self._stopping.wanted:
            self._look_ahead(placed, ranks, now)
        return "stay"

    def _finished(self, placed: Placed, ranks: Sequence[Observation], now: float) -> Turn:
        """Keep the results of the ranks, and return how the task ended: for good, or in a pause."""
        self.results = tuple(rank.poll.result for rank in ranks if rank.poll is not None)
        first = self.results[0] if self._resizes else None
        is_stopping = self._stopping.wanted
        if first and placed.resizing.have_paused(first, is_stopping=is_stopping):
            placed.group.handed_over = first.handed_over
            return "resize"
        self._recovery.caught_up(now)
        return "end"

    def _look_ahead(self, placed: Placed, ranks: Sequence[Observation], now: float) -> None:
        """Keep spares, and begin a change of the ranks where one is due."""
        # a process that starts beside ranks on their way slows them
        if self._progress.trains and not self._recovery.under_way:
            placed.assignment.stand_by(placed.group.task, now)
        for told in placed.resizing.look(placed.group, ranks, self._progress.step, now):
            self._on_event(told)

    def _tell(self, placed: Placed) -> None:
        """Pass on the events of the ranks since the last poll."""
        group = placed.group
        news, self._shown = group.events[self._shown :], len(group.events)
        for event in news:
            if isinstance(event, Began):
                now, lost = time.monotonic(), self._recovery.under_way
                for told in self._recovery.began(event, now):
                    self._on_event(told)
                changed = placed.resizing.began(event, group.world_size, now, lost=lost)
                if changed is not None:
                    self._on_event(changed)
                self._progress.go_back(event.step)
            self._on_event(event)
