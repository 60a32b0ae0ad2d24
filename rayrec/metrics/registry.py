"""Metrics by name, as run files and tasks say them: recall@10, ndcg@10, gauc@user."""

from __future__ import annotations

from rayrec.errors import ConfigError
from rayrec.metrics.gauc import Gauc
from rayrec.metrics.metric import Metric, TopK
from rayrec.spec.task import Task


def metric_named(name: str, task: Task) -> Metric:
    """Return the metric of a name such as "recall@10".

    Raises:
        ConfigError: no metric has this name, or it is of another kind of tasks.
    """
    kind, _, of = name.partition("@")
    if kind == "gauc" and of and task.kind == "binary":
        return Gauc(of)
    if kind in ("recall", "ndcg") and of.isdecimal() and int(of) > 0 and task.kind == "multiclass":
        return TopK(kind, int(of))
    raise ConfigError(
        f"task {task.name!r} has metric {name!r}, which a {task.kind} task has not: recall@K and "
        "ndcg@K are of multiclass tasks, with a whole K above 0, and gauc@COLUMN of binary ones. "
        "The usual metrics of a task are always there; of your own, give a rayrec.metrics.Metric."
    )
