"""Curves over the steps of a run, as inline SVG that can be read without a script.

All charts of a page have one scale of steps, so that a script can show one step in all of them.
`rayrec.report.scales` says which points of a long curve are drawn, and which range of values.
Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil
from typing import Literal

from rayrec.layout.units import format_bytes, format_count
from rayrec.report.elements import text_at
from rayrec.report.scales import MAX_POINTS, Points, thinned, ticks, value_range

WIDTH, HEIGHT = 530, 176
LEFT, RIGHT, TOP, BOTTOM = 58, 8, 8, 20  # margins of the plot within a chart
COLORS = 8  # of runs; further runs take them again

MAX_MARKS = 200  # of a kind and a run; of more, some are left out evenly
MarkKind = Literal["checkpoint", "best", "failure", "resume"]
Unit = Literal["number", "rate", "ms", "percent", "bytes"]
_FORMATS: dict[Unit, Callable[[float], str]] = {
    "number": lambda value: f"{value:.6g}",
    "rate": format_count,
    "ms": lambda value: f"{value:.4g} ms",
    "percent": lambda value: f"{100 * value:.4g}%",
    "bytes": format_bytes,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A curve.

    Attributes:
        name: shown where the pointer is.
        run: number of its run, which gives the color; None where the part gives it.
        points: (step, value), the steps rising.
        band: (step, least, greatest) around it, or empty.
        dashed: with a dot at every point, for values that are few.
    """

    name: str
    run: int | None
    points: Points
    band: Sequence[tuple[int, float, float]] = ()
    dashed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Something that happened at a step: checkpoint, best, failure or resume."""

    kind: MarkKind
    run: int
    step: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A picture of some curves.

    Attributes:
        unit: how values are written.
        from_zero: the scale begins at 0.
        stacked: areas lie one upon the other; their points have equal steps.
    """

    title: str
    unit: Unit
    series: Sequence[Series]
    from_zero: bool = False
    stacked: bool = False


