"""`Resizing`: changes of the number and the places of a run's ranks, as its controller sees them.

A change begins with a wish: of a caller, of a cluster that has more room, or of a node that will
go. The ranks are asked to pause, get other places, are given another plan, and train again.
"""

from __future__ import annotations

from collections.abc import Sequence

from rayrec.driver.assignment import Assignment
from rayrec.driver.blame import Observation
from rayrec.driver.preemption import PreemptionWatch
from rayrec.driver.rank_group import RankGroup
from rayrec.driver.sizing import Sizing
from rayrec.errors import RayrecError
from rayrec.train.events import Began, Event
from rayrec.train.outcome import FitOutcome


class Resizing:
    """The changes of one run.

    Args:
        assignment: gives ranks their places.
        preemption: watches nodes that will go.
        sizing: how many ranks there shall be.
    """

    def __init__(self, assignment: Assignment, preemption: PreemptionWatch, sizing: Sizing) -> None:
        self._assignment, self._preemption, self._sizing = assignment, preemption, sizing

    def look(
        self, group: RankGroup, ranks: Sequence[Observation], step: int, now: float
    ) -> tuple[Event, ...]:
        """Have the ranks pause where their number or places should change, or save; what to tell.

        Args:
            ranks: that do one task.
            step: global steps done.
            now: seconds of a steady clock.
        """
        wish = self._preemption.look(ranks, step, now)
        if wish.save:
            group.request_save()
        goal = 0 if wish.leave else self._assignment.wants_pause(ranks, group.task, now)
        if wish.leave or goal:
            self._sizing.pause(now, leaving=wish.leave)
            # tables that lie on a node which goes are safe only in a checkpoint
            group.request_stop(goal)
        return wish.told

    def have_paused(self, outcome: FitOutcome, *, is_stopping: bool) -> bool:
        """Whether the ranks ended their task because they were asked to pause.

        Args:
            outcome: of rank 0.
            is_stopping: the run was asked to end meanwhile.
        """
        if self._sizing.paused_since is None or not outcome.stopped:
            return False
        # ranks that were to end meanwhile, and have not saved, do so in the next life
        paused = not is_stopping or outcome.handed_over
        if paused:
            self._assignment.paused()
        return paused

    def call_off(self, error: RayrecError, ranks: int) -> str:
        """Take back a change that nothing can be planned for; a line about it.

        Args:
            error: why not.
            ranks: how many there would be.
        Raises:
            RayrecError: the error, where there is no change to take back.
        """
        keeps = self._assignment.call_off()
        if not keeps:
            raise error
        return f"cannot go on with {ranks} ranks, and keeps its {keeps}: {error}"

    def began(self, began: Began, ranks: int, now: float, *, lost: bool) -> Event | None:
        """Note that so many ranks train; what there is to tell of it.

        Args:
            lost: they begin after a failure.
        """
        resized = self._sizing.began(began, ranks, now, lost=lost)
        return resized or self._preemption.began(began.step, lost=lost) or None
