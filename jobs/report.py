"""What a job prints and writes at its end: scores beside the truth, times of the start-up, a JSON
file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrec.storage import write_whole
from rayrec.train.profile_page import Profile
from rayrec.train.progress import Milestone

if TYPE_CHECKING:
    from rayrec.metrics import PlantedScores


def write_result(path: str | None, result: Mapping[str, Any]) -> None:
    """Write the result as JSON, whole or not at all; does nothing without a path.

    Raises:
        ConfigError: it cannot be written.
    """
    if path is not None:
        write_whole("the result (--result)", path, json.dumps(_finite(result), indent=1))


def truth_beside(eval_path: str | None) -> PlantedScores | None:
    """The truth.json beside evaluation data, or None; to be read before training, which it may not
    cost.

    Raises:
        ConfigError: the file cannot be read as one.
    """
    from rayrec.metrics import PlantedScores

    path = Path(eval_path or "").parent / "truth.json"
    return PlantedScores.load(path) if eval_path and os.path.isfile(path) else None


def scores_beside_truth(
    metrics: Mapping[str, float], truth: PlantedScores | None
) -> dict[str, float]:
    """Metrics as they are, with bayes_auc and regret when the truth is of as many rows."""
    scores = dict(metrics)
    if truth is not None and truth.rows == scores.get("rows"):
        scores |= {
            "bayes_auc": truth.bayes_auc,
            "bayes_ne": truth.bayes_ne,
            "regret": truth.bayes_auc - scores["auc"],
        }
    return scores


def scores_line(scores: Mapping[str, float]) -> str:
    """Scores on one line."""
    order = ("auc", "bayes_auc", "regret", "ne", "logloss", "calibration", "rows")
    return "  ".join(
        f"{name} {scores[name]:.5f}" if name != "rows" else f"rows {scores[name]:.0f}"
        for name in order
        if name in scores
    )


def process_start() -> float:
    """When this process began, in seconds of the wall clock; now, where the system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        since_boot = ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
    except (OSError, ValueError, AttributeError):
        return time.time()


def seconds_by_part(timing: Sequence[Milestone]) -> dict[str, float]:
    """Seconds from each milestone to the next, by the name of the later one."""
    ordered = sorted(timing, key=lambda milestone: milestone.at)
    return {b.name: round(b.at - a.at, 3) for a, b in pairwise(ordered)}


def timing_table(timing: Sequence[Milestone]) -> str:
    """The parts of a start-up, one a line, with their sum."""
    parts = seconds_by_part(timing)
    lines = [f"  {name:<24}{seconds:7.2f} s" for name, seconds in parts.items()]
    return "\n".join(
        ["start-up, by part:", *lines, f"  {'to the first step':<24}{sum(parts.values()):7.2f} s"]
    )


def print_profile(profile: Profile | None) -> None:
    """Show the page of a profile, if there is one, and where it lies."""
    if profile is not None:
        print(f"{profile.text()}\nprofile: {profile.folder}")


def _finite(value: Any) -> Any:
    """JSON has no nan: such scores become null."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return (
        None
        if isinstance(value, float) and (value != value or abs(value) == float("inf"))
        else value
    )
