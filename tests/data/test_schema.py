"""The schema's JSON form and every contradiction it must refuse."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from rayrec.errors import ConfigError
from rayrec.layout.schema import FeatureSchema
from rayrec.layout.schema_columns import DenseColumn
from rayrec.layout.tables import DataType, PoolingType

GOOD = {
    "label": "label",
    "dense": ["d0", {"column": "d1", "fill": -1.5}],
    "features": [
        {"name": "user", "column": "user_id"},
        {"name": "genres", "column": "genres"},
        {"name": "city", "column": "city", "hash_buckets": 100},
        {"name": "clicked", "column": "user_clicked", "weights": "clicked_w"},
    ],
    "tables": [
        {
            "name": "t_user",
            "num_embeddings": 500,
            "embedding_dim": 16,
            "pooling": "sum",
            "features": ["user", "clicked"],
        },
        {
            "name": "t_genre",
            "num_embeddings": 32,
            "embedding_dim": 8,
            "pooling": "mean",
            "features": ["genres"],
            "data_type": "fp16",
        },
        {
            "name": "t_city",
            "num_embeddings": 100,
            "embedding_dim": 15,
            "features": ["city"],
            "data_type": "bf16",
        },
        {
            "name": "t_user_small",
            "num_embeddings": 400,
            "embedding_dim": 4,
            "features": ["user"],
            "weight_init_max": 0.01,
        },
    ],
}


def test_json_reads_into_typed_values():
    schema = FeatureSchema.from_json(json.dumps(GOOD))
    assert schema.dense == (DenseColumn(column="d0"), DenseColumn(column="d1", fill=-1.5))
    assert schema.feature_names() == ("user", "genres", "city", "clicked")
    assert schema.is_weighted
    assert schema.columns() == (
        "label",
        "d0",
        "d1",
        "user_id",
        "genres",
        "city",
        "user_clicked",
        "clicked_w",
    )
    assert schema.limits() == {"user": 400, "clicked": 500, "genres": 32, "city": 100}
    assert schema.embedding_bag_configs()[3].init_bounds() == (-0.05, 0.01)
    genre = schema.embedding_bag_configs()[1]
    assert (genre.pooling, genre.data_type, genre.feature_names) == (
        PoolingType.MEAN,
        DataType.FP16,
        ["genres"],
    )


def test_json_round_trip_and_pickle_keep_the_schema(tmp_path):
    schema = FeatureSchema.from_json(json.dumps(GOOD))
    schema.save(tmp_path / "schema.json")
    assert FeatureSchema.load(tmp_path / "schema.json") == schema
    assert pickle.loads(pickle.dumps(schema)) == schema


def test_an_init_fn_is_no_json():
    schema = FeatureSchema.from_json(json.dumps(GOOD))
    table = replace(schema.tables[2], init_fn=lambda t: t.zero_())
    assert (table.data_type, table.embedding_dim) == (DataType.BF16, 15)
    with pytest.raises(ConfigError, match="'t_city' has an init_fn"):
        replace(schema, tables=(*schema.tables[:2], table, schema.tables[3])).to_json()


def test_configs_are_copies():
    schema = FeatureSchema.from_json(json.dumps(GOOD))
    schema.embedding_bag_configs()[0].feature_names.append("x")
    assert schema == FeatureSchema.from_json(json.dumps(GOOD))


def change(path: list, value: object) -> dict:
    raw = copy.deepcopy(GOOD)
    at: object = raw
    for key in path[:-1]:
        at = at[key]  # type: ignore[index]
    if value is KeyError:
        del at[path[-1]]  # type: ignore[attr-defined]
    else:
        at[path[-1]] = value  # type: ignore[index]
    return raw


BAD = {
    "table twice": (["tables", 3, "name"], "t_user", "table 't_user' is named twice"),
    "feature twice": (["features", 1, "name"], "user", "feature 'user' is named twice"),
    "dense twice": (["dense", 0], "d1", "dense column 'd1' is named twice"),
    "feature in no table": (["tables", 2, "features"], ["user"], "feature 'city' is in no table"),
    "unknown feature": (
        ["tables", 2, "features"],
        ["town", "city"],
        "table 't_city' names the unknown feature 'town'",
    ),
    "column missing": (
        ["features", 2, "column"],
        KeyError,
        r": features\[2\] has no field 'column'",
    ),
    "too many buckets": (
        ["features", 2, "hash_buckets"],
        101,
        "'city' hashes into 101 buckets but table 't_city' has num_embeddings=100",
    ),
    "no buckets": (["features", 2, "hash_buckets"], 0, "hash_buckets=0"),
    "unknown field": (["tables", 0, "rows"], 3, "unknown field 'rows'"),
    "unknown top field": (["labels"], "x", "unknown field 'labels'"),
    "unknown pooling": (
        ["tables", 0, "pooling"],
        "max",
        r"tables\[0\]\.pooling is 'max'; it must be one of 'sum', 'mean'",
    ),
    "unknown type": (
        ["tables", 0, "data_type"],
        "int8",
        r"data_type is 'int8'; it must be one of 'fp32', 'fp16'",
    ),
    "wrong type": (["tables", 0, "num_embeddings"], "500", r"tables\[0\]\.num_embeddings is '500'"),
    "bool is no int": (["tables", 0, "num_embeddings"], True, "num_embeddings is true"),
    "no width": (["tables", 0, "embedding_dim"], 0, "at least one column"),
    "bounds crossed": (["tables", 3, "weight_init_max"], -1.0, "weight_init_max=-1.0"),
    "no label": (["label"], "", "no label column"),
    "leak as feature": (["features", 0, "column"], "label", "leak"),
    "leak as dense": (["dense", 0], "label", "leak"),
    "no features": (["features"], [], "no sparse features"),
    "empty table": (["tables", 3, "features"], [], "'t_user_small' has no features"),
    "huge table": (["tables", 3, "num_embeddings"], 10**18, "'t_user_small' has 10{18} x"),
    "infinite bound": (["tables", 3, "weight_init_max"], 1e999, "Infinity"),
    "huge bound": (["tables", 3, "weight_init_max"], 10**400, "must be a finite number"),
    "wide fill": (["dense", 0], {"column": "d0", "fill": 1e39}, r"fill=1e\+39; .* float32"),
    "bound beyond float32": (["tables", 3, "weight_init_max"], 1e39, r"max=1e\+39; in FP32"),
    "huge fill": (["dense", 0], {"column": "d0", "fill": 10**400}, "must be a finite number"),
    "wrong type of a name": (["label"], 5, "the schema: label is 5; it must be a text or a list"),
    "not an object": (["tables", 0], 7, r"tables\[0\] is 7; it must be an object"),
}


@pytest.mark.parametrize("case", BAD)
def test_contradictions_raise_and_name_their_place(case):
    path, value, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        FeatureSchema.from_json(json.dumps(change(path, value)))


def test_unreadable_files_are_config_errors(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the schema"):
        FeatureSchema.load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=rf"working directory is {Path.cwd()}, and that of ranks"):
        FeatureSchema.load("none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match=r"bad\.json is not valid JSON"):
        FeatureSchema.load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"label": "a", "label": "b", "features": [], "tables": []}', "'label' occurs twice"),
        ('{"label": "a", "dense": [{"column": "d", "fill": NaN}]}', "NaN is no number"),
        ("[" * 100_000, "nested too deeply|recursion"),
        ("[]", "array, expected an object"),
    ],
)
def test_what_json_readers_let_through_is_refused(text, message):
    with pytest.raises(ConfigError, match=rf"(?s)clicks\.json.*({message})"):
        FeatureSchema.from_json(text, "clicks.json")


def test_a_contradiction_names_the_file():
    with pytest.raises(ConfigError, match=r"^clicks\.json: table 't_user' is named twice"):
        FeatureSchema.from_json(json.dumps(change(["tables", 3, "name"], "t_user")), "clicks.json")
