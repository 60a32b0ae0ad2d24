"""The outcome of a campaign as a JSON file, written and read."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rayrec.chaos.account import RunRecord
from rayrec.chaos.campaign import Outcome
from rayrec.fields.reading import read_record
from rayrec.storage import probe_output, write_whole

WHAT = "the outcome (--out)"


def check_out(path: str | None) -> None:
    """Check that the file can be written, before hours are spent.

    Raises:
        ConfigError: the file cannot be written.
    """
    probe_output(WHAT, path)


def write_out(path: str | None, outcome: Outcome) -> None:
    """Write the file, whole or not at all; does nothing without a path.

    Raises:
        ConfigError: it cannot be written.
    """
    if path is not None:
        write_whole(WHAT, path, json.dumps(as_json(outcome), indent=1) + "\n")


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome as JSON data."""
    expected = outcome.calm.digests
    runs = [{**asdict(run), "verdict": run.verdict(expected)} for run in outcome.runs]
    told = {"good": outcome.is_good, "kinds": outcome.kinds, "calm": asdict(outcome.calm)}
    return {**told, "runs": runs}


def read_out(path: str) -> Outcome:
    """Read the outcome that `write_out` wrote."""
    told = json.loads(Path(path).read_text())
    runs = tuple(_run(run) for run in told["runs"])
    return Outcome(calm=_run(told["calm"]), runs=runs, kinds=tuple(told["kinds"]))


def _run(told: dict[str, Any]) -> RunRecord:
    told.pop("verdict", None)
    run: RunRecord = read_record(RunRecord, told)
    return run
