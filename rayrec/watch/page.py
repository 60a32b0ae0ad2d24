"""`write_run_page`: one HTML page of one or several runs, made of their events.

It reads events.jsonl alone, so it can be made while a run trains, after it was killed, and on
another machine. `rayrec.report.run_page` draws.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any

from rayrec.checks import absolute_path
from rayrec.errors import ConfigError, InputError, PlanError
from rayrec.layout.plan import ShardingPlan
from rayrec.layout.rates import PARTS
from rayrec.layout.units import fit, format_count
from rayrec.observe.times import STEP_PARTS
from rayrec.report.charts import Mark, MarkKind
from rayrec.report.run_page import PartSeconds, RunPicture, render_run_page
from rayrec.storage import probe_output, write_whole
from rayrec.watch.curves import charts_of, step_areas
from rayrec.watch.events import RunEvent, RunEvents, read_events
from rayrec.watch.numbers import only_scores

LONGEST = 60  # characters of a setting


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
    """The page of runs that were read, as text.

    Raises:
        InputError: the plan of a run is broken.
    """
    names = run_names(runs)
    last_step = max(event.step for run in runs for event in run.kept)
    told = zip(runs, names, _settings(runs), strict=True)
    pictures = [_picture(run, name, settings) for run, name, settings in told]
    marks = [mark for number, run in enumerate(runs) for mark in _marks(number, run)]
    return render_run_page(
        pictures, charts_of(runs, names, marks), step_areas(runs, names), last_step
    )


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


def _settings(runs: Sequence[RunEvents]) -> list[dict[str, str]]:
    """Of every run the settings that are not the same in all of them, by their dotted names."""
    flat = [dict(_flat(run.start.values["settings"], "")) for run in runs]
    names = dict.fromkeys(name for one in flat for name in one)
    # the name of a run stands above its column
    differ = [n for n in names if n != "name" and len({one.get(n) for one in flat}) > 1]
    return [{name: one.get(name, "-") for name in differ} for one in flat]


def _flat(values: Mapping[str, Any], within: str) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{within}{name}.")
        elif value is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            # a schema as text has pages, and a hash tells whether two are the same
            digest = f" ({zlib.crc32(text.encode()):08x})" if len(text) > LONGEST else ""
            yield f"{within}{name}", f"{fit(text, LONGEST)}{digest}"


def _picture(run: RunEvents, name: str, settings: dict[str, str]) -> RunPicture:
    start, windows = run.start, run.of("window")
    memory = [value or 0.0 for value in windows[-1].values["memory_bytes"]] if windows else []
    outcome = _outcome(run)
    return RunPicture(
        name=name,
        facts=facts_of(run),
        settings=settings,
        failed=outcome == "failed",
        plan=_plan(run),
        parts=_parts(run),
        memory=memory if len(memory) == start.values["world_size"] else [],
        events=list(_story(run)),
    )


def _plan(run: RunEvents) -> ShardingPlan | None:
    data = run.start.values["plan"]
    if data is None:
        return None
    try:
        return ShardingPlan.from_json(json.dumps(data), f"the plan in the events of {run.path}")
    except (PlanError, ConfigError) as error:
        raise InputError(str(error)) from None


def _outcome(run: RunEvents) -> str:
    """How the newest life ended; one without an end still trains or was killed."""
    last = run.events[-1]
    return str(last.values["outcome"]) if last.kind == "end" else "runs, or was killed"


def facts_of(run: RunEvents) -> dict[str, str]:
    """How a run went, by names for people."""
    start, windows = run.start, run.of("window")
    facts = {
        "outcome": _outcome(run),
        "steps": f"{max(e.step for e in run.kept):,} of {start.values['steps']:,}",
        "ranks": str(start.values["world_size"]),
        "lives": str(start.life + 1),
        "began (UTC)": _clock(run.events[0].at),
        "trained for": _span(trained_s(run)),
        "took": _span(_lasted_s(run)),
    }
    speeds = [w.values["rows_per_s"] for w in windows if w.values["rows_per_s"] is not None]
    if speeds:
        facts["rows/s, median"] = format_count(median(speeds))
    losses = [w.values["loss"] for w in windows if w.values["loss"] is not None]
    if losses:
        facts["last loss"] = f"{losses[-1]:.5f}"
    evaluations = run.of("evaluation")
    if evaluations:
        scores = only_scores(evaluations[-1].values["scores"]).items()
        shown = [f"{score} {value:.4f}" for score, value in scores]
        facts["last evaluation"] = ", ".join(shown[:4])
    return facts


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def trained_s(run: RunEvents) -> float:
    """The seconds of the kept windows, as a result counts them: without the making of tables,
    evaluation and saving.
    """
    seconds, life, before = 0.0, 0, 0
    for event in run.of("window"):
        rows, speed = event.values["rows"], event.values["rows_per_s"]
        before = before if event.life == life else 0
        if speed:
            seconds += max(0, rows - before) / speed
        life, before = event.life, rows
    return seconds


def _lasted_s(run: RunEvents) -> float:
    """The time of all lives, from the start to the last event of each."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for event in run.events:
        first.setdefault(event.life, event.at)
        last[event.life] = event.at
    return sum(max(0.0, last[life] - first[life]) for life in first)


