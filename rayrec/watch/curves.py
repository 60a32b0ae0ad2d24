"""The charts of a page of runs: which curves of events lie in which picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rayrec.observe.times import STEP_PARTS
from rayrec.report.charts import Chart, Mark, Series, Unit
from rayrec.watch.events import RunEvents
from rayrec.watch.numbers import only_scores

Points = list[tuple[int, float]]


def curve(run: RunEvents, kind: str, value: Callable[[Any], float | None]) -> Points:
    """(step, value) of the kept events of a kind that have the value."""
    points = []
    for event in run.of(kind):
        number = value(event.values)
        if number is not None:
            points.append((event.step, float(number)))
    return points


def charts_of(
    runs: Sequence[RunEvents], names: Sequence[str], marks: Sequence[Mark]
) -> list[Chart]:
    """Loss, scores, speed, learning rates, waits and memory, every run in one color."""
    charts = [_windows("Loss", "number", runs, names, lambda window: window["loss"])]
    charts += _scores(runs, names)
    charts += [
        _windows("Rows per second", "rate", runs, names, lambda w: w["rows_per_s"], from_zero=True),
        _windows("Step", "ms", runs, names, _step_ms, from_zero=True),
        _windows(
            "Waiting for data, slowest rank",
            "percent",
            runs,
            names,
            lambda window: max(numbers(window["data_wait"]), default=None),
            from_zero=True,
        ),
        _memory(runs, names),
    ]
    for rate in _keys(runs, "window", "learning_rates"):
        charts.append(
            _windows(
                f"Learning rate: {rate}", "number", runs, names, _named("learning_rates", rate)
            )
        )
    return [
        Chart(
            title=chart.title,
            unit=chart.unit,
            series=chart.series,
            from_zero=chart.from_zero,
            marks=marks,
        )
        for chart in charts
        if any(series.points for series in chart.series)
    ]


def step_areas(runs: Sequence[RunEvents], names: Sequence[str]) -> list[Chart]:
    """The parts of a step, one chart for each run that measured them; all have the same parts."""
    measured = set(_keys(runs, "window", "step_s"))
    parts = [part for part in STEP_PARTS if part in measured]
    parts += sorted(measured - set(parts))
    charts = []
    for run, name in zip(runs, names, strict=True):
        windows = [event for event in run.of("window") if event.values["step_s"]]
        layers = []
        for part in parts:
            seconds = [(w.step, w.values["step_s"].get(part) or 0.0) for w in windows]
            points = [(step, 1e3 * value) for step, value in seconds]
            layers.append(Series(name=part, run=None, points=points))
        if windows:
            charts.append(Chart(title=name, unit="ms", series=layers, from_zero=True, stacked=True))
    return charts


def numbers(values: Sequence[float | None]) -> list[float]:
    """Those that are known."""
    return [value for value in values if value is not None]


def _windows(
    title: str,
    unit: Unit,
    runs: Sequence[RunEvents],
    names: Sequence[str],
    value: Callable[[Any], float | None],
    from_zero: bool = False,
) -> Chart:
    series = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        series.append(Series(name=name, run=number, points=curve(run, "window", value)))
    return Chart(title=title, unit=unit, series=series, from_zero=from_zero)


def _scores(runs: Sequence[RunEvents], names: Sequence[str]) -> list[Chart]:
    """A chart for every score, of training and of evaluation."""
    charts = []
    scores = ["auc", "ne", *_keys(runs, "window", "scores"), *_keys(runs, "evaluation", "scores")]
    for score in only_scores(dict.fromkeys(scores, 0.0)):
        series = []
        for number, (run, name) in enumerate(zip(runs, names, strict=True)):
            trained = curve(run, "window", _train_score(score))
            evaluated = curve(run, "evaluation", _named("scores", score))
            series.append(Series(name=f"{name}, training", run=number, points=trained))
            series.append(
                Series(name=f"{name}, evaluation", run=number, points=evaluated, dashed=True)
            )
        series = [each for each in series if each.points]
        charts.append(Chart(title=f"Score: {score}", unit="number", series=series))
    return charts


def _memory(runs: Sequence[RunEvents], names: Sequence[str]) -> Chart:
    series = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        points, band = [], []
        for event in run.of("window"):
            ranks = numbers(event.values["memory_bytes"])
            if ranks:
                points.append((event.step, float(max(ranks))))
                band.append((event.step, float(min(ranks)), float(max(ranks))))
        series.append(Series(name=name, run=number, points=points, band=band))
    title = "Memory, fullest rank and the range of all"
    return Chart(title=title, unit="bytes", series=series, from_zero=True)


def _step_ms(window: Any) -> float | None:
    parts = numbers(list(window["step_s"].values()))
    return 1e3 * sum(parts) if parts else None


def _train_score(score: str) -> Callable[[Any], float | None]:
    def value(window: Any) -> float | None:
        named: float | None = window["scores"].get(score)
        return named if named is not None or score not in ("auc", "ne") else window[score]

    return value


def _named(field: str, name: str) -> Callable[[Any], float | None]:
    def value(values: Any) -> float | None:
        number: float | None = values[field].get(name)
        return number

    return value


def _keys(runs: Sequence[RunEvents], kind: str, field: str) -> list[str]:
    """The names in a field of all events of a kind, in the order in which they first appear."""
    names: dict[str, None] = {}
    for run in runs:
        for event in run.of(kind):
            names |= dict.fromkeys(event.values[field])
    return list(names)
