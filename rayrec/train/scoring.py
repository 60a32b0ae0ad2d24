"""`Scoring`: metric counts of a model's predictions by task, merged over ranks by one sum.

A run that names no task has one binary task, whose scores have plain names such as "auc". With one
task the names are plain, too; with several, they are "click/auc".

    # B rows, T tasks, C classes, S values of all states
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rayrec.data import RowDataset
from rayrec.errors import ConfigError
from rayrec.metrics.metric import (
    BinaryScoresMetric,
    CrossEntropy,
    Metric,
    SquaredError,
    check_mergeable,
)
from rayrec.metrics.registry import metric_named
from rayrec.spec.task import Task
from rayrec.streams import StreamDataset
from rayrec.train.config import TrainData
from rayrec.train.kept_rows import KeptRows, column_of, no_column

_USUAL: dict[str, Callable[[], Metric]] = {
    "binary": BinaryScoresMetric,
    "multiclass": CrossEntropy,
    "regression": SquaredError,
}
# scores of a binary task that read a logit as the probability of a click
OF_PROBABILITIES = ("logloss", "ne", "calibration", "accuracy")
ONE_BINARY = (Task(name="click"),)
Outputs = Mapping[str, tuple[Tensor, Tensor]]


def metrics_of(task: Task) -> list[Metric]:
    """Return the metrics of a task: the usual ones of its kind, and those that it names.

    Raises:
        ConfigError: a name is not known, or does not fit the kind; or it is no metric.
    """
    found: list[Metric] = [_USUAL[task.kind]()]
    for metric in task.metrics:
        if isinstance(metric, str):
            metric = metric_named(metric, task)
        if not isinstance(metric, Metric):
            raise ConfigError(
                f"task {task.name!r} has the metric {metric!r}; give a name, or an instance of a "
                "subclass of rayrec.metrics.Metric."
            )
        found.append(metric)
    return found


def check_tasks(tasks: Sequence[Task]) -> list[str]:
    """Check tasks and their metrics before anything is started.

    Returns:
        The names of all scores of a run of these tasks.
    Raises:
        ConfigError: two tasks have one name, or a metric cannot be merged.
    """
    names = [task.name for task in tasks]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two tasks are named {twice!r}; give each its own name.")
    found: list[str] = []
    for task in tasks or ONE_BINARY:
        for metric in metrics_of(task):
            for name in check_mergeable(metric, task.outputs, task.classes):
                found.append(f"{task.name}/{name}" if len(tasks) > 1 else name)
    return found


def check_columns_of_metrics(tasks: Sequence[Task], data: TrainData | None) -> None:
    """Check before anything is started that the data have the columns that metrics read.

    Raises:
        InputError: a column is neither a group of the schema nor a feature.
    """
    if not isinstance(data, RowDataset | StreamDataset):
        return
    groups, features = data.schema.groups, data.schema.feature_names()
    for metric in (metric for task in tasks for metric in metrics_of(task)):
        for name in metric.columns:
            if name not in groups and name not in features:
                raise no_column(metric, name, "the schema", groups, features)


def by_task(tasks: Sequence[Task], logits: Any, labels: Any) -> Outputs:
    """Return the predictions and labels of every task, from a forward's output.

    Args:
        tasks: tasks of the run; none means one binary task.
        logits, labels: tensors of the one task; or mappings from the names of tasks to tensors.
    Returns:
        Name -> predictions (B,), or (B, C) of a multiclass task, and labels (B,).
    Raises:
        ConfigError: a task is missing, or a tensor has another shape.
    """
    tasks = tasks or ONE_BINARY
    if isinstance(logits, Tensor) and isinstance(labels, Tensor) and len(tasks) == 1:
        logits, labels = {tasks[0].name: logits}, {tasks[0].name: labels}
    if not isinstance(logits, Mapping) or not isinstance(labels, Mapping):
        names = ", ".join(task.name for task in tasks)
        raise ConfigError(
            f"the model returned logits as {type(logits).__name__} and labels as "
            f"{type(labels).__name__}; a run of the tasks {names} needs mappings from their names "
            "to tensors, as rayrec.models.MultiTaskTrain gives."
        )
    outputs = {}
    for task in tasks:
        if task.name not in logits or task.name not in labels:
            raise ConfigError(
                f"the model's output has no task {task.name!r}; it has {sorted(logits)}."
            )
        own, wanted = logits[task.name], labels[task.name]
        expected = wanted.shape if task.classes is None else (*wanted.shape, task.classes)
        if wanted.dim() != 1 or own.shape != expected:
            raise ConfigError(
                f"task {task.name!r}: the model returned logits {tuple(own.shape)}, labels "
                f"{tuple(wanted.shape)}; training needs labels of one value per row and logits "
                f"of {'one value' if task.classes is None else f'{task.classes} values'} per row."
            )
        outputs[task.name] = own, wanted
    return outputs


class Scoring:
    """Metric counts of one rank's predictions.

    Args:
        tasks: tasks of the run; none means one binary task.
        device: device of the predictions.
        model: trained model; one with `gives_probabilities = False` has logits that rank rows and
            give no probability of a click, so that only ranking metrics are scored.
    """

    def __init__(
        self, tasks: Sequence[Task], device: torch.device, model: nn.Module | None = None
    ) -> None:
        self._left_out = () if getattr(model, "gives_probabilities", True) else OF_PROBABILITIES
        self._metrics: list[tuple[Task, Metric, Tensor]] = []
        self._kept: dict[int, KeptRows] = {}  # by the metric's number
        self._prefixed = len(tasks) > 1
        self.tasks = tuple(tasks)
        for task in tasks or ONE_BINARY:
            for metric in metrics_of(task):
                if metric.whole_groups:
                    self._kept[len(self._metrics)] = KeptRows(task, len(metric.columns), device)
                self._metrics.append((task, metric, metric.start(device)))

    def add(self, outputs: Outputs, batch: Any) -> None:
        """Count a batch that has rows; nothing waits for the device.

        Raises:
            InputError: the batch has no column that a metric reads.
        """
        for number, (task, metric, state) in enumerate(self._metrics):
            predictions, labels = outputs[task.name]
            columns = [column_of(batch, name, len(labels), metric) for name in metric.columns]
            if number in self._kept:
                self._kept[number].add(predictions, labels, columns)
            else:
                metric.add(state, predictions, labels, *columns)

    def state(self) -> Tensor:
        """(S,) float64: all that was counted. The states of ranks add.

        All ranks call it together, once: rows that were kept go to the ranks of their groups.
        """
        for number, kept in self._kept.items():
            _, metric, state = self._metrics[number]
            metric.add(state, *kept.brought_together())
        return torch.cat([state.double() for _, _, state in self._metrics])

    def scores(self, state: Tensor) -> dict[str, float]:
        """Return the scores of a state or a sum of states, by name; nan for an undefined score.

        Raises:
            InputError: the rows hold labels or logits that a metric cannot take.
        """
        sizes = [own.numel() for _, _, own in self._metrics]
        found: dict[str, float] = {}
        parts = state.split(sizes)
        for (task, metric, own), part in zip(self._metrics, parts, strict=True):
            for name, value in metric.scores(part.to(own.dtype)).items():
                if name not in self._left_out:
                    found[f"{task.name}/{name}" if self._prefixed else name] = value
        return found


def binary_labels(tasks: Sequence[Task], data: TrainData | None) -> bool | tuple[str, ...]:
    """Return the loader's `binary_labels`: the label columns that must hold 0 and 1 alone.

    Tasks and label columns go together by their places; the names of tasks are the user's own.
    """
    if not tasks:
        return True
    if len(tasks) == 1 or not isinstance(data, RowDataset | StreamDataset):
        return tasks[0].kind == "binary"
    labels = zip(tasks, data.schema.labels, strict=False)
    return tuple(label for task, label in labels if task.kind == "binary")


def first_of(scores: Mapping[str, float], name: str) -> float | None:
    """Return a score by its plain name, of the first task that has it; None where undefined."""
    for key, value in scores.items():
        if key.rpartition("/")[2] == name:
            return value if math.isfinite(value) else None
    return None
