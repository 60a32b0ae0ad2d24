"""`write_run_page`: one HTML page of one or several runs, made of their events.

It reads events.jsonl alone, so it can be made while a run trains, after it was killed, and on
another machine. The runs' curves lie one upon the other, and everything can be read without the
script, which only shows the numbers under the pointer. `rayrec.watch.story` tells how a run went,
`rayrec.watch.curves` chooses the charts, and `rayrec.report` draws.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from statistics import fmean

from rayrec.checks import absolute_path
from rayrec.errors import ConfigError, InputError, PlanError
from rayrec.layout.plan import ShardingPlan
from rayrec.layout.rates import PARTS
from rayrec.layout.units import fit, format_bytes, format_ms
from rayrec.observe.times import STEP_PARTS
from rayrec.report.bars import stacks
from rayrec.report.charts import COLORS, LEFT, RIGHT, WIDTH, draw
from rayrec.report.elements import beside, cell, figure, fold, grid, legend, page, section, table
from rayrec.report.plan_page import plan_sections
from rayrec.storage import probe_output, write_whole
from rayrec.watch.curves import DrawnRun, charts_of, drawn_run, marks_of, step_areas, step_parts
from rayrec.watch.events import RunEvents, read_events
from rayrec.watch.story import clock, facts_of, words_of

LONGEST = 60  # characters of a setting
MAX_ROWS = 400  # of a table of events
SIGNS = (
    "line: training, dashes with dots: evaluation, triangle: checkpoint (large: best), "
    "dotted upright: continued, red cross: failure"
)


def write_run_page(runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> str:
    """Write the page of some runs.

    Args:
        runs: folders of runs, or their files of events, local or URIs; at least one.
        out: the HTML file, local or a URI.
    Returns:
        the absolute path of the file.
    Raises:
        ConfigError: no run is named, one has no events, or `out` cannot be written.
        InputError: a line of events, or the plan in it, is broken.
        SaveError: the file could not be written after all.

    Example:
        write_run_page(["runs/a", "runs/b"], "runs.html")
    """
    if not runs:
        raise ConfigError("a page needs a run; name the folder of at least one.")
    target = absolute_path("the page is", out)
    probe_output("the page", target)
    read = [read_events(run) for run in runs]
    write_whole("the page", target, run_page(read))
    return target


def run_page(runs: Sequence[RunEvents]) -> str:
    """Return the page of runs that were read.

    Raises:
        InputError: the plan of a run is broken.
    """
    named = [drawn_run(name, run) for name, run in zip(run_names(runs), runs, strict=True)]
    last_step = max(event.step for run in runs for event in run.kept)
    marks = list(marks_of(named))
    areas = [draw(chart, last_step) for chart in step_areas(named)]
    keys = [(f"s{number}", part) for number, part in enumerate(step_parts(named))]
    body = [
        _table_of_runs(named),
        _keys(named),
        grid([draw(chart, last_step, marks) for chart in charts_of(named)]),
        _section("Step by part", "Mean step of rank 0 in every window.", areas, legend(keys)),
        _section(
            "Memory by rank",
            "Resident memory of every rank's process in the last window.",
            [_figure(number, run, _memory(run.events)) for number, run in enumerate(named)],
        ),
        _section(
            "Predicted against measured",
            "A step of rank 0, mean of the windows after the first. Measured times include waiting "
            "for other ranks; parts without a price are only measured.",
            [_figure(number, run, _parts(run.events)) for number, run in enumerate(named)],
        ),
        *(_plan(number, run) for number, run in enumerate(named)),
        *(_events(number, run) for number, run in enumerate(named)),
    ]
    title = named[0].name if len(runs) == 1 else f"{len(runs)} runs"
    numbers = f"const LEFT = {LEFT}, RIGHT = {RIGHT}, WIDTH = {WIDTH};"
    # A run whose box is not ticked is hidden, also without a script.
    hidden = [
        f"body:has(#run{number}:not(:checked)) .run-{number} {{ display: none; }}"
        for number in range(len(runs))
    ]
    return page(f"{title}: training", body, numbers + beside("curves.js"), "\n".join(hidden))


def run_names(runs: Sequence[RunEvents]) -> list[str]:
    """A name for every run that tells it from the others: its own, or the end of its path.

    A run that is given twice gets a number.
    """
    own = [str(run.start.values["run"]) for run in runs]
    if len(set(own)) == len(own):
        return own
    folders = [run.path.rstrip("/").removesuffix("/events.jsonl").split("/") for run in runs]
    for length in range(1, max(map(len, folders)) + 1):
        names = ["/".join(folder[-length:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]


def _table_of_runs(runs: Sequence[DrawnRun]) -> str:
    """How the runs went: a column for each, so that the table is as wide as there are runs."""
    facts = [facts_of(run.events) for run in runs]
    rows = [_row(name, facts) for name in dict.fromkeys(name for one in facts for name in one)]
    flat = [dict(_flat(run.events.start.values["settings"], "")) for run in runs]
    names = dict.fromkeys(name for one in flat for name in one)
    # the name of a run stands above its column
    differ = [n for n in names if n != "name" and len({one.get(n) for one in flat}) > 1]
    if len(runs) > 1:
        told = "settings that differ" if differ else "no setting differs"
        rows.append([f'<th colspan="{len(runs) + 1}">{told}</th>'])
    rows += [_row(name, flat) for name in differ]
    heads = ["run", *(run.name for run in runs)]
    return f'<div class="runs">{table(heads, rows)}</div>'


def _row(name: str, columns: Sequence[Mapping[str, str]]) -> list[str]:
    cells = [cell(name, tag="th")]
    for column in columns:
        value = column.get(name, "-")
        cells.append(cell(value, "failed" if (name, value) == ("outcome", "failed") else ""))
    return cells


def _flat(values: Mapping[str, object], within: str) -> Iterator[tuple[str, str]]:
    """Settings by their dotted names, those that are None left out."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{within}{name}.")
        elif value is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            # a schema as text has pages, and a hash tells whether two are the same
            digest = f" ({zlib.crc32(text.encode()):08x})" if len(text) > LONGEST else ""
            yield f"{within}{name}", f"{fit(text, LONGEST)}{digest}"


