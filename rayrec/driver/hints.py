"""Lines for a user whose data are at fault: ranks wait for them, or all labels are the same.

Every report says for each rank which share of its time it waited for the next batch. Shares are
averaged over the reports of several steps, without the first report, whose one step also waits for
files to be opened; a tenth or more is worth a line, now and then.

Of labels that are all the same nothing is learned, and no AUC is defined. Of rows that are trained
on it waits for many of them or for the end of the run, since clicks may be rare. Scores of in-batch
softmax, whose rows are all clicks, tell no logloss and are passed over.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from rayrec.train.events import ProgressReport

# share of the time from which waiting is worth a line
SHARE = 0.1
MIN_STEPS = 4
# seconds between two lines
QUIET_S = 60.0

_FASTER = (
    "Reading is slower than training. Try files on a local disk, uncompressed Arrow IPC files "
    "(ArrowDataset), which are mapped and not decoded, row groups of 10,000 to 100,000 rows, a "
    "schema with fewer columns, or a host with more cores than ranks."
)
ENOUGH_ROWS = 100_000
_COLUMN = "See whether the schema names the right column, and which rows a condition leaves."


class StarvationWatch:
    """Looks at the reports of one run, in order."""

    def __init__(self) -> None:
        # step of the last report
        self._step: int | None = None
        self._steps = 0
        # by rank, the sum of share times steps
        self._waited: list[float] = []
        self._said_at: float | None = None

    def see(self, report: ProgressReport) -> str | None:
        """Return the line to print after this report, or None."""
        steps = 0 if self._step is None else report.step - self._step
        self._step = report.step
        # the first of a run, or of the world after a failure
        if steps <= 0 or len(self._waited) != len(report.data_wait):
            self._steps, self._waited = 0, [0.0] * len(report.data_wait)
            return None
        self._steps += steps
        for rank, share in enumerate(report.data_wait):
            self._waited[rank] += steps * share
        if self._steps < MIN_STEPS:
            return None
        over = self._steps
        shares = [waited / over for waited in self._waited]
        self._steps, self._waited = 0, [0.0] * len(shares)
        starved = [rank for rank, share in enumerate(shares) if share >= SHARE]
        now = time.monotonic()
        if not starved or (self._said_at is not None and now < self._said_at + QUIET_S):
            return None
        self._said_at = now
        worst = max(starved, key=lambda rank: shares[rank])
        who = f"rank {worst}"
        if len(starved) > 1:
            who = f"{len(starved)} of {len(shares)} ranks, most of them rank {worst},"
        return (
            f"data: {who} waited for batches {shares[worst]:.0%} of the time of the last {over} "
            f"steps. {_FASTER}"
        )


class LabelWatch:
    """Looks at the reports of one run, in order."""

    def __init__(self) -> None:
        self._rows = 0.0
        self._same: dict[str, int] | None = None
        self._said = False

    def see(self, report: ProgressReport, is_last: bool) -> str | None:
        """Return the line to print after this report, or None."""
        now = _one_label(report.scores)
        before = now if self._same is None else self._same
        self._same = {task: label for task, label in before.items() if now.get(task) == label}
        self._rows += report.scores.get("rows", 0)
        if self._said or not self._same or not (is_last or self._rows >= ENOUGH_ROWS):
            return None
        self._said = True
        return f"labels: {_told(self._same)} in all rows so far, so nothing is learned. {_COLUMN}"


def undefined(scores: Mapping[str, float]) -> str | None:
    """Return a line about an evaluation whose labels are all the same, or None."""
    same = _one_label(scores)
    if not same:
        return None
    return f"labels: {_told(same)} in all rows of the evaluation: no auc and ne. {_COLUMN}"


def _one_label(scores: Mapping[str, float]) -> dict[str, int]:
    """Binary task -> the one label of all of its rows; "" for the only task."""
    found = {}
    for name, rate in scores.items():
        task, _, score = name.rpartition("/")
        beside = f"{task}/logloss" if task else "logloss"
        if score == "base_rate" and rate in (0.0, 1.0) and beside in scores:
            found[task] = int(rate)
    return found


def _told(same: Mapping[str, int]) -> str:
    return ", ".join(
        f"the label of {task!r} is {label}" if task else f"the label is {label}"
        for task, label in same.items()
    )
