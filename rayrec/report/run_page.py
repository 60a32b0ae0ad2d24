"""Runs as one self-contained HTML page: their curves one upon the other, their plans, their events.

No script, font or image from elsewhere. Everything can be read without the script, which only shows
the numbers under the pointer. The page gets plain data; `rayrec.watch.page` makes it of the events
of runs. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from rayrec.layout.plan import ShardingPlan
from rayrec.layout.units import format_bytes, format_ms
from rayrec.report.charts import COLORS, LEFT, RIGHT, WIDTH, Chart, draw
from rayrec.report.drawing import stacks
from rayrec.report.plan_page import plan_sections
from rayrec.report.run_style import SCRIPT, run_style

MAX_ROWS = 400  # of a table of events


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSeconds:
    """Predicted and measured seconds of a part of rank 0's mean step; None where not known."""

    part: str
    predicted: float | None
    measured: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPicture:
    """What the page shows of one run besides its curves.

    Attributes:
        name: differs from those of the other runs.
        facts: cells of its column in the table of runs, by the table's row.
        settings: those that are not the same in all runs of the page, in the same way.
        failed: its last life ended by an error.
        plan: where its tables lay in its last life, or None.
        parts: predicted beside measured; empty where there is no prediction.
        memory: by rank, bytes at the end.
        events: time, step, kind and words of what happened, in order.
    """

    name: str
    facts: dict[str, str]
    settings: dict[str, str] = field(default_factory=dict)
    failed: bool = False
    plan: ShardingPlan | None = None
    parts: Sequence[PartSeconds] = ()
    memory: Sequence[float] = ()
    events: Sequence[tuple[str, int, str, str]] = ()


def render_run_page(
    runs: Sequence[RunPicture], charts: Sequence[Chart], areas: Sequence[Chart], last_step: int
) -> str:
    """The page as text.

    Args:
        runs: at least one.
        charts: curves of all runs together.
        areas: one picture of the parts of a step for each run that has them.
        last_step: of the run that went farthest.
    """
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    script = f"const LEFT = {LEFT}, RIGHT = {RIGHT}, WIDTH = {WIDTH};{SCRIPT}"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">',
        f"<title>{escape(title)}: training</title><style>{run_style(len(runs))}</style>",
        "</head><body>",
        f"<h1>{escape(title)}: training</h1>",
        _facts(runs),
        _keys(runs),
        f'<div class="charts">{"".join(draw(chart, last_step) for chart in charts)}</div>',
        _step_parts(areas, last_step),
        _memory(runs),
        _parts(runs),
        *(_plan(number, run) for number, run in enumerate(runs)),
        *(_events(number, run) for number, run in enumerate(runs)),
        f"<script>{script}</script>",
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _facts(runs: Sequence[RunPicture]) -> str:
    """The table of runs: a column for each, so that it is as wide as there are runs."""
    rows = []
    for name in dict.fromkeys(name for run in runs for name in run.facts):
        cells = []
        for run in runs:
            style = ' class="failed"' if name == "outcome" and run.failed else ""
            cells.append(f"<td{style}>{escape(run.facts.get(name, '-'))}</td>")
        rows.append(f"<th>{escape(name)}</th>{''.join(cells)}")
    settings = list(dict.fromkeys(name for run in runs for name in run.settings))
    if len(runs) > 1:
        told = "settings that differ" if settings else "no setting differs"
        rows.append(f'<th colspan="{len(runs) + 1}">{told}</th>')
    for name in settings:
        cells = [f"<td>{escape(run.settings.get(name, '-'))}</td>" for run in runs]
        rows.append(f"<th>{escape(name)}</th>{''.join(cells)}")
    return f'<div class="runs">{_table(["run", *(run.name for run in runs)], rows)}</div>'


