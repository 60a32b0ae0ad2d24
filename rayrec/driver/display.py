"""Display of a run's progress: a live bar on a terminal, plain lines elsewhere, or nothing.

It keeps the milestones of the start and the progress reports. rich is imported only for the live
bar.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal

from rayrec.driver.hints import SHARE, LabelWatch, StarvationWatch, undefined
from rayrec.train.config import ENDLESS
from rayrec.train.events import (
    Evaluation,
    Event,
    Milestone,
    Noticed,
    ProgressReport,
    Recovered,
    Resized,
    StreamProgress,
)

KEPT = 1000  # reports of a run that never ends


def _mode_here() -> str:
    """Return "live" on a terminal, else "plain"; standard output may be closed."""
    return "live" if sys.stdout is not None and sys.stdout.isatty() else "plain"


class Display:
    """Shows one run.

    Args:
        mode: "auto" draws on a terminal and prints lines elsewhere, "plain" prints lines, "off"
            shows nothing.
        total_steps: steps of the run; 0 when there are none, as in an evaluation.
    """

    def __init__(
        self, mode: Literal["auto", "plain", "off"] = "auto", total_steps: int = 0
    ) -> None:
        self._mode = _mode_here() if mode == "auto" else mode
        self.total_steps = total_steps
        self.milestones: list[Milestone] = []
        self.reports: list[ProgressReport] = []
        self.evaluations: list[Evaluation] = []
        self._bar: Any = None
        self._task: Any = None
        self._starvation, self._labels = StarvationWatch(), LabelWatch()

    def line(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._mode == "off":
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)

    def event(self, event: Event) -> None:
        """Show what a rank said; milestones and reports are kept, for the result."""
        if isinstance(event, Milestone):
            # a run has one start-up, however often it begins again
            if event.name not in [old.name for old in self.milestones]:
                self.milestones.append(event)
        elif isinstance(event, Recovered):
            self.go_back(event.step)
            self.line(str(event))
        elif isinstance(event, str | Resized | Noticed | StreamProgress):
            self.line(str(event))
        elif isinstance(event, Evaluation):
            self._evaluated(event)
        elif isinstance(event, ProgressReport):
            self.reports.append(event)
            self._report(event)
        if self.total_steps >= ENDLESS:
            # a run of weeks keeps what its result tells of, and no more
            del self.reports[:-KEPT], self.evaluations[:-KEPT]

    def _evaluated(self, event: Evaluation) -> None:
        self.scored(event.scores)
        # a run that goes on at the start of a window scores it once more, and alike
        same = (event.step, event.window)
        if event.window is not None:
            self.evaluations = [e for e in self.evaluations if (e.step, e.window) != same]
        self.evaluations.append(event)
        what = "evaluation" if event.window is None else f"window {event.window}, before training"
        # the job tells of the last one, beside what it was trained on
        if not event.final:
            best = "  (best so far)" if event.best else ""
            self.line(f"step {event.step}  {what}: {scores_line(event.scores)}{best}")

    def scored(self, scores: object) -> None:
        """Print once, for the first evaluation, why its scores are undefined."""
        if isinstance(scores, Mapping) and not self.evaluations:
            line = undefined(scores)
            if line is not None:
                self.line(line)

    def go_back(self, step: int) -> None:
        """Forget what was told of later steps, which will be told again."""
        self.reports = [report for report in self.reports if report.step <= step]
        self.evaluations = [e for e in self.evaluations if e.step <= step and not e.final]

    @property
    def step(self) -> int:
        """Step of the newest progress report."""
        return self.reports[-1].step if self.reports else 0

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _report(self, report: ProgressReport) -> None:
        if self._mode == "live":
            self._draw(report)
        else:
            of = "" if self.total_steps >= ENDLESS else f"/{self.total_steps}"
            self.line(f"step {report.step}{of}  {summary(report)}")
        is_last = report.step == self.total_steps
        for hint in (self._starvation.see(report), self._labels.see(report, is_last)):
            if hint is not None:
                self.line(hint)

    def _draw(self, report: ProgressReport) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        if self._bar is None:
            scores = TextColumn("{task.description}")
            if self.total_steps >= ENDLESS:
                columns: tuple[Any, ...] = (TextColumn("step {task.completed}"), scores)
            else:
                steps = TextColumn("step {task.completed}/{task.total}")
                columns = (steps, BarColumn(), scores, TimeRemainingColumn())
            self._bar = Progress(*columns)
            self._task = self._bar.add_task("", total=self.total_steps)
            self._bar.start()
        self._bar.update(self._task, completed=report.step, description=summary(report))


def summary(report: ProgressReport) -> str:
    """Return a report as one line, without its step."""
    parts = [f"{report.rows_per_s:,.0f} rows/s", f"loss {report.loss:.5f}"]
    if report.auc is not None:
        parts.append(f"auc {report.auc:.4f}")
    if report.ne is not None:
        parts.append(f"ne {report.ne:.4f}")
    if report.data_wait and max(report.data_wait) >= SHARE:
        parts.append(f"waiting for data {max(report.data_wait):.0%}")
    return "  ".join(parts)


def scores_line(scores: Mapping[str, float]) -> str:
    """Scores on one line; bounds of errors and counts stand in the result alone."""
    told = {k: v for k, v in scores.items() if k.rpartition("/")[2] not in ("auc_error", "rows")}
    return "  ".join(f"{name} {value:.4f}" for name, value in told.items())
