"""The tables of a schema file, read without torch or pyarrow, so that a plan can be made on any
machine.

`rayrec.data.FeatureSchema` is the full reader; a test holds this one against it. Here only what the
planner needs is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rayrec.errors import ConfigError, PlanError
from rayrec.layout import DataType, EmbeddingBagConfig, PoolingType
from rayrec.layout.jsonfields import Fields, parse_object


@dataclass(frozen=True, slots=True)
class SchemaTables:
    """Tables of a schema.

    Attributes:
        weighted: whether ids carry weights: all or none, as a batch's do.
        columns: feature name -> column of the data.
    """

    tables: tuple[EmbeddingBagConfig, ...]
    weighted: bool
    columns: dict[str, str]


def load_tables(path: str | Path) -> SchemaTables:
    """Read the tables of a schema.

    Raises:
        ConfigError: the file cannot be read, is no schema, or a table makes no sense; names the
            file and the table.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the schema {path}: {error}.") from None
    try:
        root = parse_object(text, str(path))
        for name in ("label", "dense"):
            root.skip(name)
        tables = tuple(_table(entry) for entry in root.children("tables"))
        features = root.children("features")
        columns = _columns(features, path)
        weighted = any(entry.has("weights") for entry in features)
        root.finish()
    except PlanError as error:
        raise ConfigError(str(error)) from None
    except ConfigError as error:
        raise ConfigError(
            f"{path}: {error}" if str(path) not in str(error) else str(error)
        ) from None
    if not columns:
        raise ConfigError(f"{path} has no sparse features; name at least one in 'features'.")
    for table in tables:
        if not table.feature_names:
            raise ConfigError(
                f"{path}: table {table.name!r} has no features; name at least one feature that "
                "looks it up."
            )
        for feature in table.feature_names:
            if feature not in columns:
                known = ", ".join(sorted(columns)) or "none"
                raise ConfigError(
                    f"{path}: table {table.name!r} names the unknown feature {feature!r}; the "
                    f"features are {known}."
                )
    used = {feature for table in tables for feature in table.feature_names}
    for feature in columns:
        if feature not in used:
            raise ConfigError(
                f"{path}: feature {feature!r} is in no table; add it to a table's 'features' or "
                "remove it."
            )
    return SchemaTables(tables, weighted, columns)


def _columns(features: Sequence[Fields], path: str | Path) -> dict[str, str]:
    """Return the column of each feature by its name.

    Raises:
        ConfigError: two features have one name. PlanError: a field is unknown or of another type.
    """
    columns: dict[str, str] = {}
    for entry in features:
        name = entry.text("name")
        if name in columns:
            raise ConfigError(f"{path}: feature {name!r} is named twice; names must be unique.")
        columns[name] = entry.text("column")
        entry.skip("hash_buckets")
        if entry.has("weights"):
            entry.text("weights")
        entry.finish()
    return columns


def _table(entry: Fields) -> EmbeddingBagConfig:
    table = EmbeddingBagConfig(
        num_embeddings=entry.integer("num_embeddings"),
        embedding_dim=entry.integer("embedding_dim"),
        name=entry.text("name"),
        data_type=DataType(_word(entry, "data_type", "fp32", [t.value for t in DataType])),
        feature_names=entry.texts("features"),
        pooling=PoolingType(_word(entry, "pooling", "sum", [p.value for p in PoolingType])),
        weight_init_min=entry.number("weight_init_min") if entry.has("weight_init_min") else None,
        weight_init_max=entry.number("weight_init_max") if entry.has("weight_init_max") else None,
    )
    entry.finish()
    return table


def _word(entry: Fields, name: str, default: str, known: list[str]) -> str:
    value = (entry.text(name) if entry.has(name) else default).upper()
    if value not in known:
        raise ConfigError(
            f"{entry.where}: {name} is {value.lower()!r}; use one of "
            f"{', '.join(word.lower() for word in known)}."
        )
    return value
