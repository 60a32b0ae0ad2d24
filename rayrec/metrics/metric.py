"""`Metric`: a score from sums over rows, so that ranks, windows and days merge by adding.

A metric object holds no data. It makes a state, adds rows to a state, and turns a state into
scores; states of any parts of the rows, added up, must be the state of all rows. That lets ranks
merge by one all_reduce, whatever the metric counts. `check_mergeable` tries it on random rows.

A metric may also see columns of the data, such as the user or the segment of a row. Where it needs
all rows of a user at once, rows are kept and brought together before it counts them, and then the
parts whose states add up are whole users.

    # B rows, C classes
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rayrec.errors import ConfigError
from rayrec.metrics.binary import STATE_SIZE, BinaryMetrics

PROBE_ROWS = 24  # random rows that `check_mergeable` adds up


class Metric(ABC):
    """Base of metrics; a user's own subclasses it and gives it to `Task(metrics=(...))`.

    Attributes:
        columns: names of the columns that `add` is given too, each (B,) int64: `groups` of the
            schema, or features with one id in each row.
        whole_groups: True if `add` needs all rows of a group of the first of `columns` at once.
            They are kept until scores are merged, and then each group is on one rank.
    """

    columns: tuple[str, ...] = ()
    whole_groups: bool = False

    @abstractmethod
    def start(self, device: torch.device) -> Tensor:
        """Return the state of no rows: (S,) float64 or int64 zeros on the device."""

    @abstractmethod
    def add(
        self, state: Tensor, predictions: Tensor, labels: Tensor, *columns: Any, **_: Any
    ) -> None:
        """Add rows to a state, in place and without waiting for the device.

        Args:
            state: tensor that `start` made, with the rows until now.
            predictions: (B,) logits of a binary task, (B,) predictions of a regression, (B, C)
                logits of a multiclass task; float, detached.
            labels: (B,) as the batch has them.
            columns: (B,) int64 each, those of `self.columns`; a metric without any needs no such
                argument.
        """

    @abstractmethod
    def scores(self, state: Tensor) -> Mapping[str, float]:
        """Return the scores of a state by name; nan where one is not defined."""


class BinaryScoresMetric(Metric):
    """auc, ne, logloss, calibration and accuracy of clicks, as `BinaryMetrics` counts them."""

    def start(self, device: torch.device) -> Tensor:
        """(STATE_SIZE,) int64 zeros."""
        return torch.zeros(STATE_SIZE, dtype=torch.int64, device=device)

    def add(self, state: Tensor, predictions: Tensor, labels: Tensor) -> None:
        """Count rows by label and by bin of their logit."""
        BinaryMetrics.over(state).update(predictions, labels)

    def scores(self, state: Tensor) -> Mapping[str, float]:
        """Return the fields of `BinaryScores` by name."""
        return BinaryMetrics.over(state).compute().to_dict()


class SquaredError(Metric):
    """mse, rmse and mae of a regression."""

    def start(self, device: torch.device) -> Tensor:
        """(3,): rows, squares, absolutes."""
        return torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, state: Tensor, predictions: Tensor, labels: Tensor) -> None:
        """Add the squared and the absolute errors of some rows."""
        error = predictions.double() - labels.double()
        state += torch.stack([torch.ones_like(error), error.square(), error.abs()]).sum(1)

    def scores(self, state: Tensor) -> Mapping[str, float]:
        """Return the mean errors and the number of rows."""
        rows, squares, absolutes = state.tolist()
        mse = _ratio(squares, rows)
        return {"rows": rows, "mse": mse, "rmse": mse**0.5, "mae": _ratio(absolutes, rows)}


class CrossEntropy(Metric):
    """cross_entropy (nats) and accuracy of a multiclass task; ties go to the smallest class."""

    def start(self, device: torch.device) -> Tensor:
        """(3,): rows, losses, right."""
        return torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, state: Tensor, predictions: Tensor, labels: Tensor) -> None:
        """Add the losses of some rows, and the number of those predicted right."""
        own = labels.long()
        losses = torch.nn.functional.cross_entropy(predictions.double(), own, reduction="none")
        right = (predictions.argmax(1) == own).double()
        state += torch.stack([torch.ones_like(losses), losses, right]).sum(1)

    def scores(self, state: Tensor) -> Mapping[str, float]:
        """Return the mean loss, the share of rows predicted right and the number of rows."""
        rows, losses, right = state.tolist()
        return {
            "rows": rows,
            "cross_entropy": _ratio(losses, rows),
            "accuracy": _ratio(right, rows),
        }


class TopK(Metric):
    """recall@k or ndcg@k of a multiclass task, whose label is the one relevant class of a row.

    Args:
        kind: "recall" or "ndcg".
        k: length of the list. Classes of equal logits stand before the label's own.
    """

    def __init__(self, kind: str, k: int) -> None:
        self.kind, self.k = kind, k

    def start(self, device: torch.device) -> Tensor:
        """(2,): rows, gains."""
        return torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, state: Tensor, predictions: Tensor, labels: Tensor) -> None:
        """Add the gain of each row whose class is among the first k."""
        own = predictions.gather(1, labels.long().unsqueeze(1))
        # from 1 on; a logit that is no number counts as above: a model that has diverged finds
        # nothing
        place = (~(predictions < own)).sum(1)
        gain = torch.ones_like(place, dtype=torch.float64)
        if self.kind == "ndcg":
            gain = 1.0 / (place.double() + 1).log2()
        state += torch.stack([torch.ones_like(gain), gain * (place <= self.k)]).sum(1)

    def scores(self, state: Tensor) -> Mapping[str, float]:
        """Return the mean gain of a row under "kind@k"."""
        rows, gains = state.tolist()
        return {f"{self.kind}@{self.k}": _ratio(gains, rows)}


def check_mergeable(metric: Metric, outputs: int, classes: int | None) -> Mapping[str, float]:
    """Check on random rows that the states of two halves add up to the state of the whole.

    Args:
        outputs: logits of a row.
        classes: number of classes of a multiclass task, else None.
    Returns:
        The scores of the random rows.
    Raises:
        ConfigError: the state has another form, or parts do not add up to the whole.
    """
    name = type(metric).__name__
    if metric.whole_groups and not metric.columns:
        raise ConfigError(
            f"metric {name} has whole_groups and no columns; name that of the groups."
        )
    random = torch.Generator().manual_seed(0)
    shape = (PROBE_ROWS,) if classes is None else (PROBE_ROWS, outputs)
    predictions = torch.randn(shape, generator=random)
    labels = torch.randint(0, classes or 2, (PROBE_ROWS,), generator=random).float()
    columns = [torch.randint(0, 5, (PROBE_ROWS,), generator=random) for _ in metric.columns]
    whole = metric.start(torch.device("cpu"))
    if whole.dim() != 1 or whole.dtype not in (torch.float64, torch.int64) or whole.any():
        raise ConfigError(
            f"metric {name}: start() must give (S,) zeros of float64 or int64, not "
            f"{tuple(whole.shape)} {whole.dtype}."
        )
    metric.add(whole, predictions, labels, *columns)
    parts = torch.zeros_like(whole)
    first = columns[0] < 2 if metric.whole_groups else torch.arange(PROBE_ROWS) < 7
    for at in (first, ~first):
        part = metric.start(torch.device("cpu"))
        metric.add(part, predictions[at], labels[at], *(column[at] for column in columns))
        parts += part
    if not torch.allclose(parts.double(), whole.double(), rtol=1e-6, equal_nan=True):
        raise ConfigError(
            f"metric {name} cannot be merged: the states of two parts of some rows do not add up "
            "to the state of all of them. Keep sums over rows in the state, and divide in scores()."
        )
    return metric.scores(whole)


def _ratio(total: float, rows: float) -> float:
    return total / rows if rows else float("nan")
