"""Checks of what a schema says about sequences: histories, and lists that belong together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayrec.errors import ConfigError

if TYPE_CHECKING:
    from rayrec.layout.schema import FeatureSchema


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
    for name in ("user", "time"):
        if getattr(schema, name) is not None and not histories:
            raise ConfigError(
                f"the schema names {name}={getattr(schema, name)!r}, and no feature has a history "
                'to cut; leave it out, or give a feature "history".'
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
