"""The charts of a page of runs: their curves and their marks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from rayrec.observe.times import STEP_PARTS
from rayrec.report.charts import Chart, Mark, MarkKind, Series, Unit
from rayrec.watch.events import RunEvents
from rayrec.watch.numbers import only_scores
from rayrec.watch.story import words_of

Points = list[tuple[int, float]]
Values = Mapping[str, Any]  # of an event
Value = Callable[[Values], float | None]
_scored = itemgetter("scores")  # of an evaluation


class NamedRun(NamedTuple):
    """A run by its name on the page."""

    name: str
    events: RunEvents


def charts_of(runs: Sequence[NamedRun]) -> list[Chart]:
    """Loss, scores, speed, learning rates, waits and memory, every run in one color."""
    charts = [
        _windows("Loss", "number", runs, itemgetter("loss")),
        *_scores(runs),
        _windows("Rows per second", "rate", runs, itemgetter("rows_per_s"), from_zero=True),
        _windows("Step", "ms", runs, _step_ms, from_zero=True),
        _windows("Waiting for data, slowest rank", "percent", runs, _longest_wait, from_zero=True),
        _memory(runs),
    ]
    rates = itemgetter("learning_rates")
    for rate in _keys(runs, "window", rates):
        value = _named(rates, rate)
        charts.append(_windows(f"Learning rate: {rate}", "number", runs, value))
    return [chart for chart in charts if any(series.points for series in chart.series)]


def step_parts(runs: Sequence[NamedRun]) -> list[str]:
    """The parts of a step that any of the runs measured, in the order of a step."""
    measured = set(_keys(runs, "window", itemgetter("step_s")))
    known = [part for part in STEP_PARTS if part in measured]
    return known + sorted(measured - set(known))


def step_areas(runs: Sequence[NamedRun]) -> list[Chart]:
    """The parts of a step, one chart for each run that measured them; all have the same parts."""
    charts = []
    for name, run in runs:
        windows = [event for event in run.of("window") if event.values["step_s"]]
        layers = []
        for part in step_parts(runs):
            points = [(w.step, 1e3 * (w.values["step_s"].get(part) or 0.0)) for w in windows]
            layers.append(Series(name=part, run=None, points=points))
        if windows:
            charts.append(Chart(title=name, unit="ms", series=layers, from_zero=True, stacked=True))
    return charts


def marks_of(runs: Sequence[RunEvents]) -> list[Mark]:
    """Checkpoints, failures, and the steps from which runs went on."""
    marks = []
    for number, run in enumerate(runs):
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
                marks.append(Mark(kind=kind, run=number, step=event.step, text=words))
    return marks


def _points(run: RunEvents, kind: str, value: Value) -> Points:
    """(step, value) of the kept events of a kind that have the value."""
    told = [(event.step, value(event.values)) for event in run.of(kind)]
    return [(step, float(number)) for step, number in told if number is not None]


def _windows(
    title: str, unit: Unit, runs: Sequence[NamedRun], value: Value, from_zero: bool = False
) -> Chart:
    """A curve of the windows of every run."""
    series = [
        Series(name=name, run=number, points=_points(run, "window", value))
        for number, (name, run) in enumerate(runs)
    ]
    return Chart(title=title, unit=unit, series=series, from_zero=from_zero)


def _scores(runs: Sequence[NamedRun]) -> list[Chart]:
    """A chart for every score, of training and of evaluation."""
    charts = []
    names = [*_keys(runs, "window", _trained), *_keys(runs, "evaluation", _scored)]
    for score in only_scores(dict.fromkeys(names, 0.0)):
        series = []
        for number, (name, run) in enumerate(runs):
            trained = _points(run, "window", _named(_trained, score))
            evaluated = _points(run, "evaluation", _named(_scored, score))
            series.append(Series(name=f"{name}, training", run=number, points=trained))
            series.append(
                Series(name=f"{name}, evaluation", run=number, points=evaluated, dashed=True)
            )
        series = [each for each in series if each.points]
        charts.append(Chart(title=f"Score: {score}", unit="number", series=series))
    return charts


def _memory(runs: Sequence[NamedRun]) -> Chart:
    series = []
    for number, (name, run) in enumerate(runs):
        band = []
        for event in run.of("window"):
            ranks = [value for value in event.values["memory_bytes"] if value is not None]
            if ranks:
                band.append((event.step, float(min(ranks)), float(max(ranks))))
        points = [(step, most) for step, _, most in band]
        series.append(Series(name=name, run=number, points=points, band=band))
    title = "Memory, fullest rank and the range of all"
    return Chart(title=title, unit="bytes", series=series, from_zero=True)


def _step_ms(window: Values) -> float | None:
    parts = [seconds for seconds in window["step_s"].values() if seconds is not None]
    return 1e3 * sum(parts) if parts else None


def _longest_wait(window: Values) -> float | None:
    return max((share for share in window["data_wait"] if share is not None), default=None)


def _trained(window: Values) -> Mapping[str, float | None]:
    """The scores of a window's rows by name."""
    return {"auc": window["auc"], "ne": window["ne"], **window["scores"]}


def _named(within: Callable[[Values], Mapping[str, float | None]], name: str) -> Value:
    return lambda values: within(values).get(name)


def _keys(
    runs: Sequence[NamedRun], kind: str, within: Callable[[Values], Mapping[str, Any]]
) -> list[str]:
    """The names in all events of a kind, in the order in which they first appear."""
    names: dict[str, None] = {}
    for _, run in runs:
        for event in run.of(kind):
            names |= dict.fromkeys(within(event.values))
    return list(names)
