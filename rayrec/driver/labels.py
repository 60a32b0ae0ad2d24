"""Tells a user whose labels are all the same: nothing is learned of them, and no AUC is defined.

Of rows that are trained on it waits for many of them or for the end of the run, since clicks may be
rare. Scores of in-batch softmax, whose rows are all clicks, tell no logloss and are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping

from rayrec.train.events import ProgressReport

ENOUGH_ROWS = 100_000
_REMEDY = "See whether the schema names the right column, and which rows a condition leaves."


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
        return f"labels: {_told(self._same)} in all rows so far, so nothing is learned. {_REMEDY}"


def undefined(scores: Mapping[str, float]) -> str | None:
    """Return a line about an evaluation whose labels are all the same, or None."""
    same = _one_label(scores)
    if not same:
        return None
    return f"labels: {_told(same)} in all rows of the evaluation: no auc and ne. {_REMEDY}"


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