def draw(chart: Chart, last_step: int, marks: Sequence[Mark] = ()) -> str:
    """Return a chart as a figure with its numbers for the script; all charts end at `last_step`."""
    areas = _stack(chart.series) if chart.stacked else []
    low, high, outside = value_range(_values(chart, areas), chart.from_zero)
    place = _Place(max(last_step, 1), low, high)
    shapes = [_area(f"s{part}", *edges, place) for part, edges in enumerate(areas)]
    if not chart.stacked:
        shapes = [_band(series, place) for series in chart.series if len(series.band) > 1]
        shapes += [_line(series, place) for series in chart.series]
    far = f"{outside} far value{'s' if outside > 1 else ''} outside"
    note = f" <small>({far})</small>" if outside else ""
    plot = f'x="{LEFT}" y="{TOP}" width="{place.width}" height="{place.height}"'
    return (
        f'<figure class="chart" data-last="{place.last}" data-unit="{chart.unit}">'
        f"<figcaption>{escape(chart.title)}{note}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{_axes(place, chart.unit)}'
        f'<svg {plot} overflow="hidden">{"".join(shapes)}</svg>'
        f"{''.join(_mark(mark, place) for mark in _fewer(marks))}"
        f'<line class="cursor" y1="{TOP}" y2="{TOP + place.height}"/></svg>'
        f'<script type="application/json">{_numbers(chart)}</script></figure>'
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """Maps steps and values to pixels from the upper left corner of the plot."""

    last: int
    low: float
    high: float
    width: int = WIDTH - LEFT - RIGHT
    height: int = HEIGHT - TOP - BOTTOM

    def x(self, step: int) -> float:
        return step / self.last * self.width

    def y(self, value: float) -> float:
        return (self.high - value) / (self.high - self.low) * self.height

    def path(self, points: Points) -> str:
        return " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in points)


def _values(chart: Chart, areas: Sequence[tuple[Points, Points]]) -> list[float]:
    """All values that the scale of a chart shall show."""
    if chart.stacked:
        return [value for _, value in areas[-1][1]] if areas else []
    values = [value for series in chart.series for _, value in series.points]
    for series in chart.series:
        values += [value for _, *edges in series.band for value in edges]
    return values


def _axes(place: _Place, unit: Unit) -> str:
    parts = []
    for value in ticks(place.low, place.high):
        y = TOP + place.y(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(text_at(LEFT - 5, y + 4, "end", _FORMATS[unit](value)))
    for value in ticks(0, place.last, 5):
        # A tick between two steps is no step.
        if value == int(value):
            x = LEFT + place.x(int(value))
            anchor = "end" if x > WIDTH - 30 else "middle"
            parts.append(text_at(x, HEIGHT - 5, anchor, f"{int(value):,}"))
    return "".join(parts)


def _area(kind: str, lower: Points, upper: Points, place: _Place) -> str:
    return f'<polygon class="{kind}" points="{place.path([*upper, *reversed(lower)])}"/>'


def _band(series: Series, place: _Place) -> str:
    least = thinned([(step, value) for step, value, _ in series.band])
    most = thinned([(step, value) for step, _, value in series.band])
    return _area(f"band {_color(series)}", least, most, place)


def _line(series: Series, place: _Place) -> str:
    points = thinned(series.points)
    kind = f"{_color(series)}{' dashed' if series.dashed else ''}"
    shape = f'<polyline class="curve {kind}" points="{place.path(points)}"/>'
    # A curve of one point would not be seen.
    if series.dashed or len(points) == 1:
        for step, value in points:
            at = f'cx="{place.x(step):.1f}" cy="{place.y(value):.1f}"'
            shape += f'<circle class="dot {_color(series)}" {at} r="2.5"/>'
    return shape


def _color(series: Series) -> str:
    return "" if series.run is None else f"run-{series.run} c{series.run % COLORS}"


def _stack(series: Sequence[Series]) -> list[tuple[Points, Points]]:
    """The lower and the upper edge of every layer."""
    steps = [step for step, _ in series[0].points] if series else []
    # Layers must share their steps, so every group of points becomes its mean.
    size = max(1, ceil(len(steps) / MAX_POINTS))
    firsts = range(0, len(steps), size)
    ends = [steps[min(first + size, len(steps)) - 1] for first in firsts]
    base = [0.0] * len(ends)
    areas: list[tuple[Points, Points]] = []
    for layer in series:
        groups = [[value for _, value in layer.points[first : first + size]] for first in firsts]
        top = [low + sum(group) / len(group) for low, group in zip(base, groups, strict=True)]
        areas.append((list(zip(ends, base, strict=True)), list(zip(ends, top, strict=True))))
        base = top
    return areas


def _fewer(marks: Sequence[Mark]) -> list[Mark]:
    """At most `MAX_MARKS` of every kind and run, evenly chosen, the last one always."""
    groups: dict[tuple[str, int], list[Mark]] = {}
    for mark in marks:
        groups.setdefault((mark.kind, mark.run), []).append(mark)
    kept = []
    for group in groups.values():
        kept += group[:: -ceil(len(group) / MAX_MARKS)][::-1]
    return kept


def _mark(mark: Mark, place: _Place) -> str:
    x, base = LEFT + place.x(mark.step), TOP + place.height
    title = f"<title>{escape(mark.text)}</title>"
    kind = f'class="{mark.kind} run-{mark.run} c{mark.run % COLORS}"'
    if mark.kind in ("failure", "resume"):
        cross = f'<path d="M{x - 4:.1f} {TOP}l8 8m0 -8l-8 8"/>' if mark.kind == "failure" else ""
        line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{base}"/>'
        return f"<g {kind}>{title}{line}{cross}</g>"
    size = 5 if mark.kind == "best" else 3
    path = f"M{x:.1f} {base - 2 * size}l{size} {2 * size}h{-2 * size}z"
    return f'<path {kind} d="{path}">{title}</path>'


def _numbers(chart: Chart) -> str:
    """Names, colors and values of the curves as JSON, which holds no end of a script."""
    curves = []
    for part, series in enumerate(chart.series):
        points = thinned(series.points)
        curves.append(
            {
                "name": series.name,
                "run": series.run,
                "color": f"s{part}" if series.run is None else f"c{series.run % COLORS}",
                "steps": [step for step, _ in points],
                "values": [float(f"{value:.6g}") for _, value in points],
            }
        )
    return json.dumps(curves, separators=(",", ":")).replace("<", "\\u003c")
