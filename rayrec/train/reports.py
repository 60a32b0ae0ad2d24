"""`Reports`: length of a run's windows, and the report of each merged one.

A report tells how the ids of dynamic tables come and go. The numbers are those of the global
batches, so they are the same on any number of ranks. They cost one gathering of some numbers in
each window, and a pass over the counts of the rows.
"""

from __future__ import annotations

from collections import Counter

from rayrec.errors import InputError
from rayrec.train.events import ProgressReport
from rayrec.train.run_state import LiveRun
from rayrec.train.scoring import first_of
from rayrec.train.window import Window, WindowSum, even_length, gather_objects, next_length

_STATES = ("held", "candidates")  # numbers of a moment; all others are sums


class Reports:
    """Reports of one rank of a run, the same on every rank.

    Attributes:
        loss: mean loss over the rows of the last window; None before the first.
    """

    def __init__(self, live: LiveRun) -> None:
        self._live, self._steps = live, 1
        # of every dynamic table since the ranks began
        self._ids: dict[str, Counter[str]] = {}
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
            ids=self._count_ids(),
        )
        live.announce(report)

    def id_lines(self) -> list[str]:
        """Return a line for each dynamic table, of what happened since the ranks began."""
        self._count_ids()
        return [
            f"table {table!r}: {counts['held']:,} ids have a row and {counts['candidates']:,} are "
            f"candidates; {counts['admitted']:,} were admitted, {counts['evicted']:,} evicted, "
            f"{counts['refused']:,} refused for want of room; {counts['unknown']:,} of "
            f"{counts['looked_up']:,} look-ups found no row"
            for table, counts in self._ids.items()
        ]

    def _count_ids(self) -> dict[str, dict[str, int]]:
        """Return the numbers of each dynamic table since the last call, by table and name.

        The names are those of `DynamicRows.take_counts`; "rows" is how many ids can have one.
        """
        model = self._live.model
        clocks = model.id_clocks
        if not clocks:
            return {}
        own: dict[tuple[str, int], Counter[str]] = {}
        for rows in model.dynamic_rows():
            counts = rows.take_counts(clocks[rows.table.name])
            # column blocks and replicas know the same ids, so one of them speaks for its rows
            if rows.shard.cols.start == 0:
                counts["rows"] = len(rows.shard.rows)
                own[rows.table.name, rows.shard.rows.start] = Counter(counts)
        parts: dict[tuple[str, int], Counter[str]] = {}
        for told in gather_objects(own):
            parts |= told
        found: dict[str, Counter[str]] = {table: Counter() for table in sorted(clocks)}
        for (table, _), counted in parts.items():
            found[table].update(counted)
        for table, counted in found.items():
            total = self._ids.setdefault(table, Counter())
            for name in _STATES:
                total[name] = 0
            total.update(counted)
        return {table: dict(counted) for table, counted in found.items()}
