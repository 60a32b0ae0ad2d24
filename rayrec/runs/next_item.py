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

from dataclasses import replace
from typing import TYPE_CHECKING

from rayrec.errors import ConfigError
from rayrec.next_item_recipe import NextItemModel, NextItemRecipe
from rayrec.runs.inputs import open_data
from rayrec.runs.item_pairs import Pairs
from rayrec.runs.next_item_options import check_schema
from rayrec.runs.next_item_scores import NextItemScorer, by_ranker, score_lines
from rayrec.runs.reporting import Reporting, ResultReport, fit_and_report

if TYPE_CHECKING:
    from rayrec.driver import Result
    from rayrec.runs.run_file import RunFile


def train_next_item(settings: RunFile, reporting: Reporting) -> None:
    """Train, rank the items of the held-out rows by model and baselines, and report.

    Raises:
        RayrecError, RunInterrupted: the errors of `Driver.fit`.
        ConfigError: the data are not said, a feature is not in the schema, or a list is longer than
            all items.
        InputError: no training row has a history.
    """
    from rayrec.data import NextItemDataset

    text, model, said = settings.schema_text(), settings.model, settings.data
    assert isinstance(model, NextItemModel)
    if settings.run.evaluation is not None:
        raise ConfigError(
            "run.evaluation scores on the way, and next-item models are ranked after training "
            "alone; leave it out."
        )
    schema, of_train, of_eval = map(settings.needed, ("schema", "train", "eval"))
    # labels are not read
    train = open_data(of_train, text, schema, said.where, False, num_streams=said.num_streams)
    held_out = open_data(of_eval, text, schema, said.eval_where, with_labels=False)
    check_schema(model, train.schema)
    if not held_out.num_rows:
        raise ConfigError(f"{of_eval} has no rows to rank; hold out others.")
    pairs = Pairs.of_rows(train, model.history, model.item)
    recipe = NextItemRecipe(schema=text, model=model, counts=pairs.counts)
    recipe.table()  # checks
    driver = settings.driver(
        recipe,
        NextItemDataset(data=train, candidates=recipe.candidates()),
        replace(settings.run, extras={**settings.run.extras, **recipe.to_extras()}),
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
