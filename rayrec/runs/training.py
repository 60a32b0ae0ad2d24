"""Training of a click model on rows in files, as `rayrec train` does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rayrec.errors import ConfigError
from rayrec.layout.schema import FeatureSchema
from rayrec.recipe import SEVERAL_TASKS, ModelRecipe
from rayrec.runs.inputs import open_data
from rayrec.runs.reporting import (
    Reporting,
    ResultReport,
    fit_and_report,
    part_of,
    scores_beside_truth,
    scores_lines,
    truth_beside,
)
from rayrec.watch.numbers import mean_of_windows

if TYPE_CHECKING:
    from rayrec.data import FileDataset
    from rayrec.data.windows import TimeWindows
    from rayrec.driver import Result, RunConfig, ScalingConfig
    from rayrec.metrics import PlantedScores
    from rayrec.planner import ParameterConstraints
    from rayrec.spec.task import Task
    from rayrec.streams import StreamConfig, StreamDataset


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRun:
    """Training run on rows in files.

    Attributes:
        run, scaling: options of the run and of its ranks.
        train: folder, file or URI of the rows.
        schema_source: name of the schema in messages.
        plan: "auto", a sharding kind, or a plan's JSON file.
        topology: JSON file of a calibrated topology, or None.
        constraints: limits on the planner's choice, by table.
    """

    run: RunConfig
    scaling: ScalingConfig
    train: str
    schema_source: str
    plan: str = "auto"
    topology: str | None = None
    constraints: Mapping[str, ParameterConstraints] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ClickRun(FileRun):
    """Training run of a click model.

    Attributes:
        recipe: recipe of the model, with the text of the schema.
        eval: as `train`, of the rows to score; None scores none.
        where, eval_where: filters of the rows; None takes all.
        num_streams, windows, stream: see `DataSection`.
    """

    recipe: ModelRecipe
    eval: str | None
    where: str | None = None
    eval_where: str | None = None
    num_streams: int | None = None
    windows: TimeWindows | None = None
    stream: StreamConfig | None = None


def train_clicks(click_run: ClickRun, reporting: Reporting) -> None:
    """Open the data, train, score, and report.

    Raises:
        RayrecError, RunInterrupted: the errors of `Driver.fit`.
        ConfigError: the run has tasks that its model does not predict.
    """
    from rayrec.driver import Driver

    source = click_run.schema_source
    recipe = _with_tasks(click_run.recipe, click_run.run.tasks, source)
    train = _training_data(click_run, recipe.schema)
    held_out = None
    if click_run.eval is not None:
        held_out = open_data(click_run.eval, recipe.schema, source, click_run.eval_where)
    truth = truth_beside(click_run.eval, click_run.eval_where)
    of_windows = None if click_run.windows is None else truth_beside(click_run.train)
    # The recipe travels in every checkpoint, so that whoever scores it can build the model.
    run = replace(click_run.run, extras={**click_run.run.extras, **recipe.to_extras()})
    driver = Driver(
        recipe,
        train,
        click_run.scaling,
        run,
        eval_data=held_out,
        plan=click_run.plan,
        constraints=click_run.constraints,
        topology=click_run.topology,
    )
    fit_and_report(driver, reporting, lambda result: _told(click_run, truth, of_windows, result))


def _training_data(click_run: ClickRun, schema: str) -> FileDataset | StreamDataset:
    """Return the rows to train on: files, windows of them, or a stream."""
    from rayrec.data import WindowedDataset
    from rayrec.streams import StreamDataset

    source, streams = click_run.schema_source, click_run.num_streams
    if click_run.stream is not None:
        return StreamDataset(
            config=click_run.stream,
            schema=FeatureSchema.from_json(schema, source),
            num_streams=8 if streams is None else streams,
        )
    train = open_data(click_run.train, schema, source, click_run.where, num_streams=streams)
    if click_run.windows is not None:
        return WindowedDataset(train, click_run.windows)
    return train


def _with_tasks(recipe: ModelRecipe, tasks: Sequence[Task], source: str) -> ModelRecipe:
    """Return the recipe with the tasks of the run, if it is of a model of several tasks.

    Raises:
        ConfigError: the model does not predict them, or the schema has not as many labels.
    """
    names = [task.name for task in tasks]
    if recipe.model not in SEVERAL_TASKS:
        if len(tasks) > 1 or any(task.kind != "binary" for task in tasks):
            raise ConfigError(
                f"the run has tasks={names}, and model {recipe.model!r} predicts one binary task. "
                f"Leave the others out, or train {' or '.join(SEVERAL_TASKS)}, or a model of "
                "yours with the Python API (rayrec.models.MultiTaskTrain)."
            )
        return recipe
    # what the model is made of goes into its checkpoints; further scores are the run's
    whole = replace(recipe, tasks=tuple(replace(task, metrics=()) for task in tasks))
    whole.check_tasks()
    labels = FeatureSchema.from_json(recipe.schema, source).labels
    if len(tasks) != len(labels):
        raise ConfigError(
            f"the run has tasks={names}, and {source} has the labels {list(labels)}; give one "
            "task for each label, in their order."
        )
    return whole


def _told(
    click_run: ClickRun,
    truth: PlantedScores | None,
    of_windows: PlantedScores | None,
    result: Result,
) -> ResultReport:
    scores = scores_beside_truth(result.metrics, truth)
    loss = "" if result.train_loss is None else f", train loss {result.train_loss:.5f}"
    scored = []
    for one in result.evaluations:
        if one.window is not None:
            part = None
            if click_run.windows is not None and click_run.windows.size == 1:
                # the truth tells of single values of a column, such as days
                part = part_of(of_windows, f"`{click_run.windows.column}` == {one.window}")
            scored.append((one, scores_beside_truth(one.scores, part)))
    lines = [f"evaluation: {line}" for line in scores_lines(scores)]
    if scored:
        words, means = mean_of_windows([(one.step, beside) for one, beside in scored])
        lines += [f"{words}: {mean}" for mean in scores_lines(means)]
    fields = {
        "plan": {table: result.plan.kind(table) for table in result.plan.tables},
        "eval": scores,
        "model": click_run.recipe.model,
        "global_batch": click_run.run.global_batch_size,
    }
    if scored:
        fields["windows"] = [
            {"window": one.window, "rows": one.rows, **beside} for one, beside in scored
        ]
    return ResultReport(
        done=f"{result.rows} rows, {result.rows_per_s:,.0f} rows/s{loss}",
        lines=lines,
        fields=fields,
    )
