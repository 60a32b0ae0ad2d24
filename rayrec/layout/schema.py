"""What the columns of a data set mean: `FeatureSchema`, plain data with a JSON form.

A schema names the label column, the dense columns, the sparse features (one column of ids or of
lists of ids each) and the tables they look up. It is the only place where columns and tables meet:
`convert` reads it to make batches, and a model takes its `embedding_bag_configs()`. Everything is
checked at construction, so a schema that exists is coherent; whether a file fits it is checked by
`convert.check_columns`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayrec.errors import ConfigError, PlanError
from rayrec.layout.jsonfields import parse_object
from rayrec.layout.tables import DataType, EmbeddingBagConfig, PoolingType


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseColumn:
    """One numeric column of the dense features; nulls become `fill`."""

    column: str
    fill: float = 0.0

    def __post_init__(self) -> None:
        if not self.column:
            raise ConfigError("a dense column has no name; give it 'column'.")
        if not math.isfinite(self.fill):
            raise ConfigError(
                f"dense column {self.column!r} has fill={self.fill}; it must be finite."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """One sparse feature: a column of ids, or of lists of ids, that makes one bag per row.

    Attributes:
        name: key of the feature in the batch; unique.
        column: column of integers, strings or lists of them.
        hash_buckets: None takes integers as they are; a number hashes integers, strings or bytes
            into [0, hash_buckets).
        weights: column of per-id weights of the same shape as `column`, or None for weight 1.
    """

    name: str
    column: str
    hash_buckets: int | None = None
    weights: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureSchema:
    """Label, dense columns, sparse features and tables of a data set.

    Attributes:
        label: column of the labels.
        dense: numeric columns in the order of `Batch.dense_features`; may be empty.
        features: sparse features in the order of the batch's keys.
        tables: the tables that the features look up; every feature is in at least one.
    Raises:
        ConfigError: names the feature, table or column and the contradiction.
    """

    label: str
    dense: tuple[DenseColumn, ...] = ()
    features: tuple[Feature, ...] = ()
    tables: tuple[EmbeddingBagConfig, ...] = ()

    def __post_init__(self) -> None:
        if not self.label:
            raise ConfigError("the schema has no label column; give it label='<column>'.")
        if not self.features:
            raise ConfigError("the schema has no sparse features; name at least one in 'features'.")
        _unique([c.column for c in self.dense], "dense column")
        _unique([f.name for f in self.features], "feature")
        _unique([t.name for t in self.tables], "table")
        by_name = {f.name: f for f in self.features}
        used: set[str] = set()
        for table in self.tables:
            if not table.name:
                raise ConfigError(
                    f"a table of {table.num_embeddings} x {table.embedding_dim} has no name; give "
                    "it a 'name'."
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
                if buckets is not None and buckets > table.num_embeddings:
                    raise ConfigError(
                        f"feature {name!r} hashes into {buckets} buckets but table {table.name!r} "
                        f"has num_embeddings={table.num_embeddings}. Lower hash_buckets or raise "
                        "num_embeddings."
                    )
            used.update(table.feature_names)
        for feature in self.features:
            if feature.name not in used:
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
            if self.label in (feature.column, feature.weights):
                raise ConfigError(
                    f"feature {feature.name!r} reads the label column {self.label!r}: the label "
                    "would leak into the model."
                )
        if self.label in {c.column for c in self.dense}:
            raise ConfigError(
                f"dense column {self.label!r} is the label: it would leak into the model."
            )

    @property
    def is_weighted(self) -> bool:
        """Whether any feature has weights; features without them then weigh 1."""
        return any(f.weights is not None for f in self.features)

    def feature_names(self) -> tuple[str, ...]:
        """Names of the sparse features, in the order of the batch's keys."""
        return tuple(f.name for f in self.features)

    def columns(self) -> tuple[str, ...]:
        """The columns to read, each once: label, dense, features, weights."""
        # Two features may read one column, and a column is read once.
        weights = [f.weights for f in self.features if f.weights is not None]
        return tuple(
            dict.fromkeys(
                [
                    self.label,
                    *(c.column for c in self.dense),
                    *(f.column for f in self.features),
                    *weights,
                ]
            )
        )

    def limits(self) -> dict[str, int]:
        """Per feature, the rows of its smallest table: its ids must lie in [0, limit)."""
        out: dict[str, int] = {}
        for table in self.tables:
            for name in table.feature_names:
                out[name] = min(out.get(name, table.num_embeddings), table.num_embeddings)
        return out

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Fresh copies of the tables, to build a model from."""
        return [replace(t, feature_names=list(t.feature_names)) for t in self.tables]

    def to_json(self) -> str:
        """The schema as JSON text; `from_json` reads it back to an equal schema.

        Raises:
            ConfigError: a table has an `init_fn`, which is no JSON.
        """
        features = [
            {
                k: v
                for k, v in _fields(f, "name", "column", "hash_buckets", "weights").items()
                if v is not None
            }
            for f in self.features
        ]
        tables = []
        for t in self.tables:
            if t.init_fn is not None:
                raise ConfigError(
                    f"table {t.name!r} has an init_fn, which a schema cannot hold; set it on the "
                    "configs of the model."
                )
            entry: dict[str, Any] = {
                "name": t.name,
                "num_embeddings": t.num_embeddings,
                "embedding_dim": t.embedding_dim,
            }
            entry |= {"pooling": t.pooling.value.lower(), "features": list(t.feature_names)}
            # From here on, fields that have their default are left out: people read and edit the
            # file.
            if t.data_type is not DataType.FP32:
                entry["data_type"] = t.data_type.value.lower()
            bounds = {"weight_init_min": t.weight_init_min, "weight_init_max": t.weight_init_max}
            entry |= {k: v for k, v in bounds.items() if v is not None}
            tables.append(entry)
        dense = [
            c.column if c.fill == 0.0 else {"column": c.column, "fill": c.fill} for c in self.dense
        ]
        sections = [f'"label": {json.dumps(self.label)}', f'"dense": {json.dumps(dense)}']
        for name, entries in (("features", features), ("tables", tables)):
            sections.append(
                f'"{name}": [\n    ' + ",\n    ".join(json.dumps(e) for e in entries) + "\n  ]"
            )
        return "{\n  " + ",\n  ".join(sections) + "\n}\n"

    @classmethod
    def from_json(cls, text: str, source: str = "the schema") -> FeatureSchema:
        """Parse and check a schema.

        Raises:
            ConfigError: the text is not JSON, has an unknown or missing field, a value of the wrong
                type, or contradicts itself.
        """
        try:
            # `parse_object` refuses doubled keys and NaN. It speaks of plans, and a schema is no
            # plan, so its error gets the class of a schema's errors.
            raw = parse_object(text, source).data
        except PlanError as error:
            raise ConfigError(
                f"{error} Write an object with label, dense, features, tables."
            ) from None
        top = _take(
            raw,
            source,
            required={"label": str, "features": list, "tables": list},
            optional={"dense": list},
        )
        try:
            return cls._from_fields(top, source)
        except ConfigError as error:  # what contradicts itself does not know where it was written
            text = str(error)
            raise ConfigError(text if source in text else f"{source}: {text}") from None

    @classmethod
    def _from_fields(cls, top: Mapping[str, Any], source: str) -> FeatureSchema:
        dense = []
        for i, entry in enumerate(top.get("dense", [])):
            if isinstance(entry, str):
                entry = {"column": entry}
            got = _take(
                entry,
                f"dense[{i}] of {source}",
                required={"column": str},
                optional={"fill": (int, float)},
            )
            dense.append(DenseColumn(column=got["column"], fill=float(got.get("fill", 0.0))))
        features = []
        for i, entry in enumerate(top["features"]):
            where = _where("features", i, entry, source)
            got = _take(
                entry,
                where,
                required={"name": str, "column": str},
                optional={"hash_buckets": int, "weights": str},
            )
            features.append(Feature(**got))
        tables = [
            _table(entry, _where("tables", i, entry, source))
            for i, entry in enumerate(top["tables"])
        ]
        return cls(
            label=top["label"], dense=tuple(dense), features=tuple(features), tables=tuple(tables)
        )

    def save(self, path: str | Path) -> None:
        """Write the schema as JSON to a local file."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> FeatureSchema:
        """Read a schema from a local JSON file.

        Raises:
            ConfigError: the file cannot be read or is not a coherent schema.
        """
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read the schema {path}: {error}. Give the path of a schema.json."
            ) from error
        return cls.from_json(text, source=str(path))