def _table(heads: Sequence[str], rows: Sequence[str]) -> str:
    header = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="plain"><table><thead><tr>{header}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _keys(runs: Sequence[RunPicture]) -> str:
    """The legend: a box for every run that hides it, and what the signs mean."""
    keys = []
    for number, run in enumerate(runs):
        box = f'<input type="checkbox" id="run{number}" checked>'
        color = f'<i class="c{number % COLORS}"></i>'
        keys.append(f'<label for="run{number}">{box}{color}{escape(run.name)}</label>')
    signs = (
        "line: training, dashes with dots: evaluation, triangle: checkpoint (large: best), "
        "dotted upright: continued, red cross: failure"
    )
    return f'<div class="keys">{"".join(keys)}<span class="signs">{signs}</span></div>'


def _step_parts(areas: Sequence[Chart], last_step: int) -> str:
    if not areas:
        return ""
    names = list(dict.fromkeys(series.name for chart in areas for series in chart.series))
    keys = "".join(
        f'<span><i class="s{number}" style="background: var(--c)"></i>{escape(name)}</span>'
        for number, name in enumerate(names)
    )
    charts = "".join(draw(chart, last_step) for chart in areas)
    return (
        "<section><h2>Step by part</h2><p>Mean step of rank 0 in every window.</p>"
        f'<div class="legend">{keys}</div><div class="charts">{charts}</div></section>'
    )


def _memory(runs: Sequence[RunPicture]) -> str:
    figures = []
    for number, run in enumerate(runs):
        labels = [f"rank {i}: {format_bytes(value)}" for i, value in enumerate(run.memory)]
        columns = [[value] for value in run.memory]
        if columns:
            bars = stacks(columns, labels, ["resident"], format_bytes, width=WIDTH)
            head = f"<figcaption>{escape(run.name)}</figcaption>"
            figures.append(f'<figure class="run-{number}">{head}{bars}</figure>')
    if not figures:
        return ""
    return (
        "<section><h2>Memory by rank</h2><p>Resident memory of every rank's process in the last "
        f'window.</p><div class="charts">{"".join(figures)}</div></section>'
    )


def _parts(runs: Sequence[RunPicture]) -> str:
    figures = []
    for number, run in enumerate(runs):
        if run.parts:
            head = f"<figcaption>{escape(run.name)}</figcaption>"
            figures.append(f'<figure class="run-{number}">{head}{_beside(run.parts)}</figure>')
    if not figures:
        return ""
    return (
        "<section><h2>Predicted against measured</h2><p>A step of rank 0, mean of the windows "
        "after the first. Measured times include waiting for other ranks; parts without a price "
        f'are only measured.</p><div class="charts">{"".join(figures)}</div></section>'
    )


def _beside(parts: Sequence[PartSeconds]) -> str:
    rows = []
    for row in parts:
        told = "-" if row.predicted is None else format_ms(row.predicted)
        took = "-" if row.measured is None else format_ms(row.measured)
        ratio = f"{row.measured / row.predicted:.2f}x" if row.predicted and row.measured else "-"
        cells = "".join(f'<td class="number">{cell}</td>' for cell in (told, took, ratio))
        rows.append(f"<td>{escape(row.part)}</td>{cells}")
    return _table(["part", "predicted ms", "measured ms", "measured / predicted"], rows)


def _plan(number: int, run: RunPicture) -> str:
    if run.plan is None:
        return ""
    sections = "".join(plan_sections(run.plan))
    return (
        f'<details class="run-{number}"><summary>Plan of {escape(run.name)}</summary>'
        f"{sections}</details>"
    )


def _events(number: int, run: RunPicture) -> str:
    rows = []
    for at, step, kind, words in run.events[-MAX_ROWS:]:
        style = ' class="failed"' if kind == "failure" else ""
        cells = f'<td>{escape(at)}</td><td class="number">{step:,}</td>'
        rows.append(f"{cells}<td{style}>{escape(kind)}</td><td>{escape(words)}</td>")
    cut = len(run.events) - len(rows)
    note = f"<p>The last {len(rows)} of {len(run.events)}.</p>" if cut > 0 else ""
    return (
        f'<details class="events run-{number}"><summary>Events of {escape(run.name)}</summary>'
        f"{note}{_table(['at (UTC)', 'step', 'event', 'what'], rows)}</details>"
    )
