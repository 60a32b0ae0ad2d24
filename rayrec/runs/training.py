"""Training of a click model on rows in files, as `rayrec train` does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
    from rayrec.driver import Result
    from rayrec.metrics import PlantedScores
    from rayrec.runs.run_file import RunFile
    from rayrec.spec.task import Task
    from rayrec.streams import StreamDataset


def train_clicks(settings: RunFile, reporting: Reporting) -> None:
    """Open the data, train, score, and report."""
    assert isinstance(settings.model, ModelRecipe)
    recipe = replace(settings.model, schema=settings.schema_text())
    said, source = settings.data, settings.needed("schema")
    recipe = _with_tasks(recipe, settings.run.tasks, source)
    train = _training_data(settings, recipe.schema)
    held_out = None
    if said.eval is not None:
        held_out = open_data(said.eval, recipe.schema, source, said.eval_where)
    truth = truth_beside(said.eval, said.eval_where)
    of_windows = None if said.windows is None else truth_beside(said.train)
    # The recipe travels in every checkpoint, so that whoever scores it can build the model.
    run = replace(settings.run, extras={**settings.run.extras, **recipe.to_extras()})
    driver = settings.driver(recipe, train, run, held_out)
    fit_and_report(driver, reporting, lambda result: _told(settings, truth, of_windows, result))


def _training_data(settings: RunFile, schema: str) -> FileDataset | StreamDataset:
    """Return the rows to train on: files, windows of them, or a stream."""
    from rayrec.data import WindowedDataset
    from rayrec.streams import StreamDataset

    said, source = settings.data, settings.needed("schema")
    if said.stream is not None:
        return StreamDataset(
            config=said.stream,
            schema=FeatureSchema.from_json(schema, source),
            num_streams=8 if said.num_streams is None else said.num_streams,
        )
    path = settings.needed("train")
    train = open_data(path, schema, source, said.where, num_streams=said.num_streams)
    if said.windows is not None:
        return WindowedDataset(train, said.windows)
    return train


def _with_tasks(recipe: ModelRecipe, tasks: Sequence[Task], source: str) -> ModelRecipe:
    """Return the recipe with the tasks of the run, if it is of a model of several tasks."""
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
    settings: RunFile, truth: PlantedScores | None, of_windows: PlantedScores | None, result: Result
) -> ResultReport:
    scores, windows = scores_beside_truth(result.metrics, truth), settings.data.windows
    loss = "" if result.train_loss is None else f", train loss {result.train_loss:.5f}"
    scored = []
    for one in result.evaluations:
        if one.window is not None:
            part = None
            if windows is not None and windows.size == 1:
                # the truth tells of single values of a column, such as days
                part = part_of(of_windows, f"`{windows.column}` == {one.window}")
            scored.append((one, scores_beside_truth(one.scores, part)))
    lines = [f"evaluation: {line}" for line in scores_lines(scores)]
    if scored:
        words, means = mean_of_windows([(one.step, beside) for one, beside in scored])
        lines += [f"{words}: {mean}" for mean in scores_lines(means)]
    fields = {
        "plan": {table: result.plan.kind(table) for table in result.plan.tables},
        "eval": scores,
        "model": settings.model.model,
        "global_batch": settings.run.global_batch_size,
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
