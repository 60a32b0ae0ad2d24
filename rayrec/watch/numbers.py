"""The numbers of an event by name, for trackers and pages that draw one curve for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

# told beside scores: how many rows were scored, and the bound of the error of an AUC
BESIDE_SCORES = ("rows", "auc_error")


def numbers_of(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Return train/loss, eval/auc, windows/auc, speed/rows_per_s, learning_rate/dense and so on.

    Ranks are told by their largest and their mean value, so that a thousand of them are no thousand
    curves. Numbers that are not finite are left out.
    """
    named: dict[str, Any] = {}
    if kind == "window":
        for field, name in (("loss", "train"), ("rows", "train"), ("rows_per_s", "speed")):
            named[f"{name}/{field}"] = values[field]
        named |= {f"train/{name}": score for name, score in train_scores(values).items()}
        for field, name in (("learning_rates", "learning_rate"), ("step_s", "step_s")):
            named |= {f"{name}/{part}": value for part, value in values[field].items()}
        for field in ("data_wait", "memory_bytes"):
            ranks = [value for value in values[field] if value is not None]
            if ranks:
                named |= {f"{field}/max": max(ranks), f"{field}/mean": sum(ranks) / len(ranks)}
        for table, counts in values["ids"].items():
            named |= {f"ids/{table}/{name}": value for name, value in _id_numbers(counts).items()}
    elif kind == "evaluation":
        prefix = "eval" if values["window"] is None else "windows"
        named = {f"{prefix}/{name}": value for name, value in only_scores(values["scores"]).items()}
        named[f"{prefix}/seconds"] = values["seconds"]
    elif kind == "stream":
        named = {"best/auc": values["best_auc"]}
    elif kind == "checkpoint":
        named = {"checkpoint/seconds": values["seconds"]}
    return finite(named)


def _id_numbers(counts: Mapping[str, int]) -> dict[str, float]:
    """The counts of a dynamic table in a window, and the shares that they say."""
    shares = (("fill", "held", "rows"), ("unknown_share", "unknown", "looked_up"))
    found: dict[str, float] = dict(counts)
    for share, part, whole in shares:
        if counts.get(whole):
            found[share] = counts[part] / counts[whole]
    return found


def train_scores(window: Mapping[str, Any]) -> dict[str, float]:
    """The scores of a window's rows by name, auc and ne among them, where they are defined."""
    return only_scores({"auc": window["auc"], "ne": window["ne"], **window["scores"]})


def only_scores(named: Mapping[str, Any]) -> dict[str, float]:
    """The scores that are finite, without what is only told beside them; of several tasks, too."""
    scores = {n: value for n, value in named.items() if n.split("/")[-1] not in BESIDE_SCORES}
    return finite(scores)


def mean_of_windows(
    scored: Sequence[tuple[int, Mapping[str, Any]]],
) -> tuple[str, dict[str, float]]:
    """Return the words for the mean of windows in time, and the mean of each score.

    The one that a new model was scored on, of which it knew nothing, is left out of several.

    Args:
        scored: the step after which each was scored, and its scores.
    """
    later = [scores for step, scores in scored if step] or [scores for _, scores in scored]
    told: dict[str, list[float]] = {}
    for scores in later:
        for name, value in only_scores(scores).items():
            told.setdefault(name, []).append(value)
    words = f"mean of {len(scored)} windows"
    words += ", the first left out" if len(later) < len(scored) else ""
    return words, {name: fmean(values) for name, values in told.items()}


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a mapping that are finite."""
    return {
        name: float(value)
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    }