def _keys(runs: Sequence[DrawnRun]) -> str:
    """The legend: a box for every run that hides it, and the meaning of the signs."""
    keys = []
    for number, run in enumerate(runs):
        box = f'<input type="checkbox" id="run{number}" checked>'
        color = f'<i class="c{number % COLORS}"></i>'
        keys.append(f'<label for="run{number}">{box}{color}{escape(run.name)}</label>')
    return f'<div class="keys">{"".join(keys)}<span class="signs">{SIGNS}</span></div>'


def _section(title: str, note: str, figures: Sequence[str], keys: str = "") -> str:
    shown = [each for each in figures if each]
    return section(title, keys, grid(shown), note=note) if shown else ""


def _figure(number: int, run: DrawnRun, drawing: str) -> str:
    return drawing and figure(run.name, drawing, f"run-{number}")


def _memory(run: RunEvents) -> str:
    windows = run.of("window")
    ranks = [value or 0.0 for value in windows[-1].values["memory_bytes"]] if windows else []
    if not ranks or len(ranks) != run.start.values["world_size"]:
        return ""
    labels = [f"rank {rank}: {format_bytes(value)}" for rank, value in enumerate(ranks)]
    return stacks([[value] for value in ranks], labels, ["resident"], format_bytes, width=WIDTH)


def _parts(run: RunEvents) -> str:
    """Predicted beside measured parts of rank 0; the first window is slow and is left out."""
    windows, told = run.of("window"), run.start.values["predicted"]
    measured = [w.values["step_s"] for w in (windows[1:] or windows) if w.values["step_s"]]
    if not told or not measured:
        return ""
    rows = []
    for part in STEP_PARTS:
        took = [step[part] for step in measured if step.get(part) is not None]
        predicted = told[0].get(f"{part}_s") if part in PARTS else None
        if took or predicted is not None:
            mean = fmean(took) if took else None
            ratio = f"{mean / predicted:.2f}x" if predicted and mean else "-"
            seconds = ["-" if each is None else format_ms(each) for each in (predicted, mean)]
            rows.append([cell(part), *(cell(each, "number") for each in (*seconds, ratio))])
    return table(["part", "predicted ms", "measured ms", "measured / predicted"], rows)


def _plan(number: int, run: DrawnRun) -> str:
    data = run.events.start.values["plan"]
    if data is None:
        return ""
    what = f"the plan in the events of {run.events.path}"
    try:
        plan = ShardingPlan.from_json(json.dumps(data), what)
    except (PlanError, ConfigError) as error:
        raise InputError(str(error)) from None
    return fold(f"Plan of {run.name}", *plan_sections(plan), kind=f"run-{number}")


def _events(number: int, run: DrawnRun) -> str:
    """A table of everything but windows, also of what a later life took back."""
    kept = set(map(id, run.events.kept))
    story = [event for event in run.events.events if event.kind != "window"]
    rows = []
    for event in story[-MAX_ROWS:]:
        words = words_of(event) + ("" if id(event) in kept else " (taken back by a later life)")
        kind = cell(event.kind, "failed" if event.kind == "failure" else "")
        rows.append([cell(clock(event.at)), cell(f"{event.step:,}", "number"), kind, cell(words)])
    note = f"<p>The last {MAX_ROWS} of {len(story)}.</p>" if len(story) > MAX_ROWS else ""
    shown = table(["at (UTC)", "step", "event", "what"], rows)
    return fold(f"Events of {run.name}", note, shown, kind=f"events run-{number}")
