"""The sequences of a schema: histories, and lists that belong together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from rayrec.errors import ConfigError
from rayrec.layout.schema_columns import Feature, SequenceColumn

if TYPE_CHECKING:
    from rayrec.layout.schema import FeatureSchema

Listed = TypeVar("Listed", Feature, SequenceColumn)


def check_sequences(schema: FeatureSchema) -> None:
    """Check the histories and the alignment of a schema's features and sequences.

    Raises:
        ConfigError: names the feature or sequence and the contradiction.
    """
    every = {one.name: one for one in (*schema.features, *schema.sequences)}
    histories = [one for one in every.values() if one.history is not None]
    if histories and not schema.user:
        raise ConfigError(
            f'{histories[0].name!r} has a history, and the schema names no user; say "user", the '
            "column of whose event a row is."
        )
    if schema.user is not None and not histories:
        raise ConfigError(
            f"the schema names user={schema.user!r}, and no feature has a history to cut; leave it "
            'out, or give a feature "history".'
        )
    if schema.time is not None and not histories and not schema.tells_time:
        raise ConfigError(
            f"the schema names time={schema.time!r}, and neither a history nor a dynamic table "
            "(ttl_s, eviction 'timestamp') goes by it; leave it out."
        )
    named = [one.column for one in every.values()]
    others = {c.column for c in schema.dense} | {schema.weight, *schema.labels, *schema.groups}
    for one in histories:
        if one.name in others or one.name in named:
            raise ConfigError(
                f"{one.name!r} is the name of a history and of a column that is read; give the "
                "history another name."
            )
    for one in every.values():
        if one.aligned_with is None:
            continue
        other = every.get(one.aligned_with)
        if other is None or other is one:
            raise ConfigError(
                f"{one.name!r} is aligned with {one.aligned_with!r}, which is no other feature or "
                f"sequence; they are {sorted(every)}."
            )
        if (one.history, one.most_recent) != (other.history, other.most_recent):
            raise ConfigError(
                f"{one.name!r} is aligned with {other.name!r}, and they keep different numbers of "
                "entries; give both the same history or most_recent."
            )


def check_pooled(schema: FeatureSchema, user: str) -> None:
    """Check that all tables are pooled, for users that look up no sequences.

    Args:
        user: name of that user, for the message.
    Raises:
        ConfigError: a table has pooling none.
    """
    for table in schema.embedding_configs():
        raise ConfigError(
            f"table {table.name!r} has pooling none, and {user} looks up pooled rows alone. Give "
            "the table pooling sum or mean, or train a model of sequences."
        )


def candidates_of(schema: FeatureSchema) -> dict[str, str]:
    """Return the histories of a schema, each with the candidate that attends to it.

    In a table of pooling none, features with `history` or `most_recent` are histories, and the one
    other feature is their candidate.

    Raises:
        ConfigError: there is no history, a table has no candidate or several, or ids have weights.
    """
    features = {feature.name: feature for feature in schema.features}
    found: dict[str, str] = {}
    for table in schema.embedding_configs():
        own = [features[name] for name in table.feature_names]
        for feature in own:
            if feature.weights is not None:
                raise ConfigError(
                    f"feature {feature.name!r} has weights, and sequences have none; give its "
                    f"table {table.name!r} pooling sum or mean, or leave the weights out."
                )
        past = [one.name for one in own if one.history is not None or one.most_recent is not None]
        others = [one.name for one in own if one.name not in past]
        if not past or len(others) != 1:
            raise ConfigError(
                f"table {table.name!r} of pooling none has the histories {past} and beside them "
                f"{others}; it needs at least one feature with history or most_recent, and one "
                "other, the candidate that attends to it."
            )
        found |= dict.fromkeys(past, others[0])
    if not found:
        raise ConfigError(
            "the schema has no table of pooling none, whose candidate could attend to a history; "
            "give it one, or train dlrm or dcn."
        )
    return found


def schema_of_lists(schema: FeatureSchema) -> FeatureSchema:
    """Return the schema of rows that bring their histories as lists, as requests do.

    A list has a column that is named like its history, and its most recent entries count.
    """

    def listed(one: Listed) -> Listed:
        if one.history is None:
            return one
        return replace(one, column=one.name, most_recent=one.history, history=None)

    return replace(
        schema,
        features=tuple(map(listed, schema.features)),
        sequences=tuple(map(listed, schema.sequences)),
        user=None,
        time=schema.time if schema.tells_time else None,
    )
