"""The outcome of a campaign as a JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from rayrec.chaos.campaign import Outcome
from rayrec.storage import probe_output, write_whole

WHAT = "the outcome (--out)"


def check_out(path: str | None) -> None:
    """See that the file can be written, before hours are spent.

    Raises:
        ConfigError: it cannot.
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
    """The outcome as JSON data."""
    expected = outcome.calm.digests
    runs = [{**asdict(run), "verdict": run.verdict(expected)} for run in outcome.runs]
    return {"good": outcome.is_good, "calm": asdict(outcome.calm), "runs": runs}
