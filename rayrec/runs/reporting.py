"""Report of a run at its end: scores, times of the start-up, a JSON file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rayrec.errors import RunInterrupted
from rayrec.fields.writing import json_data
from rayrec.storage import write_whole
from rayrec.train.events import Milestone

if TYPE_CHECKING:
    from rayrec.driver import Driver, Result
    from rayrec.metrics import PlantedScores


class ResultReport(NamedTuple):
    """Additions of one kind of run: end of the first line, lines of scores, fields of the file."""

    done: str
    lines: list[str]
    fields: dict[str, Any]


class Reporting(NamedTuple):
    """Options of a run's report: milestones of its start-up so far, and the file for its result."""

    timing: list[Milestone]
    show_timing: bool
    result: str | None
    seed: int


Outcome = Callable[["Result"], ResultReport]


def fit_and_report(driver: Driver, reporting: Reporting, outcome: Outcome) -> None:
    """Train, and report the result, also that of a run that a signal ended."""
    try:
        result = driver.fit()
    except RunInterrupted as stop:
        if stop.result is not None:
            _report_run(stop.result, reporting, outcome)
        raise
    _report_run(result, reporting, outcome)


def _report_run(result: Result, reporting: Reporting, outcome: Outcome) -> None:
    """Print the result of a run, and write it to the file for the result."""
    timing = [*reporting.timing, *result.milestones]
    if reporting.show_timing:
        print(timing_table(timing))
    told = outcome(result)
    how = "stopped at" if result.stopped else "done:"
    print(f"{how} step {result.steps}, {told.done}")
    for line in told.lines:
        print(line)
    if result.failures:
        times = f"{result.failures} failure" + ("s" if result.failures > 1 else "")
        print(f"recovered from {times}, which cost {result.seconds_lost:.1f} s")
    if result.resizes:
        times = "once" if result.resizes == 1 else f"{result.resizes} times"
        print(f"changed its number of ranks {times}, to {result.plan.world_size}")
    if result.ended_early:
        print(f"ended early: {result.ended_early}")
    if result.best_score is not None:
        print(f"best: step {result.best_step}, score {result.best_score:.5f}")
    if result.checkpoint:
        print(f"checkpoint: {result.checkpoint}")
    if result.profile is not None:
        print(f"{result.profile.text()}\nprofile: {result.profile.folder}")
    summary = {
        "steps": result.steps,
        "rows": result.rows,
        "seconds": result.seconds,
        "rows_per_s": result.rows_per_s,
        "ranks": result.plan.world_size,
        "train_loss": result.train_loss,
        "checkpoint": result.checkpoint,
        "stopped": result.stopped,
        "failures": result.failures,
        "recoveries": result.recoveries,
        "seconds_lost": result.seconds_lost,
        "resizes": result.resizes,
        "startup_s": seconds_by_part(timing),
        "seed": reporting.seed,
    }
    if result.best_score is not None:
        summary |= {"best_step": result.best_step, "best_score": result.best_score}
    write_result(reporting.result, summary | told.fields)


def write_result(path: str | None, result: Mapping[str, Any]) -> None:
    """Write the result as JSON, whole or not at all; does nothing without a path."""
    if path is not None:
        write_whole("the result (--result)", path, json.dumps(json_data(result), indent=1))


def truth_beside(eval_path: str | None, where: str | None = None) -> PlantedScores | None:
    """Read the truth.json beside evaluation data, of the part with a filter where it has one.

    It is read before training, so that a damaged file costs no run.

    Raises:
        ConfigError: the file cannot be read as one.
    """
    from rayrec.metrics import PlantedScores

    path = Path(eval_path or "").parent / "truth.json"
    if not eval_path or not os.path.isfile(path):
        return None
    truth = PlantedScores.load(path)
    return part_of(truth, where) or truth


def part_of(truth: PlantedScores | None, where: str | None) -> PlantedScores | None:
    """Return the truth of the rows that a filter takes; None if it is not known."""
    from rayrec.data.predicate import parse_where

    if truth is None or where is None:
        return None
    wanted = parse_where(where)
    known = (part for part in truth.parts if part.where is not None)
    return next((part for part in known if parse_where(part.where or "") == wanted), None)


def scores_beside_truth(
    metrics: Mapping[str, float], truth: PlantedScores | None
) -> dict[str, float]:
    """Return the metrics, with bayes_auc and regret if the truth is of as many rows."""
    scores = dict(metrics)
    # Scores of several tasks count rows by their names: the truth does not say of which it is.
    if truth is not None and truth.rows == scores.get("rows"):
        scores |= {
            "bayes_auc": truth.bayes_auc,
            "bayes_ne": truth.bayes_ne,
            "regret": truth.bayes_auc - scores["auc"],
        }
    return scores


def scores_lines(scores: Mapping[str, float]) -> list[str]:
    """Return the scores on one line, or on one for each task, which begins with its name."""
    by_task: dict[str, dict[str, float]] = {}
    for name, value in scores.items():
        task, _, own = name.rpartition("/")
        by_task.setdefault(task, {})[own] = value
    return [f"{task}  {scores_line(own)}".lstrip() for task, own in by_task.items()]


def scores_line(scores: Mapping[str, float]) -> str:
    """Return the scores of one task, with those that the run asked for, such as gauc@user."""
    asked = [name for name in scores if "@" in name]
    order = ("auc", *asked, "bayes_auc", "regret", "ne", "logloss", "calibration")
    order += ("cross_entropy", "mse", "rmse", "mae")
    shown = [f"{name} {scores[name]:.5f}" for name in order if name in scores]
    shown += [f"rows {scores['rows']:.0f}"] if "rows" in scores else []
    return "  ".join(shown)


def process_start() -> float:
    """Return the start of this process, in seconds of the wall clock; now if it is unknown."""
    try:
        # The 22nd field is the start in clock ticks since boot. The second, the name, may hold
        # spaces, so the fields are counted behind its bracket.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        since_boot = ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
    except (OSError, ValueError, AttributeError):
        return time.time()


def seconds_by_part(timing: Sequence[Milestone]) -> dict[str, float]:
    """Return the seconds from each milestone to the next, by the name of the later one."""
    ordered = sorted(timing, key=lambda milestone: milestone.at)
    # Milestones of the command and of the driver may cross, since data are made while Ray starts.
    return {b.name: round(b.at - a.at, 3) for a, b in pairwise(ordered)}


def timing_table(timing: Sequence[Milestone]) -> str:
    """Return the seconds of a start-up's parts, one a line, with their sum."""
    parts = seconds_by_part(timing)
    parts["to the first step"] = sum(parts.values())
    lines = [f"  {name:<24}{seconds:7.2f} s" for name, seconds in parts.items()]
    return "\n".join(["start-up, by part:", *lines])
