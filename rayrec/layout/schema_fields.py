"""The JSON fields of a schema: typed reading with errors that name the place, and table entries.

`take` reads the fields of one object and refuses what is missing, unknown or of a wrong type;
`read_table` and `table_entry` are a table's two directions. `schema` puts them together.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rayrec.errors import ConfigError
from rayrec.layout.tables import DataType, EmbeddingBagConfig, PoolingType


def read_table(entry: object, where: str) -> EmbeddingBagConfig:
    """One entry of 'tables'; ConfigError where a field is missing, unknown or of a wrong type."""
    required = {"name": str, "num_embeddings": int, "embedding_dim": int, "features": list}
    number = (int, float)
    optional = {
        "pooling": str,
        "data_type": str,
        "weight_init_min": number,
        "weight_init_max": number,
    }
    got = take(entry, where, required=required, optional=optional)
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


def place_of(section: str, index: int, entry: object, source: str) -> str:
    """The place of an entry in words: features[2] ('city') of schema.json."""
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
    (str, list): "a string or a list of strings",
}


def take(
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


def table_entry(table: EmbeddingBagConfig) -> dict[str, Any]:
    """One table as a JSON object; ConfigError where it has an `init_fn`, which is no JSON."""
    if table.init_fn is not None:
        raise ConfigError(
            f"table {table.name!r} has an init_fn, which a schema cannot hold; set it on the "
            "configs of the model."
        )
    entry: dict[str, Any] = {
        "name": table.name,
        "num_embeddings": table.num_embeddings,
        "embedding_dim": table.embedding_dim,
    }
    entry |= {"pooling": table.pooling.value.lower(), "features": list(table.feature_names)}
    # From here on, fields that have their default are left out: people read and edit the
    # file.
    if table.data_type is not DataType.FP32:
        entry["data_type"] = table.data_type.value.lower()
    bounds = {"weight_init_min": table.weight_init_min, "weight_init_max": table.weight_init_max}
    entry |= {k: v for k, v in bounds.items() if v is not None}
    return entry
