"""One training run of `benchmarks.quality`: a click model, an optimizer for each part, a schedule.

A run is scored once, after its last step, on rows that it never saw. Nothing stops it early, and no
score on the way chooses anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.quality_settings import Recipe
from rayrec.layout import ShardingPlan

if TYPE_CHECKING:
    from torch import nn

    from rayrec.data import FeatureSchema, FileDataset
    from rayrec.driver import Driver, RunConfig


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is trained where.

    Attributes:
        recipe: how the model is trained.
        ranks: 0 is one rank in this process; more are Ray actors.
        plan: a sharding kind, a plan, or "auto".
        seed: of initial values and of the order of the rows.
        options: further fields of `RunConfig`.
    """

    recipe: Recipe
    ranks: int = 0
    plan: str | ShardingPlan = "auto"
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


def schema_of(folder: Path, recipe: Recipe) -> FeatureSchema:
    """The schema of a data set with the recipe's bounds of initial values and width of tables."""
    from rayrec.data import FeatureSchema

    schema = FeatureSchema.from_json((folder / "schema.json").read_text(), "the data's schema")
    changes: dict[str, Any] = {}
    if recipe.bound is not None:
        changes = {"weight_init_min": -recipe.bound, "weight_init_max": recipe.bound}
    if recipe.dim is not None:
        changes["embedding_dim"] = recipe.dim
    tables = tuple(replace(table, **changes) for table in schema.tables)
    if recipe.tasks:
        # The first task has the label of the data, and the others have columns of their names.
        names = [task.name for task in recipe.tasks[1:]]
        return replace(schema, tables=tables, label=(*schema.labels, *names))
    return replace(schema, tables=tables)


@dataclass(frozen=True)
class Outputs:
    """A DLRM with the outputs of several tasks; calling it builds the module.

    Attributes:
        means: of the labels; the last layer starts from those of the regressions.
    """

    recipe: Recipe
    schema: FeatureSchema
    means: Sequence[float]

    def __call__(self) -> nn.Module:
        from torch import nn

        from rayrec.models import DLRM, MultiTaskTrain
        from rayrec.modules import EmbeddingBagCollection

        recipe, tasks = self.recipe, self.recipe.tasks
        tables = self.schema.embedding_bag_configs()
        rows = EmbeddingBagCollection(tables=tables, device="meta")
        over = [*recipe.over_layers, len(tasks)]
        dense = [*recipe.dense_layers, tables[0].embedding_dim]
        model = DLRM(rows, len(self.schema.dense), dense, over)
        last = [layer for layer in model.over_arch.modules() if isinstance(layer, nn.Linear)][-1]
        for place, (task, mean) in enumerate(zip(tasks, self.means, strict=True)):
            if task.kind == "regression":
                nn.init.constant_(last.bias[place : place + 1], mean)
        return MultiTaskTrain(model, tasks)


def model_of(data: FileDataset, recipe: Recipe) -> Callable[[], nn.Module]:
    """What builds the recipe's model for the data."""
    from rayrec.recipe import ModelRecipe

    if recipe.tasks:
        labels = pq.read_table(data.path, columns=list(data.schema.labels))
        means = [float(pc.mean(labels[name]).as_py()) for name in data.schema.labels]
        return Outputs(recipe, data.schema, means)
    return ModelRecipe(
        model=recipe.model,
        schema=data.schema.to_json(),
        dense_layers=recipe.dense_layers,
        over_layers=recipe.over_layers,
        init_bound=None,  # the schema has the recipe's
    )


def run_config(trial: Trial, rows: int) -> RunConfig:
    """The run's options: the learning rates fall over all steps by the recipe's schedules."""
    from rayrec.driver import RunConfig
    from rayrec.optim import schedule

    recipe = trial.recipe
    steps = recipe.epochs * -(-rows // recipe.batch)
    dense = schedule(steps, warmup=recipe.warmup, decay=recipe.decay)
    tables = schedule(steps, warmup=recipe.warmup, decay=recipe.tables_decay or recipe.decay)
    return RunConfig(
        global_batch_size=recipe.batch,
        epochs=recipe.epochs,
        seed=trial.seed,
        sparse_optimizer=recipe.tables,
        dense_optimizer=recipe.dense,
        sparse_schedule=tables,
        dense_schedule=dense,
        tasks=recipe.tasks,
        progress="off",
        **trial.options,
    )


def driver_of(folder: Path, trial: Trial, train: str = "train", held_out: str = "eval") -> Driver:
    """The driver of a trial on the data set in `folder`.

    Args:
        train, held_out: the parts of the data set to train on and to score.
    """
    from rayrec.driver import Driver, ScalingConfig
    from rayrec.runs.inputs import open_data

    recipe, schema = trial.recipe, schema_of(folder, trial.recipe).to_json()
    data = open_data(str(folder / train), schema)
    return Driver(
        model_of(data, recipe),
        data,
        ScalingConfig(num_workers=trial.ranks),
        run_config(trial, data.num_rows),
        eval_data=open_data(str(folder / held_out), schema),
        plan=trial.plan,
    )


def scores_of(
    folder: Path, trial: Trial, train: str = "train", held_out: str = "eval"
) -> dict[str, float]:
    """Train and score.

    Returns:
        the scores on the held-out rows by name; "train_loss", the loss of the last steps; and
        "seconds", which training took.
    """
    start = time.perf_counter()
    result = driver_of(folder, trial, train, held_out).fit()
    # Of several tasks the first one counts.
    first = f"{trial.recipe.tasks[0].name}/" if trial.recipe.tasks else ""
    scores = {name.removeprefix(first): float(value) for name, value in result.metrics.items()}
    loss = {} if result.train_loss is None else {"train_loss": float(result.train_loss)}
    return scores | loss | {"seconds": time.perf_counter() - start}
