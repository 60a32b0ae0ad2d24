"""What a run says of itself as flat numbers by name, for trackers that draw one curve for each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rayrec.train.events import Evaluation, ProgressReport

# told beside scores: how many rows were scored, and the bound of the error of an AUC
BESIDE_SCORES = ("rows", "auc_error")


def only_scores(named: Mapping[str, Any]) -> dict[str, float]:
    """The scores that are finite, without what is only told beside them; of several tasks, too."""
    scores = {n: value for n, value in named.items() if n.split("/")[-1] not in BESIDE_SCORES}
    return finite(scores)


def train_scores(report: ProgressReport) -> dict[str, float]:
    """The scores of a window's rows by name, auc and ne among them, where they are defined."""
    binary = {"auc": report.auc, "ne": report.ne}
    return only_scores({**binary, **report.scores})


def window_numbers(report: ProgressReport) -> dict[str, float]:
    """A window by name: train/loss, train/auc, speed/rows_per_s, learning_rate/dense and so on.

    Ranks are told by their largest and their mean value, so that a thousand of them are no thousand
    curves. Numbers that are not finite are left out.
    """
    values: dict[str, Any] = {
        "train/loss": report.loss,
        "train/rows": report.rows,
        "speed/rows_per_s": report.rows_per_s,
    }
    values |= {f"train/{name}": value for name, value in train_scores(report).items()}
    values |= {f"learning_rate/{name}": rate for name, rate in report.learning_rates.items()}
    values |= {f"step_s/{part}": seconds for part, seconds in report.step_s.items()}
    for name, ranks in (("data_wait", report.data_wait), ("memory_bytes", report.memory_bytes)):
        if ranks:
            values |= {f"{name}/max": max(ranks), f"{name}/mean": sum(ranks) / len(ranks)}
    return finite(values)


def evaluation_numbers(evaluation: Evaluation) -> dict[str, float]:
    """An evaluation by name: eval/auc and so on, and the seconds that it took."""
    scores = {f"eval/{name}": value for name, value in only_scores(evaluation.scores).items()}
    return finite({**scores, "eval/seconds": evaluation.seconds})


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a mapping that are finite."""
    return {
        name: float(value)
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    }
