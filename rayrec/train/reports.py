"""`Reports`: length of a run's windows, and the report of each merged one."""

from __future__ import annotations

from rayrec.errors import InputError
from rayrec.train.events import ProgressReport
from rayrec.train.id_counts import IdCounts
from rayrec.train.run_state import LiveRun
from rayrec.train.scoring import first_of
from rayrec.train.window import Window, WindowSum, even_length, next_length


class Reports:
    """Reports of one rank of a run, the same on every rank.

    Attributes:
        loss: mean loss over the rows of the last window; None before the first.
        ids: counts of the dynamic tables.
    """

    def __init__(self, live: LiveRun) -> None:
        self._live, self._steps = live, 1
        self.ids = IdCounts()
        self.loss: float | None = None

    def next_step(self, due: int) -> int:
        """Return the step of the next report, with windows of about equal length up to step `due`.

        A window that ends early because of a stop is saved, and no checkpoint holds half-summed
        gradients, so windows end at multiples of `accumulate`.
        """
        group, step = self._live.spec.accumulate, self._live.step
        return -(-(step + even_length(self._steps, due - step)) // group) * group

    def add(self, window: Window, merged: WindowSum) -> None:
        """Count a merged window, and report it.

        Raises:
            InputError: the loss is no longer finite; on every rank, since all see the same.
        """
        live, spec = self._live, self._live.spec
        live.rows += merged.rows
        live.seconds += merged.seconds
        self.loss = merged.loss
        # A nan is not below infinity, so both are found.
        if not abs(merged.loss) < float("inf"):
            raise InputError(
                f"the loss is {merged.loss} in steps {live.step - window.steps + 1} to "
                f"{live.step}: training has diverged. Lower the learning rates (sparse "
                f"{spec.sparse_optimizer.lr}, dense {spec.dense_optimizer.lr}) or look "
                "for huge values in the dense columns."
            )
        self._steps = next_length(window.steps, merged.seconds, spec.report_every_s)
        report = ProgressReport(
            step=live.step,
            rows=live.rows,
            rows_per_s=merged.rows / max(merged.seconds, 1e-9),
            loss=merged.loss,
            auc=first_of(merged.scores, "auc"),
            ne=first_of(merged.scores, "ne"),
            data_wait=merged.data_wait,
            scores={**merged.scores, **window.values},
            learning_rates=window.rates,
            memory_bytes=merged.memory_bytes,
            step_s=dict(window.step_s),
            ids=self.ids.take(live.model),
        )
        live.announce(report)
