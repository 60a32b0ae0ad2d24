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
        assignment: assigns ranks to places.
        preemption: watches for nodes that will be drained.
        sizing: decides the number of ranks.
    """

    def __init__(self, assignment: Assignment, preemption: PreemptionWatch, sizing: Sizing) -> None:
        self._assignment, self._preemption, self._sizing = assignment, preemption, sizing

    def look(
        self, group: RankGroup, ranks: Sequence[Observation], step: int, now: float
    ) -> tuple[Event, ...]:
        """Have the ranks pause for a due change, or save; return the events to report.

        Args:
            ranks: observations of all ranks of the running task.
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
        """Return True if the ranks ended their task because a change of them was requested.

        Args:
            outcome: result that rank 0 returned.
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
        """Cancel a change of the number of ranks that has no plan, and return a line about it.

        Args:
            error: the planner's reason.
            ranks: number of ranks after the change.
        Raises:
            RayrecError: `error` itself, where no change is pending.
        """
        keeps = self._assignment.call_off()
        if not keeps:
            raise error
        return f"cannot go on with {ranks} ranks, and keeps its {keeps}: {error}"

    def began(self, began: Began, ranks: int, now: float, *, lost: bool) -> Event | None:
        """Record that `ranks` ranks train, and return the event of a finished change, if any.

        Args:
            lost: the ranks begin again after a failure.
        """
        resized = self._sizing.began(began, ranks, now, lost=lost)
        return resized or self._preemption.began(began.step, lost=lost) or None
