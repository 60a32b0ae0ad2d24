"""Runs that train next-item models and rank the held-out items, as `rayrec train` does it.

    [model]
    model = "sasrec"
    [data]
    train = "data/windows/train"
    eval = "data/windows/eval"
    schema = "data/windows/schema.json"

A row of the data is a history and the item that follows it. Its label is not read: rows that are
no example belong behind a filter, `[data] where`. Every position of a history is trained on, so
that the rows of a user should overlap little: windows of their items, and not one row per event.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rayrec.errors import ConfigError
from rayrec.next_item_recipe import NextItemModel, NextItemRecipe
from rayrec.runs.inputs import open_data
from rayrec.runs.item_pairs import Pairs
from rayrec.runs.next_item_options import check_schema
from rayrec.runs.next_item_scores import NextItemScorer, by_ranker, score_lines
from rayrec.runs.reporting import Reporting, ResultReport, fit_and_report
from rayrec.runs.training import FileRun

if TYPE_CHECKING:
    from rayrec.driver import Result


@dataclass(frozen=True, kw_only=True, slots=True)
class NextItemRun(FileRun):
    """Training run of a next-item model.

    Attributes:
        model: the model.
        eval: as `train`, of the rows to rank.
        schema: the JSON text of the schema.
        where, eval_where: filters of the rows; None takes all.
        num_streams: see `DataSection`.
    """

    model: NextItemModel
    eval: str
    schema: str
    where: str | None = None
    eval_where: str | None = None
    num_streams: int | None = None


def train_next_item(run: NextItemRun, reporting: Reporting) -> None:
    """Train, rank the items of the held-out rows by model and baselines, and report.

    Raises:
        RayrecError, RunInterrupted: the errors of `Driver.fit`.
        ConfigError: a feature is not in the schema, or a list is longer than all items.
        InputError: no training row has a history.
    """
    from rayrec.data import NextItemDataset
    from rayrec.driver import Driver

    model = run.model
    if run.run.evaluation is not None:
        raise ConfigError(
            "run.evaluation scores on the way, and next-item models are ranked after training "
            "alone; leave it out."
        )
    # labels are not read
    train = open_data(
        run.train, run.schema, run.schema_source, run.where, False, num_streams=run.num_streams
    )
    held_out = open_data(run.eval, run.schema, run.schema_source, run.eval_where, with_labels=False)
    check_schema(model, train.schema)
    if not held_out.num_rows:
        raise ConfigError(f"{run.eval} has no rows to rank; hold out others.")
    pairs = Pairs.of_rows(train, model.history, model.item)
    recipe = NextItemRecipe(schema=run.schema, model=model, counts=pairs.counts)
    recipe.table()  # checks
    driver = Driver(
        recipe,
        NextItemDataset(data=train, candidates=recipe.candidates()),
        run.scaling,
        replace(run.run, extras={**run.run.extras, **recipe.to_extras()}),
        plan=run.plan,
        constraints=run.constraints,
        topology=run.topology,
        scorer=NextItemScorer(held_out=held_out, pairs=pairs, seen=model.seen, ks=model.ks),
    )
    fit_and_report(driver, reporting, _outcome)


def _outcome(result: Result) -> ResultReport:
    loss = "" if result.train_loss is None else f", train loss {result.train_loss:.4f}"
    return ResultReport(
        done=f"{result.rows} rows in {result.seconds:.1f} s{loss}",
        lines=score_lines(result.metrics),
        fields={**by_ranker(result.metrics), "queries": int(result.metrics.get("queries", 0))},
    )
