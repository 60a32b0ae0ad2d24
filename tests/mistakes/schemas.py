"""Mistakes in schema.json, at the commands that read one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.mistakes.case import Mistake, mistakes
from tests.mistakes.spoil import DROP, content, edited

SCHEMA = "clicks/schema.json"
# what a DLRM refuses and the planner takes: a table wider than the others, and one of sequences
OF_DLRM = (("tables.0.embedding_dim", 16), ("tables.0.pooling", "none"))
BINARY = ("", "schema.json", content("schema.json", b"\xff\xfe\x00", "schema.json is binary"))

# (place, value, what the last line says)
FIELDS: list[tuple[str, Any, str]] = [
    ("label", DROP, "schema.json|no field 'label'"),
    ("features", DROP, "schema.json|no field 'features'"),
    ("tables", DROP, "schema.json|no field 'tables'"),
    ("features.0.name", DROP, "features[0]|no field 'name'"),
    ("features.0.column", DROP, "features[0]|no field 'column'"),
    ("tables.0.name", DROP, "tables[0]|no field 'name'"),
    ("tables.0.num_embeddings", DROP, "tables[0]|no field 'num_embeddings'"),
    ("tables.0.embedding_dim", DROP, "tables[0]|no field 'embedding_dim'"),
    ("tables.0.features", DROP, "tables[0]|no field 'features'"),
    ("dense.0", {"fill": 1.0}, "dense[0]|no field 'column'"),
    ("label", None, "label"),
    ("dense", "d_0", "dense|list"),
    ("dense.0", 5, "dense[0]|object"),
    ("dense.0", {"column": "d_0", "fill": "x"}, "fill|number"),
    ("dense.0", {"column": "d_0", "fill": float("inf")}, "Infinity"),
    ("features", {}, "features|list"),
    ("features.0", "cat_0", "features[0]|object"),
    ("features.0.name", 5, "name|text"),
    ("features.0.column", "", "'cat_0' has no column"),
    ("features.0.hash_buckets", -3, "hash_buckets=-3"),
    ("features.0.hash_buckets", "many", "hash_buckets|whole number"),
    ("features.0.weights", "label", "leak"),
    ("tables", [], "is in no table"),
    ("tables.0.name", "", "has no name"),
    ("tables.0.features", ["cat_0", "cat_0"], "'cat_0' twice"),
    ("tables.0.features", [5], "features[0]|text"),
    ("tables.0.num_embeddings", -1, "num_embeddings=-1"),
    ("tables.0.num_embeddings", 10**13, "t_cat_0"),
    ("tables.0.num_embeddings", 10**30, "schema.json|0000000"),
    ("tables.0.embedding_dim", 10**13, "t_cat_0"),
    ("tables.0.embedding_dim", 16, "t_cat"),
    ("tables.0.pooling", "none", "pooling"),
    ("tables.0.weight_init_min", 5.0, "weight_init_min=5.0"),
    ("tables.0.weight_init_min", "low", "weight_init_min|number"),
    ("features.0.bucket", 5, "unknown field 'bucket'"),
    ("", [1, 2], "object"),
]

TEXTS = [
    ("", "not valid JSON"),
    ("42", "object"),
    ("\ufeff{}", "BOM"),
    (json.dumps({"label": "label"})[:-1] + ",}", "not valid JSON"),
]


def _spoilt(fields: Sequence[tuple[str, Any, str]]) -> list[tuple[Any, ...]]:
    values = [
        ("", says, edited(SCHEMA, "schema.json", place, value)) for place, value, says in fields
    ]
    texts = [("", f"schema.json|{says}", content("schema.json", text)) for text, says in TEXTS]
    return [*values, *texts, BINARY]


def _of_training() -> list[Mistake]:
    return mistakes("rayrec train", "own schema", _spoilt(FIELDS))


def _of_planning() -> list[Mistake]:
    """The planner takes tables of any kind and width, so it has fewer mistakes."""
    found = [one for one in FIELDS if one[:2] not in OF_DLRM]
    return mistakes("rayrec plan", "plan, own schema", _spoilt(found))


IN_TOWERS = [
    ("", "unknown field 'nothing'", edited("films/schema.json", "schema.json", "nothing", 1)),
    ("", "not valid JSON", content("schema.json", "{")),
    ("", "'other'", edited("films/schema.json", "schema.json", "features.0.column", "other")),
    ("", "label|'other'", edited("films/schema.json", "schema.json", "label", "other")),
    ("", "item|rows", edited("films/schema.json", "schema.json", "tables.1.num_embeddings", 3)),
    ("", "user|hashed", edited("films/schema.json", "schema.json", "features.0.hash_buckets", 5)),
]

IN_SCORES = [
    ("--schema ''", "--schema"),
    ("--schema {data}/nothing.json", "nothing.json"),
    ("--schema {own}/schema.json", "not valid JSON", content("schema.json", "{")),
    (
        "--schema {own}/schema.json",
        "'other' is missing",
        edited(SCHEMA, "schema.json", "features.0.column", "other"),
    ),
    (
        "--schema {own}/schema.json",
        "t_cat_0",
        edited(SCHEMA, "schema.json", "tables.0.num_embeddings", 900),
    ),
    ("--schema {own}/schema.json", "dense", edited(SCHEMA, "schema.json", "dense", ["d_0"])),
    ("--schema {data}/films/schema.json", "is missing"),
]

MISTAKES = [
    *_of_training(),
    *_of_planning(),
    *mistakes("rayrec train", "towers, own schema", IN_TOWERS),
    *mistakes("rayrec evaluate", "scores", IN_SCORES),
]
