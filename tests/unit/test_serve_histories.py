"""Models of histories where there is no log: artifacts, recipes and profiles."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest
import torch

from rayrec.cli.profile import measure
from rayrec.data import Feature, FeatureSchema, SequenceColumn, to_batch
from rayrec.errors import ConfigError, InputError
from rayrec.layout.tables import EmbeddingConfig
from rayrec.recipe import ModelRecipe
from rayrec.runs.held_out import IdColumn
from rayrec.runs.retrieval import TwoTowerModel, TwoTowerRecipe
from rayrec.serve import Predictor, export
from tests.unit.serve_worlds import a_model, a_schema, a_world, rows


def with_history(schema: FeatureSchema) -> FeatureSchema:
    """The schema with `seen` as the last two items of the user in a log."""
    history = Feature(name="seen", column="item", history=2)
    features = tuple(history if one.name == "seen" else one for one in schema.features)
    return replace(schema, features=features, user="user")


def test_a_request_brings_its_history_as_a_list(tmp_path):
    world = a_world(tmp_path)
    export(world.checkpoint, tmp_path / "out", schema=with_history(world.schema), types="fp32")
    predictor = Predictor.load(tmp_path / "out")
    table = rows(50, seed=3)
    shortened = [None if one is None else one[-2:] for one in table["seen"].to_pylist()]
    assert shortened != table["seen"].to_pylist()
    place = table.schema.get_field_index("seen")
    column = pa.array(shortened, pa.list_(pa.int64()))
    wanted = world.logits(table.set_column(place, "seen", column)).sigmoid()
    torch.testing.assert_close(predictor.predict(table), wanted, rtol=1e-5, atol=1e-6)


def test_numbers_beside_ids_are_not_asked_for_a_model_that_reads_none(tmp_path):
    world = a_world(tmp_path)
    times = (SequenceColumn(name="times", column="at"),)
    schema = replace(world.schema, sequences=times)
    with pytest.raises(ConfigError, match=r"the sequence 'times'.*ids and dense columns alone"):
        export(
            world.checkpoint, tmp_path / "out", schema=schema, model=lambda: a_model(world.schema)
        )
    assert not (tmp_path / "out").exists()
    # a recipe knows that its model reads none, so that requests need none
    export(world.checkpoint, tmp_path / "out", schema=schema)
    assert Predictor.load(tmp_path / "out").schema.sequences == ()


def test_models_that_pool_refuse_tables_of_sequences():
    schema = a_schema()
    item = EmbeddingConfig(60, 8, "item", feature_names=["item", "seen"])
    schema = replace(schema, tables=(schema.tables[0], item, schema.tables[2]))
    assert [table.name for table in schema.embedding_bag_configs()] == ["user", "words"]
    with pytest.raises(ConfigError, match=r"table 'item' has pooling none, and dlrm"):
        ModelRecipe(model="dlrm", schema=schema.to_json())()
    towers = TwoTowerRecipe(
        schema=schema.to_json(),
        model=TwoTowerModel(query=("user",), candidate=("item",), layers=(8,), temperature=1.0),
    )
    for build in (towers, towers.sides):
        with pytest.raises(ConfigError, match=r"table 'item' has pooling none, and two_tower"):
            build()


def test_what_reads_columns_as_they_are_refuses_a_history(tmp_path):
    schema = with_history(a_schema())
    with pytest.raises(ConfigError, match=r"'seen' is a history, which is cut from a log"):
        measure(schema, str(tmp_path), step_rows=10)
    with pytest.raises(ConfigError, match=r"'seen' is not in the schema, or is hashed or a hist"):
        IdColumn(schema, "seen")


def test_a_table_without_the_list_of_a_history_says_so():
    with pytest.raises(InputError, match=r"column 'seen' is missing"):
        to_batch(rows(3).drop_columns(["seen"]), with_history(a_schema()))
