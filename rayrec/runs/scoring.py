"""Scores of a checkpoint: its model on given rows, on any number of ranks, under any plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rayrec.errors import ConfigError
from rayrec.layout.schema import FeatureSchema
from rayrec.layout.schema_sequences import without_feature
from rayrec.next_item_recipe import NextItemRecipe
from rayrec.runs.inputs import open_data, read_text
from rayrec.runs.next_item import check_schema
from rayrec.runs.next_item_predictions import BestItems, ItemScores
from rayrec.runs.next_item_scores import NextItemScorer, queries_at_a_time, score_lines
from rayrec.runs.reporting import scores_beside_truth, scores_lines, truth_beside
from rayrec.runs.retrieval_scores import by_ranker

if TYPE_CHECKING:
    from rayrec.data import FileDataset
    from rayrec.data.scored import Predicted
    from rayrec.driver import Driver, ScalingConfig
    from rayrec.serve.recipes import Recipe
    from rayrec.spec.task import Task

ROWS = 16_384  # scored at a time where nothing else is said


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringOptions:
    """Options of scoring rows by a checkpoint; `rayrec.cli.scored` and `predict` describe them.

    Attributes:
        checkpoint: absolute directory or URI of the checkpoint.
        schema: JSON file of the schema; None takes the checkpoint's.
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
    k: int | None = None
    masked: bool = False


class Scored(NamedTuple):
    """Scores of a checkpoint by name, and as lines for people.

    Attributes:
        ranks: number of those that scored it.
        scores: those of each protocol by name, of a next-item model.
    """

    step: int
    ranks: int
    scores: Mapping[str, Any]
    lines: Sequence[str]


class _Opened(NamedTuple):
    """A checkpoint and the rows to score."""

    step: int
    recipe: Recipe
    driver: Driver


def score_checkpoint(scoring: ScoringOptions) -> Scored:
    """Build the model that the checkpoint describes, and score the rows.

    The scores stand beside those of the data's planted truth where that is known.
    """
    opened, ranks = _opened(scoring), max(1, scoring.scaling.most)
    ranks_items = isinstance(opened.recipe, NextItemRecipe)
    if ranks_items and scoring.predictions is not None:
        raise ConfigError(
            f"--out {scoring.predictions} is a file with a label beside each score, and a "
            "next-item model reads no labels; name a folder."
        )
    truth = None if ranks_items else truth_beside(scoring.data, scoring.where)
    metrics = opened.driver.evaluate(
        scoring.checkpoint, predictions=scoring.predictions, keys=scoring.keys
    )
    if ranks_items:
        queries = {"queries": int(metrics["queries"])}
        return Scored(opened.step, ranks, by_ranker(metrics) | queries, score_lines(metrics))
    scores = scores_beside_truth(metrics, truth)
    return Scored(opened.step, ranks, scores, scores_lines(scores))


def predict_checkpoint(scoring: ScoringOptions) -> Predicted:
    """Write the scores of rows, whose labels are not read, into the folder `predictions`."""
    assert scoring.predictions is not None
    opened = _opened(scoring, with_labels=False)
    scorer: ItemScores | BestItems | None = None
    if isinstance(opened.recipe, NextItemRecipe):
        seen = opened.recipe.model.seen
        scorer = ItemScores()
        if scoring.k is not None:
            scorer = BestItems(k=scoring.k, masked=scoring.masked, seen=seen)
    return opened.driver.predict(
        scoring.checkpoint, scoring.predictions, columns=scoring.keys, scorer=scorer
    )


def _opened(scoring: ScoringOptions, with_labels: bool = True) -> _Opened:
    from rayrec.checkpoint import read_manifest
    from rayrec.driver import CheckpointConfig, Driver, RunConfig
    from rayrec.serve.recipes import recipe_in

    checkpoint = scoring.checkpoint
    manifest = read_manifest(checkpoint)
    recipe = recipe_in(manifest.extras, checkpoint)
    if scoring.schema:
        recipe = replace(recipe, schema=read_text("--schema", scoring.schema))
    source = scoring.schema or f"the schema of {checkpoint}"
    rows, scorer = scoring.global_batch_size, None
    tasks: tuple[Task, ...] = ()
    if isinstance(recipe, NextItemRecipe):
        items = recipe.table().num_embeddings
        data = _histories(scoring, recipe, source, items)
        said = recipe.model
        scorer = NextItemScorer(held_out=data, pairs=None, seen=said.seen, ks=said.ks)
        rows = min(rows, queries_at_a_time(items))
    elif scoring.k is not None:
        raise ConfigError(
            f"--k is for next-item models, which rank items, and {checkpoint} is of model "
            f"{recipe.model!r}; leave it out."
        )
    else:
        data = open_data(scoring.data, recipe.schema, source, scoring.where, with_labels)
        tasks = recipe.tasks
    # Nothing is trained and kept; a RunConfig needs steps or epochs all the same.
    run = RunConfig(
        global_batch_size=rows,
        epochs=1,
        tasks=tasks,
        timeout_s=scoring.timeout_s,
        checkpoint=CheckpointConfig(at_end=False),
    )
    driver = Driver(
        recipe, None, scoring.scaling, run, eval_data=data, plan=scoring.plan, scorer=scorer
    )
    return _Opened(manifest.step, recipe, driver)


def _histories(
    scoring: ScoringOptions, recipe: NextItemRecipe, source: str, items: int
) -> FileDataset:
    """Open the rows of a next-item model, whose labels are not read."""
    schema = FeatureSchema.from_json(recipe.schema, source)
    check_schema(recipe.model, schema)
    if scoring.k is not None:
        if scoring.k > items:
            raise ConfigError(f"--k {scoring.k} is longer than a list of all {items} items.")
        # the items are asked for
        schema = without_feature(schema, recipe.model.item)
    return open_data(scoring.data, schema.to_json(), source, scoring.where, with_labels=False)
