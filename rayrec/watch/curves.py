"""The charts of a page of runs: their curves and their marks.

A curve is that of a tracker, by the same name (`rayrec.watch.numbers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rayrec.observe.times import STEP_PARTS
from rayrec.report.charts import Chart, Mark, MarkKind, Series, Unit
from rayrec.watch.events import RunEvents
from rayrec.watch.numbers import numbers_of
from rayrec.watch.story import words_of

Points = list[tuple[int, float]]
NO_SCORES = ("train/loss", "train/rows", "eval/seconds", "windows/seconds")


class DrawnRun(NamedTuple):
    """A run by its name on the page, and its curves by theirs."""

    name: str
    events: RunEvents
    curves: dict[str, Points]


def drawn_run(name: str, run: RunEvents) -> DrawnRun:
    """Return a run with the curves of its kept events."""
    curves: dict[str, Points] = {}
    for event in run.kept:
        numbers = numbers_of(event.kind, event.values)
        parts = [seconds for curve, seconds in numbers.items() if curve.startswith("step_s/")]
        numbers |= {"step_ms": 1e3 * sum(parts)} if parts else {}
        for curve, value in numbers.items():
            curves.setdefault(curve, []).append((event.step, value))
    return DrawnRun(name, run, curves)


def charts_of(runs: Sequence[DrawnRun]) -> list[Chart]:
    """Loss, scores, speed, learning rates, waits and memory, every run in one color."""
    charts = [
        _chart("Loss", "number", runs, "train/loss"),
        *_scores(runs),
        _chart("Rows per second", "rate", runs, "speed/rows_per_s", from_zero=True),
        _chart("Step", "ms", runs, "step_ms", from_zero=True),
        _chart("Waiting for data, slowest rank", "percent", runs, "data_wait/max", from_zero=True),
        _memory(runs),
        *_ids(runs),
        *(
            _chart(f"Learning rate: {optimizer}", "number", runs, f"learning_rate/{optimizer}")
            for optimizer in _named(runs, "learning_rate/")
        ),
    ]
    return [chart for chart in charts if any(series.points for series in chart.series)]


def step_parts(runs: Sequence[DrawnRun]) -> list[str]:
    """The parts of a step that any of the runs measured, in the order of a step."""
    measured = set(_named(runs, "step_s/"))
    known = [part for part in STEP_PARTS if part in measured]
    return known + sorted(measured - set(known))


def step_areas(runs: Sequence[DrawnRun]) -> list[Chart]:
    """The parts of a step, one chart for each run that measured them; all have the same parts."""
    charts = []
    for run in runs:
        measured = [dict(run.curves.get(f"step_s/{part}", ())) for part in step_parts(runs)]
        steps = sorted({step for seconds in measured for step in seconds})
        layers = []
        for part, seconds in zip(step_parts(runs), measured, strict=True):
            points = [(step, 1e3 * seconds.get(step, 0.0)) for step in steps]
            layers.append(Series(name=part, run=None, points=points))
        if steps:
            stacked = Chart(title=run.name, unit="ms", series=layers, from_zero=True, stacked=True)
            charts.append(stacked)
    return charts


def marks_of(runs: Sequence[DrawnRun]) -> Iterator[Mark]:
    """Checkpoints, failures, and the steps from which runs went on."""
    for number, (_, run, _) in enumerate(runs):
        # each was the best when it was saved; the last of them is
        best = next((e for e in reversed(run.of("checkpoint")) if e.values["best"]), None)
        for event in run.kept:
            kind: MarkKind | None = None
            if event.kind == "checkpoint":
                kind = "best" if event is best else "checkpoint"
            elif event.kind == "failure":
                kind = "failure"
            elif event.kind == "recovery" or (event.kind == "start" and event.life > 0):
                kind = "resume"
            if kind is not None:
                words = f"step {event.step:,}: {words_of(event)}"
                yield Mark(kind=kind, run=number, step=event.step, text=words)


def _chart(
    title: str, unit: Unit, runs: Sequence[DrawnRun], curve: str, from_zero: bool = False
) -> Chart:
    """A curve of every run."""
    series = [
        Series(name=run.name, run=number, points=run.curves.get(curve, ()))
        for number, run in enumerate(runs)
    ]
    return Chart(title=title, unit=unit, series=series, from_zero=from_zero)


def _scores(runs: Sequence[DrawnRun]) -> Iterator[Chart]:
    """A chart for every score, of training, of evaluation and of windows in time."""
    kinds = {"train": "training", "eval": "evaluation", "windows": "windows before training"}
    kinds["best"] = "best possible of windows"
    for score in dict.fromkeys(score for kind in kinds for score in _named(runs, f"{kind}/")):
        series = []
        for number, run in enumerate(runs):
            for prefix, when in kinds.items():
                points, name = run.curves.get(f"{prefix}/{score}"), f"{run.name}, {when}"
                if points:
                    dashed = prefix != "train"
                    series.append(Series(name=name, run=number, points=points, dashed=dashed))
        yield Chart(title=f"Score: {score}", unit="number", series=series)


def _memory(runs: Sequence[DrawnRun]) -> Chart:
    series = []
    for number, run in enumerate(runs):
        band = []
        for event in run.events.of("window"):
            ranks = [value for value in event.values["memory_bytes"] if value is not None]
            if ranks:
                band.append((event.step, float(min(ranks)), float(max(ranks))))
        points = [(step, most) for step, _, most in band]
        series.append(Series(name=run.name, run=number, points=points, band=band))
    title = "Memory, fullest rank and the range of all"
    return Chart(title=title, unit="bytes", series=series, from_zero=True)


def _ids(runs: Sequence[DrawnRun]) -> Iterator[Chart]:
    """Two charts for every dynamic table."""
    for curve in _named(runs, "ids/"):
        table, _, name = curve.rpartition("/")
        title = {"fill": "Rows with an id", "unknown_share": "Look-ups without a row"}.get(name)
        if title is not None:
            yield _chart(f"{title}: {table}", "percent", runs, f"ids/{curve}", from_zero=True)


def _named(runs: Sequence[DrawnRun], prefix: str) -> list[str]:
    """The curves with a prefix, without it, in the order in which they first appear."""
    names = dict.fromkeys(name for run in runs for name in run.curves if name not in NO_SCORES)
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
