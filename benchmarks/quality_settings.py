"""The settings of `benchmarks.quality`: one recipe for the planted data, the same with another
optimizer of the tables for each optimizer, and one for MovieLens-100k.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rayrec.train.config import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained.

    Attributes:
        tables, dense: the optimizers of the tables and of all other parameters.
        batch: rows of a step over all ranks.
        warmup, decay: of both learning rates, see `rayrec.optim.schedule`.
        bound: initial values of the tables lie within +- this; None takes the tables' own.
        dim: columns of every table; None takes the schema's.
    """

    tables: OptimizerConfig
    dense: OptimizerConfig
    batch: int
    epochs: int = 1
    warmup: int = 0
    decay: Literal["constant", "linear", "cosine"] = "linear"
    bound: float | None = None
    dim: int | None = None
    model: Literal["dlrm", "dcn"] = "dlrm"
    dense_layers: tuple[int, ...] = (64,)
    over_layers: tuple[int, ...] = (64, 32)


PLANTED = Recipe(
    tables=OptimizerConfig(name="rowwise_adagrad", lr=0.4),
    dense=OptimizerConfig(name="adam", lr=3e-3),
    batch=1024,
    bound=0.5,
)

OPTIMIZERS = {
    "sgd": OptimizerConfig(name="sgd", lr=400.0),
    "adagrad": OptimizerConfig(name="adagrad", lr=0.4, options={"eps": 1e-4}),
    "rowwise_adagrad": PLANTED.tables,
    "rmsprop": OptimizerConfig(name="rmsprop", lr=2e-2),
    "adam": OptimizerConfig(name="adam", lr=1.6e-2),
    "partial_rowwise_adam": OptimizerConfig(name="partial_rowwise_adam", lr=1.6e-2),
    "lamb": OptimizerConfig(name="lamb", lr=1.5e-2),
    "lars_sgd": OptimizerConfig(name="lars_sgd", lr=6.0),
}

FILMS = Recipe(
    tables=OptimizerConfig(name="adagrad", lr=0.05, options={"weight_decay": 7e-4}),
    dense=OptimizerConfig(name="adam", lr=4e-3),
    batch=1024,
    epochs=5,
    decay="linear",
    bound=0.01,
)


def recipe_of(optimizer: str) -> Recipe:
    """The recipe of the planted data with the tables trained by `optimizer`."""
    return replace(PLANTED, tables=OPTIMIZERS[optimizer])