def _table(entry: object, where: str) -> EmbeddingBagConfig:
    required = {"name": str, "num_embeddings": int, "embedding_dim": int, "features": list}
    number = (int, float)
    optional = {
        "pooling": str,
        "data_type": str,
        "weight_init_min": number,
        "weight_init_max": number,
    }
    got = _take(entry, where, required=required, optional=optional)
    if not all(isinstance(f, str) for f in got["features"]):
        raise ConfigError(
            f"'features' of {where} must be a list of feature names, not {got['features']!r}."
        )
    return EmbeddingBagConfig(
        num_embeddings=got["num_embeddings"],
        embedding_dim=got["embedding_dim"],
        name=got["name"],
        data_type=_choice(DataType, got.get("data_type", "fp32"), f"data_type of {where}"),
        feature_names=list(got["features"]),
        pooling=_choice(PoolingType, got.get("pooling", "sum"), f"pooling of {where}"),
        weight_init_min=got.get("weight_init_min"),
        weight_init_max=got.get("weight_init_max"),
    )


def _where(section: str, index: int, entry: object, source: str) -> str:
    name = entry.get("name") if isinstance(entry, Mapping) else None
    return f"{section}[{index}]{f' ({name!r})' if name else ''} of {source}"


def _choice(enum: Any, text: str, where: str) -> Any:
    try:
        return enum(text.upper())
    except ValueError:
        raise ConfigError(
            f"{where} is {text!r}; use one of {[e.value.lower() for e in enum]}."
        ) from None


_WORDS: dict[Any, str] = {
    str: "a string",
    int: "a whole number",
    (int, float): "a number",
    list: "a list",
}


def _take(
    entry: object, where: str, *, required: Mapping[str, Any], optional: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of a JSON object, checked: all required ones, no unknown ones, the right types."""
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} must be a JSON object, not {type(entry).__name__}.")
    known = {**required, **optional}
    for name in required:
        if name not in entry:
            raise ConfigError(
                f"{where} has no field {name!r}; add it. Its fields are {sorted(known)}."
            )
    for name, value in entry.items():
        if name not in known:
            raise ConfigError(
                f"{where} has the unknown field {name!r}; the fields are {sorted(known)}."
            )
        # A null stands for a field that is not given.
        if value is None and name in optional:
            continue
        # In Python true is an integer; in a schema it is a mistake.
        fits = isinstance(value, known[name]) and not isinstance(value, bool)
        if fits and known[name] == (int, float):
            fits = abs(value) <= sys.float_info.max  # 1e999 reads as infinity
        if not fits:
            raise ConfigError(
                f"field {name!r} of {where} is {value!r}; it must be {_WORDS[known[name]]}."
            )
    return {k: v for k, v in entry.items() if v is not None}


def _fields(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _unique(names: Sequence[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(f"{what} {name!r} is named twice; names must be unique.")
        seen.add(name)
