"""The sequences of a schema: histories, and lists that belong together."""

from __future__ import annotations

from collections.abc import Collection
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


def candidates_of(schema: FeatureSchema) -> dict[str, str | None]:
    """Return the histories of a schema, each with its candidate.

    In a table of pooling none, features with `history` or `most_recent` are histories, and the one
    other feature is their candidate. A table without one has histories alone, such as what a user
    did at each event: they have None.

    Raises:
        ConfigError: there is no history with a candidate, a table has several candidates or no
            history, or ids have weights.
    """
    features = {feature.name: feature for feature in schema.features}
    found: dict[str, str | None] = {}
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
        if not past or len(others) > 1:
            raise ConfigError(
                f"table {table.name!r} of pooling none has the histories {past} and beside them "
                f"{others}; it needs at least one feature with history or most_recent, and at most "
                "one other, the candidate."
            )
        found |= dict.fromkeys(past, others[0] if others else None)
    if not any(found.values()):
        raise ConfigError(
            "the schema has no table of pooling none with a history and a candidate; give it one, "
            "or train dlrm or dcn."
        )
    return found


def targets_of(schema: FeatureSchema) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the histories that a candidate attends to, and those that stand beside them.

    Returns:
        History -> its candidate; history -> histories alone that are aligned with it.
    Raises:
        ConfigError: the errors of `candidates_of`; or a history alone is aligned with none that has
            a candidate.
    """
    found, groups = candidates_of(schema), aligned_groups(schema)
    targets = {name: candidate for name, candidate in found.items() if candidate is not None}
    beside: dict[str, list[str]] = {}
    for name in found.keys() - targets.keys():
        aligned = [one for one in targets if groups[one] == groups[name]]
        if not aligned:
            raise ConfigError(
                f"{name!r} is a history without a candidate, and has not one entry for each of a "
                f"history that has one, {sorted(targets)}; give them the same history, or "
                "aligned_with, or give its table a candidate."
            )
        for one in aligned:
            beside.setdefault(one, []).append(name)
    return targets, {name: sorted(own) for name, own in beside.items()}


def aligned_histories(
    schema: FeatureSchema, times: str | None = None, candidate_time: str | None = None
) -> tuple[dict[str, str | None], int]:
    """Return the histories of a schema that together are one sequence of events.

    Tables are read as `candidates_of` reads them.

    Args:
        times: sequence with the time of each event, or None.
        candidate_time: sequence with one time for each row, or None.
    Returns:
        History -> its candidate or None; and the number of events of the longest.
    Raises:
        ConfigError: the errors of `candidates_of`; or histories and times have not equally many
            events.
    """
    found = candidates_of(schema)
    sequences = {one.name: one for one in schema.sequences}
    for option, name in (("times", times), ("candidate_time", candidate_time)):
        if name is not None and name not in sequences:
            raise ConfigError(
                f"{option}={name!r} is no sequence of the schema, which has {sorted(sequences)}."
            )
    if candidate_time is not None:
        one = sequences[candidate_time]
        if one.history is not None or one.most_recent is not None:
            raise ConfigError(
                f"candidate_time={candidate_time!r} is a history; name a sequence of one time for "
                "each row."
            )
    groups = aligned_groups(schema)
    first, *others = [*found, *([] if times is None else [times])]
    for name in others:
        if groups[name] != groups[first]:
            raise ConfigError(
                f"{name!r} has not one entry for each of {first!r}, and a ranking model reads both "
                "as one sequence of events; give them the same history, or aligned_with."
            )
    (longest,) = (one.history or one.most_recent for one in schema.features if one.name == first)
    assert longest is not None
    return found, longest


def aligned_groups(schema: FeatureSchema) -> dict[str, str]:
    """Return a name for each feature and sequence; those with as many entries share it.

    These are histories of one length, which are cut from the same rows, and what is aligned.
    """
    every = [*schema.features, *schema.sequences]
    groups, by_history = {one.name: one.name for one in every}, dict[int, str]()
    for one in every:
        others = [] if one.aligned_with is None else [one.aligned_with]
        if one.history is not None:
            others.append(by_history.setdefault(one.history, one.name))
        for other in others:
            own, new = groups[one.name], groups[other]
            groups = {name: new if group == own else group for name, group in groups.items()}
    return groups


def without_feature(schema: FeatureSchema, name: str) -> FeatureSchema:
    """Return the schema without a feature; a table that no other feature looks up goes with it."""
    rest = [(t, [one for one in t.feature_names if one != name]) for t in schema.tables]
    return replace(
        schema,
        features=tuple(one for one in schema.features if one.name != name),
        tables=tuple(replace(table, feature_names=names) for table, names in rest if names),
    )


def with_sequences(schema: FeatureSchema, names: Collection[str]) -> FeatureSchema:
    """Return the schema with these sequences alone; what was aligned with another stands alone."""
    gone = {one.name for one in schema.sequences if one.name not in names}

    def alone(one: Listed) -> Listed:
        return replace(one, aligned_with=None) if one.aligned_with in gone else one

    return replace(
        schema,
        features=tuple(map(alone, schema.features)),
        sequences=tuple(alone(one) for one in schema.sequences if one.name not in gone),
    )


def schema_of_lists(schema: FeatureSchema) -> FeatureSchema:
    """Return the schema of rows that bring their histories as lists, as requests do.

    A list has a column that is named like its history, and its most recent entries count. Histories
    of one length, which a log has from the same rows, are aligned.
    """
    first: dict[int, str] = {}

    def listed(one: Listed) -> Listed:
        if one.history is None:
            return one
        other = first.setdefault(one.history, one.name)
        beside = other if one.aligned_with is None and other != one.name else one.aligned_with
        return replace(
            one, column=one.name, most_recent=one.history, history=None, aligned_with=beside
        )

    return replace(
        schema,
        features=tuple(map(listed, schema.features)),
        sequences=tuple(map(listed, schema.sequences)),
        user=None,
        time=schema.time if schema.tells_time else None,
    )
