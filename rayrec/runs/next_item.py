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
from typing import TYPE_CHECKING, Any

from rayrec.errors import ConfigError
from rayrec.next_item_recipe import NextItemModel, NextItemRecipe
from rayrec.runs.inputs import open_data
from rayrec.runs.item_pairs import Pairs, check_lists, num_items
from rayrec.runs.next_item_scores import NextItemScorer, score_lines
from rayrec.runs.reporting import Reporting, ResultReport, fit_and_report
from rayrec.runs.retrieval_scores import by_ranker
from rayrec.spec.schedule import ScheduleConfig
from rayrec.train.optimizer_config import OptimizerConfig

if TYPE_CHECKING:
    from rayrec.data import FeatureSchema
    from rayrec.driver import Result
    from rayrec.runs.run_file import RunFile


def train_next_item(settings: RunFile, reporting: Reporting) -> None:
    """Train, rank the items of the held-out rows by model and baselines, and report."""
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
    pairs = Pairs.of_rows(train, model.history, model.item, model.longest)
    check_lists(held_out, model.history, model.longest)
    recipe = NextItemRecipe(schema=text, model=model, counts=pairs.counts)
    recipe.table()  # checks
    candidates = recipe.candidates()
    driver = settings.driver(
        recipe,
        train if candidates is None else NextItemDataset(data=train, candidates=candidates),
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


def check_schema(model: NextItemModel, schema: FeatureSchema) -> None:
    """Check that a schema has what a model reads.

    Raises:
        ConfigError: names what is missing, or a list that is longer than all items.
    """
    known = schema.feature_names()
    if model.history not in known:
        raise ConfigError(
            f"the schema has no feature {model.history!r}; it has {sorted(known)}. Choose with "
            "[model] history and item."
        )
    if model.item == model.history:
        raise ConfigError(
            f"history and item are both {model.item!r}; name the feature of what the user did, and "
            "that of the item that follows, with [model] history and item."
        )
    items = num_items(schema, model.item)
    if max(model.ks) > items:
        raise ConfigError(
            f"ks has {max(model.ks)}, which is longer than a list of all {items} items."
        )
    sequences = [one.name for one in schema.sequences]
    for option in ("times", "seen"):
        name = getattr(model, option)
        if name is not None and name not in sequences:
            raise ConfigError(
                f"{option}={name!r} is no sequence of the schema, which has {sequences}."
            )
    _check_lengths(model, schema)
    if model.seen is not None and model.seen == model.times:
        raise ConfigError(f"seen={model.seen!r} holds times, as times says; name one with items.")


def _check_lengths(model: NextItemModel, schema: FeatureSchema) -> None:
    """Check that histories have the model's length, and their items a time each."""
    (history,) = (one for one in schema.features if one.name == model.history)
    longest = history.history or history.most_recent
    if model.longest is not None and longest is not None and longest > model.longest:
        raise ConfigError(
            f"length={model.longest} is less than the {longest} items of {model.history!r}; raise "
            "it, or cut the history in the schema."
        )
    for times in (one for one in schema.sequences if one.name == model.times):
        linked = model.history == times.aligned_with or history.aligned_with == model.times
        if history.history != times.history or not (history.history or linked):
            raise ConfigError(
                f"times={model.times!r} has not one number for each item of {model.history!r}; "
                "name a sequence with the same history, or aligned_with it."
            )


def run_options(model: NextItemModel) -> dict[str, Any]:
    """Return options of a run that differ from those of other models, where none are said."""
    lr = 3e-3 if model.model == "gru4rec" else 2e-3
    fall = ScheduleConfig(decay="linear")
    return {
        "global_batch_size": 32,
        "sparse_optimizer": OptimizerConfig(name="adam", lr=lr, options={"beta2": 0.98}),
        "dense_optimizer": OptimizerConfig(name="adam", lr=lr, options={"betas": (0.9, 0.98)}),
        "sparse_schedule": fall,
        "dense_schedule": fall,
        "clip_norm": 5.0,
    }
