"""The settings of `benchmarks.quality`: one recipe for the planted data, the same with another
optimizer of the tables for each optimizer, and one for MovieLens-100k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from rayrec.spec.task import Task
from rayrec.train.optimizer_config import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained.

    Attributes:
        tables, dense: the optimizers of the tables and of all other parameters.
        batch: rows of a step over all ranks.
        warmup, decay: of both learning rates, see `rayrec.optim.schedule`.
        tables_decay: of the tables alone; None takes `decay`.
        bound: initial values of the tables lie within +- this; None takes the tables' own.
        dim: columns of every table; None takes the schema's.
        tasks: of a model with several outputs; none means one binary task.
    """

    tables: OptimizerConfig
    dense: OptimizerConfig
    batch: int
    epochs: int = 1
    warmup: int = 0
    decay: Literal["constant", "linear", "cosine"] = "linear"
    tables_decay: Literal["constant", "linear", "cosine"] | None = None
    bound: float | None = None
    dim: int | None = None
    tasks: tuple[Task, ...] = ()
    model: Literal["dlrm", "dcn"] = "dlrm"
    dense_layers: tuple[int, ...] = (64,)
    over_layers: tuple[int, ...] = (64, 32)


PLANTED = Recipe(
    tables=OptimizerConfig(name="rowwise_adagrad", lr=0.4),
    dense=OptimizerConfig(name="adam", lr=3e-3),
    batch=1024,
    bound=0.5,
)


def _with(name: str, lr: float, options: Mapping[str, float] = {}, **changes: Any) -> Recipe:
    """The recipe of the planted data with another optimizer of the tables."""
    tables = OptimizerConfig(name=name, lr=lr, options=dict(options))
    return replace(PLANTED, tables=tables, **changes)


OPTIMIZERS = {
    # A gradient of SGD is as small as its id is rare, so rare ids need more steps.
    "sgd": _with("sgd", 400.0, epochs=2),
    "adagrad": _with("adagrad", 0.4, {"eps": 1e-4}),
    "rowwise_adagrad": PLANTED,
    "rmsprop": _with("rmsprop", 2e-2),
    "adam": _with("adam", 1.6e-2),
    "partial_rowwise_adam": _with("partial_rowwise_adam", 1.6e-2),
    "lamb": _with("lamb", 1.5e-2),
    # LARS gives every row a step of the same relative length. One sample's gradient then counts by
    # its sign alone, which is not the sign of the mean; large batches average before that.
    "lars_sgd": _with(
        "lars_sgd", 8.0, batch=16384, epochs=4, dense=OptimizerConfig(name="adam", lr=1.2e-2)
    ),
}

FILMS = Recipe(
    tables=OptimizerConfig(name="adagrad", lr=0.05, options={"weight_decay": 7e-4}),
    dense=OptimizerConfig(name="adam", lr=4e-3),
    batch=1024,
    epochs=5,
    decay="linear",
    bound=0.01,
    # How many stars a film gets says more than whether it gets four.
    tasks=(Task(name="like"), Task(name="rating", kind="regression", weight=1.0)),
)
