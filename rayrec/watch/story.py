"""How a run went, in words and figures for people, made of its events."""

from __future__ import annotations

from datetime import UTC, datetime
from statistics import median

from rayrec.layout.units import format_count
from rayrec.train.config import ENDLESS
from rayrec.train.events import Noticed, Recovered, Resized, StreamProgress
from rayrec.watch.events import RunEvent, RunEvents
from rayrec.watch.numbers import mean_of_windows, only_scores

# the driver says these on the terminal; the page says the same
SAID = {"recovery": Recovered, "resize": Resized, "notice": Noticed, "stream": StreamProgress}


def _outcome(run: RunEvents) -> str:
    """Return how the newest life ended; one without an end still trains or was killed."""
    last = run.events[-1]
    return str(last.values["outcome"]) if last.kind == "end" else "runs, or was killed"


def _of(steps: int) -> str:
    """Return how many steps a run has in all; a stream has no end."""
    return "" if steps >= ENDLESS else f" of {steps:,}"


def facts_of(run: RunEvents) -> dict[str, str]:
    """Return how a run went, by names for people."""
    start, windows = run.start, run.of("window")
    facts = {
        "outcome": _outcome(run),
        "steps": f"{max(e.step for e in run.kept):,}{_of(start.values['steps'])}",
        "ranks": str(start.values["world_size"]),
        "lives": str(start.life + 1),
        "began (UTC)": clock(run.events[0].at),
        "trained for": _span(trained_s(run)),
        "took": _span(_lasted_s(run)),
    }
    speeds = [w.values["rows_per_s"] for w in windows if w.values["rows_per_s"] is not None]
    if speeds:
        facts["rows/s, median"] = format_count(median(speeds))
    losses = [w.values["loss"] for w in windows if w.values["loss"] is not None]
    if losses:
        facts["last loss"] = f"{losses[-1]:.5f}"
    evaluations = [e for e in run.of("evaluation") if e.values["window"] is None]
    # a run that goes on at the start of a window tells of it once more
    scored = {e.values["window"]: (e.step, e.values["scores"]) for e in run.of("evaluation")}
    scored.pop(None, None)
    if scored:
        words, means = mean_of_windows([*scored.values()])
        shown = [f"{name} {value:.4f}" for name, value in means.items()]
        facts[words] = ", ".join(shown[:4])
    if evaluations:
        scores = only_scores(evaluations[-1].values["scores"]).items()
        shown = [f"{score} {value:.4f}" for score, value in scores]
        facts["last evaluation"] = ", ".join(shown[:4])
    return facts


def words_of(event: RunEvent) -> str:
    """Return an event other than a window as words."""
    values = event.values
    if event.kind in SAID:
        return str(SAID[event.kind](step=event.step, **values))
    if event.kind == "start":
        verb = "continued" if event.step else "started"
        return f"{verb} on {values['world_size']} ranks with rayrec {values['rayrec']}"
    if event.kind == "evaluation":
        scores = [f"{n} {v:.5g}" for n, v in only_scores(values["scores"]).items()]
        window = "" if values["window"] is None else f"window {values['window']}: "
        return f"{window}{', '.join(scores)}, of {values['rows']:,} rows"
    if event.kind == "checkpoint":
        return f"{'best so far, ' if values['best'] else ''}{values['path']}"
    if event.kind == "failure":
        where = "" if values["rank"] is None else f"rank {values['rank']} on {values['host']}: "
        return f"{where}{values['cause']}"
    return str(values["outcome"])


def clock(at: float) -> str:
    """Return seconds since 1970 as a date and a time, or as they are where no date is."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{at:g} s"


def trained_s(run: RunEvents) -> float:
    """Seconds of the kept windows, as a result counts them: without the making of tables,
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
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{seconds / 60:.1f} min"
