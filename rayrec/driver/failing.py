"""`Failing`: what becomes of a run one of whose ranks failed, and how its survivors get ready.

A run recovers, or it ends with an error that names who failed first. Before it goes on, every
process must leave the world that failed; one that does not is ended.
"""

from __future__ import annotations

from dataclasses import replace

from rayrec.driver.blame import Blame
from rayrec.driver.ending import ending, write_traceback
from rayrec.driver.policies import answer, to_replace
from rayrec.driver.rank_group import RankGroup
from rayrec.driver.recovery import Recovery
from rayrec.driver.run_log import RunLog
from rayrec.driver.table_transfer import POLL_S
from rayrec.driver.worker_group import WorkerGroup
from rayrec.errors import RayrecError
from rayrec.train.events import Failure

LEAVING_S = 0.05


class Failing:
    """The failures of one run.

    Args:
        recovery: account of the failures.
        log: receives tracebacks.
        max_failures: number of failures that the run recovers from; -1 for any number.
    """

    def __init__(self, recovery: Recovery, log: RunLog, max_failures: int) -> None:
        self._recovery, self._log, self._max_failures = recovery, log, max_failures
        self._cut_at: float | None = None

    def recovers(self, blame: Blame, step: int, now: float, *, is_stopping: bool) -> Failure | None:
        """Record a failure, and return its event; None if the run cannot recover from it.

        Args:
            step: global steps that the run had done.
            now: seconds of a steady clock.
            is_stopping: the run was asked to end anyway.
        """
        blame = self._at(blame, step)
        if answer(blame, self._recovery.past, self._max_failures, is_stopping) == "fail":
            return None
        write_traceback(blame, self._log)
        self._cut_at = None
        return self._recovery.failed(blame, now)

    def error(
        self, blame: Blame, step: int, ranks: int, raised: Exception | None = None
    ) -> Exception:
        """Return the error that ends a run of `ranks` ranks.

        Args:
            raised: the failure as it was raised in the driver, if it was.
        """
        past = self._recovery.past
        if raised is not None and not past:
            return raised
        return ending(self._at(blame, step), ranks, past, self._log)

    def not_replaced(self, error: RayrecError, ranks: int) -> RayrecError:
        """Return the error that ends a run whose ranks, new or lost, found no place."""
        first = self._recovery.first_cause
        if first is None:
            return error
        past = [old for old in self._recovery.past if old is not first]
        return ending(first, ranks, past, self._log, f"it could not be replaced: {error}")

    def _at(self, blame: Blame, step: int) -> Blame:
        # ranks that had not begun again know of no step
        return replace(blame, step=step) if self._recovery.under_way and not blame.step else blame

    @property
    def is_new(self) -> bool:
        """True until the survivors are asked to leave the world that failed last."""
        return self._cut_at is None

    def have_left(self, group: RankGroup, workers: WorkerGroup, now: float) -> bool:
        """Have the survivors leave the failed world; return True once none is left in it.

        The process of a rank that does not leave in time is killed.

        Args:
            now: seconds of a steady clock.
        """
        if self._cut_at is None:
            self._cut_at = now
            group.forget()
        # again and again: a rank may have opened connections since
        group.abort()
        ranks = group.observe(POLL_S, LEAVING_S, events=False)
        lost, waiting = to_replace(ranks, now - self._cut_at, self._recovery.past[-1].unmet)
        if waiting or now < self._cut_at + self._recovery.pause_s:
            return False
        for rank in lost:
            workers.dismiss(rank)
        self._recovery.left(lost)
        return True
