"""`Task`: one thing that a model predicts, as plain data that models, losses and scores read alike.

Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields

TaskKind = Literal["binary", "multiclass", "regression"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One thing that a model predicts.

    Attributes:
        name: name of its logits and labels in the model's output, and of its scores: "click/auc".
        kind: "binary" has one logit a row and labels 0 and 1; "multiclass" has one logit per class
            and labels that number the classes; "regression" predicts the label itself.
        weight: factor of its loss in the sum over tasks; `rayrec.models.MultiTaskTrain` reads it.
        classes: number of classes of a multiclass task.
        metrics: further scores: "recall@10" or "ndcg@10" of a multiclass task, "gauc@user" of a
            binary one and a column of users, or a `rayrec.metrics.Metric` of the user's own. The
            usual ones of its kind are always there: auc, ne, logloss, calibration and accuracy;
            cross_entropy and accuracy; mse, rmse and mae.
    Raises:
        ConfigError: an option is unknown, or does not fit the kind.
    """

    name: str
    kind: TaskKind = "binary"
    weight: float = 1.0
    classes: int | None = None
    metrics: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.name or "/" in self.name:
            raise ConfigError(f"Task(name={self.name!r}): give it a name without a slash.")
        if not 0 <= self.weight < math.inf:
            raise ConfigError(f"Task(weight={self.weight}): it must be finite, and zero or more.")
        if (self.classes is None) == (self.kind == "multiclass"):
            raise ConfigError(
                f"Task(kind={self.kind!r}, classes={self.classes}): a multiclass task needs "
                "classes=..., and no other task has any."
            )
        if self.classes is not None and self.classes < 2:
            raise ConfigError(
                f"Task(classes={self.classes!r}): it must be a whole number, 2 or more."
            )

    @property
    def outputs(self) -> int:
        """Logits of one row."""
        return self.classes or 1
