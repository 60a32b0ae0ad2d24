"""Meaning of the columns of a data set: `FeatureSchema`, plain data with a JSON form.

A schema names the label columns, the dense columns, the sparse features (one column of ids or of
lists of ids each), sequences of plain numbers, and the tables that features look up. It is the only
place where columns and tables meet: `convert` reads it to make batches, and a model takes its
`embedding_bag_configs()` and `embedding_configs()`. Everything is checked at construction, so a
schema that exists is coherent; whether a file fits it is checked by `convert.check_columns`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rayrec.errors import ConfigError
from rayrec.layout.schema_columns import DenseColumn, Feature, SequenceColumn
from rayrec.layout.schema_json import parse_schema, schema_text
from rayrec.layout.schema_sequences import check_sequences
from rayrec.layout.tables import UNBOUNDED, EmbeddingBagConfig, EmbeddingConfig
from rayrec.layout.whole_file import write_file


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureSchema:
    """Labels, dense columns, sparse features and tables of a data set.

    Attributes:
        label: column of the labels, or columns of several; a tuple of one is taken as its name.
        dense: numeric columns in the order of `Batch.dense_features`; may be empty.
        features: sparse features in the order of the batch's keys.
        tables: the tables that the features look up; every feature is in at least one.
        weight: column of the rows' weights in the loss, finite numbers of at least 0, or None.
        groups: columns of whole numbers or text, such as the user of a row, that metrics see and
            models do not; they are in `Batch.groups`. A feature may read one, too.
        sequences: numbers that no table is asked for, in `Batch.sequences`.
        user: column of whose event a row is; histories are cut from the rows of one user.
        time: column of times: seconds since 1970, or timestamps of Arrow. The rows of a user with
            histories must be in its order, and ids of dynamic tables may come and go by it; the
            largest of a batch is its `KeyedJaggedTensor.time` then. A feature may read it, too.
    Raises:
        ConfigError: names the feature, table or column and the contradiction.
    """

    label: str | tuple[str, ...]
    dense: tuple[DenseColumn, ...] = ()
    features: tuple[Feature, ...] = ()
    tables: tuple[EmbeddingBagConfig | EmbeddingConfig, ...] = ()
    weight: str | None = None
    groups: tuple[str, ...] = ()
    sequences: tuple[SequenceColumn, ...] = ()
    user: str | None = None
    time: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.label, str):
            # one label has one form, so that equal schemas are equal and write equal text
            names = tuple(self.label)
            object.__setattr__(self, "label", names[0] if len(names) == 1 else names)
        if not self.labels or not all(self.labels):
            raise ConfigError("the schema has no label column; give it label='<column>'.")
        _unique(self.labels, "label column")
        if self.weight == "":
            raise ConfigError("the schema has a weight without a name; name its column.")
        if self.time == "":
            raise ConfigError("the schema has a time without a name; name its column.")
        if not self.features:
            raise ConfigError("the schema has no sparse features; name at least one in 'features'.")
        if not all(self.groups):
            raise ConfigError("the schema has a group without a name; name its column.")
        _unique(self.groups, "group column")
        _unique([c.column for c in self.dense], "dense column")
        _unique([one.name for one in (*self.features, *self.sequences)], "feature")
        _unique([t.name for t in self.tables], "table")
        self._check_tables()
        self._check_features()
        check_sequences(self)
        for sequence in self.sequences:
            if sequence.history is None:
                self._no_leak(f"sequence {sequence.name!r}", sequence.column)
        for column in self.dense:
            if column.column in self.labels:
                raise ConfigError(
                    f"dense column {column.column!r} is the label: it would leak into the model."
                )
            self._no_leak("the dense part", column.column)

    def _check_tables(self) -> None:
        by_name = {f.name: f for f in self.features}
        for table in self.tables:
            if not table.name:
                raise ConfigError(
                    f"a table of {table.num_embeddings} x {table.embedding_dim} has no name; give "
                    "it a 'name'."
                )
            if self.time is None and table.dynamic is not None and table.dynamic.uses_time:
                rule = table.dynamic
                asks = "eviction='timestamp'" if rule.ttl_s is None else f"ttl_s={rule.ttl_s}"
                raise ConfigError(
                    f"table {table.name!r} has {asks}, and the schema names no column of times; "
                    "give it time='<column>', or count in steps (ttl_steps, eviction 'step')."
                )
            if not table.feature_names:
                raise ConfigError(
                    f"table {table.name!r} has no features; name at least one feature that looks "
                    "it up."
                )
            for name in table.feature_names:
                if name not in by_name:
                    raise ConfigError(
                        f"table {table.name!r} names the unknown feature {name!r}; the features "
                        f"are {sorted(by_name)}."
                    )
                buckets = by_name[name].hash_buckets
                # A hash gives every number below hash_buckets, so each of them must have a row.
                if buckets is not None and buckets > table.id_limit:
                    raise ConfigError(
                        f"feature {name!r} hashes into {buckets} buckets but table {table.name!r} "
                        f"has num_embeddings={table.num_embeddings}. Lower hash_buckets or raise "
                        "num_embeddings."
                    )

    def _check_features(self) -> None:
        looked_up = {name for table in self.tables for name in table.feature_names}
        for feature in self.features:
            if feature.name not in looked_up:
                raise ConfigError(
                    f"feature {feature.name!r} is in no table; add it to a table's 'features' or "
                    "remove it."
                )
            if not feature.column:
                raise ConfigError(f"feature {feature.name!r} has no column; give it 'column'.")
            if feature.hash_buckets is not None and feature.hash_buckets < 1:
                raise ConfigError(
                    f"feature {feature.name!r} has hash_buckets={feature.hash_buckets}; it needs "
                    "at least 1."
                )
            # what a user did before is known, labels included
            if feature.history is None:
                self._no_leak(f"feature {feature.name!r}", feature.column)
            self._no_leak(f"feature {feature.name!r}", feature.weights)

    def _no_leak(self, reader: str, column: str | None) -> None:
        """Refuse what reads a label or the weight, of which no row to be scored is known."""
        if column is None:
            return
        if column in self.labels:
            raise ConfigError(
                f"{reader} reads the label column {column!r}: the label would leak into the model."
            )
        if column == self.weight:
            raise ConfigError(
                f"{reader} reads the weight column {column!r}: what is known of a row only in "
                "training would leak into the model."
            )

    @property
    def labels(self) -> tuple[str, ...]:
        """The label columns, in the order of the columns of `Batch.labels`."""
        return (self.label,) if isinstance(self.label, str) else self.label

    def one_label(self, user: str) -> str:
        """Return the one label column, for users that take no more.

        Args:
            user: name of that user, for the message.
        Raises:
            ConfigError: the schema has several.
        """
        if not isinstance(self.label, str):
            raise ConfigError(
                f"the schema has {len(self.label)} labels ({', '.join(self.label)}), and {user} "
                "takes one. Name one column as its label."
            )
        return self.label

    @property
    def is_weighted(self) -> bool:
        """True if any feature has weights; features without them then weigh 1."""
        return any(f.weights is not None for f in self.features)

    @property
    def tells_time(self) -> bool:
        """True if ids of a dynamic table come and go by the time of the rows."""
        rules = (table.dynamic for table in self.tables)
        return any(rule is not None and rule.uses_time for rule in rules)

    def feature_names(self) -> tuple[str, ...]:
        """Names of the sparse features, in the order of the batch's keys."""
        return tuple(f.name for f in self.features)

    def columns(self, with_labels: bool = True) -> tuple[str, ...]:
        """The columns to read, each once: labels, dense, features, sequences, weights of ids and
        of rows, groups, and the time where tables go by it.

        A history has a column of its own, which has the name of its feature.

        Args:
            with_labels: True includes labels, weights of rows, groups and time.
        """
        # Two features may read one column, and a column is read once.
        weights = [f.weights for f in self.features if f.weights is not None]
        return tuple(
            dict.fromkeys(
                [
                    *(self.labels if with_labels else ()),
                    *(c.column for c in self.dense),
                    *(f.source for f in self.features),
                    *(s.source for s in self.sequences),
                    *weights,
                    *([self.weight] if with_labels and self.weight is not None else []),
                    *(self.groups if with_labels else ()),
                    *(
                        [self.time]
                        if with_labels and self.time is not None and self.tells_time
                        else []
                    ),
                ]
            )
        )

    def limits(self) -> dict[str, int]:
        """Per feature, the least `id_limit` of its tables: ids, without a sign, are below it."""
        out: dict[str, int] = {}
        for table in self.tables:
            for name in table.feature_names:
                out[name] = min(out.get(name, table.id_limit), table.id_limit)
        return out

    def unbounded(self) -> frozenset[str]:
        """The features whose tables are all dynamic, so that any number of 64 bits is an id."""
        limits = self.limits().items()
        return frozenset(name for name, limit in limits if limit == UNBOUNDED)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Fresh copies of the tables whose rows are pooled, to build a model from."""
        pooled = [t for t in self.tables if isinstance(t, EmbeddingBagConfig)]
        return [replace(t, feature_names=list(t.feature_names)) for t in pooled]

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Fresh copies of the tables of sequences, those of pooling NONE."""
        sequences = [t for t in self.tables if isinstance(t, EmbeddingConfig)]
        return [replace(t, feature_names=list(t.feature_names)) for t in sequences]

    def to_json(self) -> str:
        """The schema as JSON text; `from_json` reads it back to an equal schema.

        Raises:
            ConfigError: a table has an `init_fn`, which is no JSON.
        """
        return schema_text(self)

    @classmethod
    def from_json(cls, text: str, source: str = "the schema") -> FeatureSchema:
        """Parse and check a schema.

        Raises:
            ConfigError: the text is not JSON, has an unknown or missing field, a value of the wrong
                type, or contradicts itself.
        """
        try:
            return cls(**parse_schema(text, source))
        except ConfigError as error:  # what contradicts itself does not know where it was written
            words = str(error)
            raise ConfigError(words if source in words else f"{source}: {words}") from None

    def save(self, path: str | Path) -> None:
        """Write the JSON to a local file, which a reader sees whole: the old one or the new."""
        write_file(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> FeatureSchema:
        """Read a schema from a local JSON file.

        Raises:
            ConfigError: the file cannot be read or is not a coherent schema.
        """
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            where = " Give the path of a schema.json."
            if not Path(path).is_absolute():
                where = (
                    f" The working directory is {Path.cwd()}, and that of ranks is another than "
                    "their driver's: give an absolute path, or read the schema in the driver."
                )
            raise ConfigError(f"cannot read the schema {path}: {error}.{where}") from error
        return cls.from_json(text, source=str(path))


def _unique(names: Sequence[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(f"{what} {name!r} is named twice; names must be unique.")
        seen.add(name)