def _span(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60 % 60, int(seconds // 3600)
    return f"{hours} h {minutes:.0f} min" if hours else f"{minutes:.1f} min"


def _parts(run: RunEvents) -> list[PartSeconds]:
    """Predicted beside measured parts of rank 0; the first window is slow and is left out."""
    windows, told = run.of("window"), run.start.values["predicted"]
    measured = [w.values["step_s"] for w in (windows[1:] or windows) if w.values["step_s"]]
    if not told or not measured:
        return []
    rows = []
    for part in STEP_PARTS:
        took = [step[part] for step in measured if step.get(part) is not None]
        predicted = told[0].get(f"{part}_s") if part in PARTS else None
        if took or predicted is not None:
            seconds = fmean(took) if took else None
            rows.append(PartSeconds(part=part, predicted=predicted, measured=seconds))
    return rows


def _marks(number: int, run: RunEvents) -> list[Mark]:
    marks = []
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
            words = f"step {event.step:,}: {_words(event)}"
            marks.append(Mark(kind=kind, run=number, step=event.step, text=words))
    return marks


def _story(run: RunEvents) -> Iterator[tuple[str, int, str, str]]:
    """Everything but windows, also what a later life took back."""
    kept = set(map(id, run.kept))
    for event in run.events:
        if event.kind != "window":
            taken_back = "" if id(event) in kept else " (taken back by a later life)"
            yield _clock(event.at), event.step, event.kind, _words(event) + taken_back


def _words(event: RunEvent) -> str:
    values = event.values
    if event.kind == "start":
        verb = "continued" if event.step else "started"
        return f"{verb} on {values['world_size']} ranks with rayrec {values['rayrec']}"
    if event.kind == "evaluation":
        scores = [f"{n} {v:.5g}" for n, v in only_scores(values["scores"]).items()]
        return ", ".join(scores) + f", of {values['rows']:,} rows"
    if event.kind == "checkpoint":
        return f"{'best so far, ' if values['best'] else ''}{values['path']}"
    if event.kind == "failure":
        where = "" if values["rank"] is None else f"rank {values['rank']} on {values['host']}: "
        return f"{where}{values['cause']}"
    if event.kind == "recovery":
        others = "the other ranks" if values.get("dropped") else "all ranks"
        how = "replaced" if values["replaced"] else f"{others} met again"
        how += " by a spare" if values.get("spare") else ""
        return f"{how} in {values['seconds']:.1f} s, went on from step {event.step:,}"
    if event.kind == "resize":
        change = f"from {values['ranks_before']} to {values['ranks']} ranks"
        return f"{change}, since ranks were lost" if values["lost"] else change
    if event.kind == "notice":
        when = "" if values["seconds"] is None else f" in {values['seconds']:.0f} s"
        does = {"leave": "ranks leave it", "move": "ranks save", "save": "ranks save"}
        what = does.get(values["answer"], "nothing can be saved")
        return f"{values['host'] or 'the node of the driver'} will go{when}, {what}"
    return str(values["outcome"])
