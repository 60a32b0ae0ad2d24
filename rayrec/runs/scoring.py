"""Scores of a checkpoint: its model on given rows, on any number of ranks, under any plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from rayrec.recipe import ModelRecipe
from rayrec.runs.inputs import open_data, read_text
from rayrec.runs.reporting import scores_beside_truth, truth_beside

if TYPE_CHECKING:
    from rayrec.data.scored import Predicted
    from rayrec.driver import Driver, ScalingConfig

ROWS = 16_384  # scored at a time where nothing else is said


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringOptions:
    """Options of scoring rows by a checkpoint.

    Attributes:
        checkpoint: absolute directory or URI of the checkpoint.
        data: folder, file or URI of the rows.
        where: filter of the rows; None takes all.
        schema: JSON file of the schema; None takes the checkpoint's.
        scaling: number and resources of the ranks.
        plan: "auto", a sharding kind, or a plan's JSON file.
        global_batch_size: rows scored at a time over all ranks.
        timeout_s: seconds until a hanging collective counts as failed.
        predictions: absolute path for the score of every row, or None: of a Parquet file beside
            the scores of the model, of a folder for `predict_checkpoint`.
        keys: columns of the data that are copied into it.
    """

    checkpoint: str
    data: str
    schema: str | None
    scaling: ScalingConfig
    where: str | None = None
    plan: str = "auto"
    global_batch_size: int = ROWS
    timeout_s: float = 300.0
    predictions: str | None = None
    keys: Sequence[str] = ()


class Scored(NamedTuple):
    """Step of the checkpoint, number of ranks that scored it, and scores by name."""

    step: int
    ranks: int
    scores: Mapping[str, float]


def score_checkpoint(scoring: ScoringOptions) -> Scored:
    """Build the model that the checkpoint describes, load it, and score the rows.

    Returns:
        the scores, beside those of the data's planted truth where that is known.
    Raises:
        RayrecError, RunInterrupted: the errors of `Driver.evaluate`.
        ConfigError: the checkpoint does not say how to build its model.
    """
    step, driver = _opened(scoring)
    truth = truth_beside(scoring.data, scoring.where)
    metrics = driver.evaluate(
        scoring.checkpoint, predictions=scoring.predictions, keys=scoring.keys
    )
    ranks = max(1, scoring.scaling.most)
    return Scored(step, ranks, scores_beside_truth(metrics, truth))


def predict_checkpoint(scoring: ScoringOptions) -> Predicted:
    """Write the scores of rows, whose labels are not read, into the folder `predictions`.

    Raises:
        RayrecError, RunInterrupted: the errors of `Driver.predict`.
        ConfigError: the checkpoint does not say how to build its model.
    """
    assert scoring.predictions is not None
    _, driver = _opened(scoring, with_labels=False)
    return driver.predict(scoring.checkpoint, scoring.predictions, columns=scoring.keys)


def _opened(scoring: ScoringOptions, with_labels: bool = True) -> tuple[int, Driver]:
    """Return the step of the checkpoint, and a driver with its model and the rows."""
    from rayrec.checkpoint import read_manifest
    from rayrec.driver import CheckpointConfig, Driver, RunConfig

    checkpoint = scoring.checkpoint
    manifest = read_manifest(checkpoint)
    recipe = ModelRecipe.from_extras(manifest.extras, checkpoint)
    if scoring.schema:
        recipe = replace(recipe, schema=read_text("--schema", scoring.schema))
    source = scoring.schema or f"the schema of {checkpoint}"
    data = open_data(scoring.data, recipe.schema, source, scoring.where, with_labels)
    # Nothing is trained, so the run keeps no checkpoint; a RunConfig needs steps or epochs all the
    # same.
    run = RunConfig(
        global_batch_size=scoring.global_batch_size,
        epochs=1,
        tasks=recipe.tasks,
        timeout_s=scoring.timeout_s,
        checkpoint=CheckpointConfig(at_end=False),
    )
    return manifest.step, Driver(
        recipe, None, scoring.scaling, run, eval_data=data, plan=scoring.plan
    )
