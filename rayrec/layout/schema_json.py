"""A schema as JSON text, in both directions: `schema_text` and `parse_schema`.

`rayrec.layout.schema_fields` reads and writes single entries.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rayrec.errors import ConfigError, PlanError
from rayrec.layout.jsonfields import parse_object
from rayrec.layout.schema_columns import DenseColumn, Feature
from rayrec.layout.schema_fields import place_of, read_table, table_entry, take
from rayrec.layout.tables import EmbeddingBagConfig

if TYPE_CHECKING:
    from rayrec.layout.schema import FeatureSchema


def schema_text(schema: FeatureSchema) -> str:
    """Return the JSON text; ConfigError where a table has an `init_fn`, which is no JSON."""
    features = []
    for f in schema.features:
        entry: dict[str, str | int | None] = {"name": f.name, "column": f.column}
        entry |= {"hash_buckets": f.hash_buckets, "weights": f.weights}
        features.append({k: v for k, v in entry.items() if v is not None})
    tables = [table_entry(table) for table in schema.tables]
    dense = [
        c.column if c.fill == 0.0 else {"column": c.column, "fill": c.fill} for c in schema.dense
    ]
    sections = [f'"label": {json.dumps(schema.label)}', f'"dense": {json.dumps(dense)}']
    if schema.weight is not None:
        sections.insert(1, f'"weight": {json.dumps(schema.weight)}')
    if schema.groups:
        sections.insert(-1, f'"groups": {json.dumps(schema.groups)}')
    for name, entries in (("features", features), ("tables", tables)):
        sections.append(
            f'"{name}": [\n    ' + ",\n    ".join(json.dumps(e) for e in entries) + "\n  ]"
        )
    return "{\n  " + ",\n  ".join(sections) + "\n}\n"


def parse_schema(text: str, source: str) -> dict[str, Any]:
    """Return the arguments of the `FeatureSchema` of a JSON text.

    Raises:
        ConfigError: the text is not JSON, or has an unknown or missing field or a value of the
            wrong type.
    """
    try:
        # `parse_object` refuses doubled keys and NaN. It speaks of plans, and a schema is no
        # plan, so its error gets the class of a schema's errors.
        raw = parse_object(text, source).data
    except PlanError as error:
        raise ConfigError(f"{error} Write an object with label, dense, features, tables.") from None
    top = take(
        raw,
        source,
        required={"label": (str, list), "features": list, "tables": list},
        optional={"dense": list, "weight": str, "groups": list},
    )
    groups = top.get("groups", [])
    if not all(isinstance(name, str) for name in groups):
        raise ConfigError(
            f"field 'groups' of {source} is {groups!r}; it must be a list of strings."
        )
    label = top["label"]
    if not isinstance(label, str) and not all(isinstance(name, str) for name in label):
        raise ConfigError(
            f"field 'label' of {source} is {label!r}; it must be a string or a list of strings."
        )
    return {
        "label": label if isinstance(label, str) else tuple(label),
        "dense": tuple(_dense(i, e, source) for i, e in enumerate(top.get("dense", []))),
        "features": tuple(_feature(i, e, source) for i, e in enumerate(top["features"])),
        "tables": tuple(_table(i, e, source) for i, e in enumerate(top["tables"])),
        "weight": top.get("weight"),
        "groups": tuple(groups),
    }


def _dense(index: int, entry: object, source: str) -> DenseColumn:
    if isinstance(entry, str):
        entry = {"column": entry}
    where, fill = f"dense[{index}] of {source}", {"fill": (int, float)}
    got = take(entry, where, required={"column": str}, optional=fill)
    return DenseColumn(column=got["column"], fill=float(got.get("fill", 0.0)))


def _feature(index: int, entry: object, source: str) -> Feature:
    got = take(
        entry,
        place_of("features", index, entry, source),
        required={"name": str, "column": str},
        optional={"hash_buckets": int, "weights": str},
    )
    return Feature(**got)


def _table(index: int, entry: object, source: str) -> EmbeddingBagConfig:
    return read_table(entry, place_of("tables", index, entry, source))
