"""Options of a run that follow from its next-item model, and the schema that the model needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rayrec.errors import ConfigError
from rayrec.runs.item_pairs import num_items
from rayrec.spec.schedule import ScheduleConfig
from rayrec.train.optimizer_config import OptimizerConfig

if TYPE_CHECKING:
    from rayrec.data import FeatureSchema
    from rayrec.next_item_recipe import NextItemModel


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
