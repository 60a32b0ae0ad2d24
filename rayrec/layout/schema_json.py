"""A schema as JSON text, in both directions: `schema_text` and `parse_schema`."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from rayrec.errors import ConfigError
from rayrec.fields.json_text import json_object, of_json
from rayrec.fields.writing import record_of
from rayrec.layout.dynamic import DynamicConfig
from rayrec.layout.schema_columns import DenseColumn, Feature, SequenceColumn
from rayrec.layout.tables import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType

if TYPE_CHECKING:
    from rayrec.layout.schema import FeatureSchema


@dataclass(frozen=True, kw_only=True, slots=True)
class _Table:
    """A table as a schema's file has it, without what it has by default."""

    name: str
    num_embeddings: int
    embedding_dim: int
    pooling: PoolingType = PoolingType.SUM
    features: tuple[str, ...]
    data_type: DataType | None = None
    weight_init_min: float | None = None
    weight_init_max: float | None = None
    dynamic: DynamicConfig | None = None

    def config(self) -> EmbeddingBagConfig | EmbeddingConfig:
        if self.dynamic is not None:
            self.dynamic.check_features(self.name, self.features)
        sequence = self.pooling is PoolingType.NONE
        kind = EmbeddingConfig if sequence else partial(EmbeddingBagConfig, pooling=self.pooling)
        return kind(
            self.num_embeddings,
            self.embedding_dim,
            self.name,
            self.data_type or DataType.FP32,
            list(self.features),
            weight_init_min=self.weight_init_min,
            weight_init_max=self.weight_init_max,
            dynamic=self.dynamic,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _SchemaFile:
    """A schema's file; a dense column without a fill is its name."""

    label: str | tuple[str, ...]
    weight: str | None = None
    groups: tuple[str, ...] | None = None
    user: str | None = None
    time: str | None = None
    dense: tuple[str | DenseColumn, ...] = ()
    features: tuple[Feature, ...]
    sequences: tuple[SequenceColumn, ...] | None = None
    tables: tuple[_Table, ...]


def schema_text(schema: FeatureSchema) -> str:
    """Return the JSON text; ConfigError where a table has an `init_fn`, which is no JSON."""
    file = _SchemaFile(
        label=schema.label,
        weight=schema.weight,
        groups=schema.groups or None,
        user=schema.user,
        time=schema.time,
        dense=tuple(one.column if one.fill == 0.0 else one for one in schema.dense),
        features=schema.features,
        sequences=schema.sequences or None,
        tables=tuple(map(_table, schema.tables)),
    )
    sections = []
    # people read and edit the file: an entry has a line of its own
    for name, value in record_of(file).items():
        text = json.dumps(value)
        if name in ("features", "sequences", "tables"):
            text = "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]"
        sections.append(f'"{name}": {text}')
    return "{\n  " + ",\n  ".join(sections) + "\n}\n"


def _table(table: EmbeddingBagConfig | EmbeddingConfig) -> _Table:
    if table.init_fn is not None:
        raise ConfigError(
            f"table {table.name!r} has an init_fn, which a schema cannot hold; set it on the "
            "configs of the model."
        )
    return _Table(
        name=table.name,
        num_embeddings=table.num_embeddings,
        embedding_dim=table.embedding_dim,
        pooling=table.pooling,
        features=tuple(table.feature_names),
        data_type=None if table.data_type is DataType.FP32 else table.data_type,
        weight_init_min=table.weight_init_min,
        weight_init_max=table.weight_init_max,
        dynamic=table.dynamic,
    )


def parse_schema(text: str, source: str) -> dict[str, Any]:
    """Return the arguments of the `FeatureSchema` of a JSON text.

    Raises:
        ConfigError: the text is not JSON, or has an unknown or missing field or a value of the
            wrong type.
    """
    file = of_json(_SchemaFile, json_object(text, source, ConfigError), source, ConfigError)
    dense = (DenseColumn(column=one) if isinstance(one, str) else one for one in file.dense)
    return {
        **{field.name: getattr(file, field.name) for field in fields(file)},
        "dense": tuple(dense),
        "sequences": file.sequences or (),
        "tables": tuple(table.config() for table in file.tables),
        "groups": file.groups or (),
    }
