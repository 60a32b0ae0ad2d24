"""DIN: equal to a padded twin, with histories of any length; built from a schema; served."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from rayrec.data import DenseColumn, Feature, FeatureSchema, to_batch
from rayrec.errors import ConfigError, InputError
from rayrec.layout import EmbeddingBagConfig, EmbeddingConfig
from rayrec.models import DIN, DLRMTrain
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection
from rayrec.recipe import ModelRecipe
from rayrec.serve import Predictor, export
from rayrec.serve.scorer import Scorer
from rayrec.sparse import KeyedJaggedTensor
from tests.unit.checkpoint_worlds import make_truth, random_plan, save_world
from tests.unit.din_twin import KEYS, din, ids, twin


@pytest.mark.seeds(range(100))
def test_din_equals_its_padded_twin(seed):
    model, features = din(seed), ids(seed)
    dense = torch.randn(features.stride(), 2, generator=torch.Generator().manual_seed(seed))
    ours, reference = model(dense, features), twin(model, dense, features)
    # float32 sums of up to 90 values in another order
    torch.testing.assert_close(ours.double(), reference, atol=1e-5, rtol=1e-5)
    parameters = list(model.parameters())
    got = torch.autograd.grad(ours.sum(), parameters, allow_unused=True)
    wanted = torch.autograd.grad(reference.sum(), parameters, allow_unused=True)
    for one, want in zip(got, wanted, strict=True):
        if one is None:  # the table of actions in a model that reads none
            assert want is None and not model.beside
            continue
        want = torch.zeros_like(one) if want is None else want
        scale = max(1.0, float(want.abs().max()))
        torch.testing.assert_close(one / scale, want / scale, atol=1e-5, rtol=1e-5)


def test_a_history_without_its_candidate_is_refused():
    collection = din(0).embedding_collection
    with pytest.raises(ConfigError, match="histories name 'gone'"):
        DIN(collection, {"before": "gone"}, [1])
    with pytest.raises(ConfigError, match="there is no history"):
        DIN(collection, {}, [1])
    for beside in ({"before": ["gone"]}, {"gone": ["done"]}):
        with pytest.raises(ConfigError, match="histories name 'gone'"):
            DIN(collection, {"before": "item"}, [1], beside=beside)


def test_actions_that_are_not_one_for_each_item_are_refused():
    model, features = din(0), ids(0)
    bags = {key: features[key] for key in KEYS} | {"done": features["shops"]}
    other = KeyedJaggedTensor(
        KEYS,
        torch.cat([bag.values() % 5 for bag in bags.values()]),
        lengths=torch.cat([bag.lengths() for bag in bags.values()]),
        stride=features.stride(),
    )
    with pytest.raises(InputError, match="'before' and 'done' have not as many events"):
        model(torch.randn(features.stride(), 2), other)


def a_schema(actions: bool = False, **changes: object) -> FeatureSchema:
    """A candidate, its history as lists of the last ten, with or without what was done with each
    item; a pooled user and a dense column.
    """
    done = Feature(name="done", column="done", most_recent=10, aligned_with="before")
    of_actions = EmbeddingConfig(5, 4, name="actions", feature_names=["done"])
    before = {"name": "before", "column": "before", "most_recent": 10} | changes
    return FeatureSchema(
        label="click",
        dense=(DenseColumn(column="price"),),
        features=(
            Feature(name="item", column="item"),
            Feature(**before),
            Feature(name="user", column="user", hash_buckets=8),
            *([done] if actions else []),
        ),
        tables=(
            EmbeddingConfig(20, 4, name="goods", feature_names=["item", "before"]),
            *([of_actions] if actions else []),
            EmbeddingBagConfig(8, 6, name="users", feature_names=["user"]),
        ),
    )


def rows(count: int) -> pa.Table:
    rng = np.random.default_rng(3)
    before = [rng.integers(0, 20, rng.integers(0, 14)).tolist() for _ in range(count)]
    return pa.table(
        {
            "click": rng.integers(0, 2, count).astype(np.float32),
            "price": rng.normal(size=count),
            "item": rng.integers(0, 20, count),
            "before": pa.array(before, pa.list_(pa.int64())),
            "done": pa.array([[i % 5 for i in one] for one in before], pa.list_(pa.int64())),
            "user": [f"u{k}" for k in rng.integers(0, 99, count)],
        }
    )


def test_a_recipe_builds_it_from_a_schema():
    recipe = ModelRecipe(model="din", schema=a_schema().to_json(), attention_layers=(5,))
    assert ModelRecipe.from_extras(recipe.to_extras(), "x") == recipe
    assert recipe().model.histories == {"before": "item"} and not recipe().model.beside
    schema = a_schema(actions=True)
    assert ModelRecipe(model="din", schema=schema.to_json())().model.beside == {"before": ["done"]}
    alone = [replace(one, aligned_with=None) for one in schema.features]
    with pytest.raises(ConfigError, match=r"'done' is a history without a candidate.*\['before'\]"):
        ModelRecipe(model="din", schema=replace(schema, features=tuple(alone)).to_json())()
    with pytest.raises(ConfigError, match=r"'goods' .*beside them \['item', 'before'\]"):
        ModelRecipe(model="din", schema=a_schema(most_recent=None).to_json())()
    with pytest.raises(ConfigError, match="'before' has weights"):
        ModelRecipe(model="din", schema=a_schema(weights="w").to_json())()
    pooled = FeatureSchema(
        label="click",
        features=(Feature(name="user", column="user"),),
        tables=(EmbeddingBagConfig(8, 6, name="users", feature_names=["user"]),),
    )
    with pytest.raises(ConfigError, match="no table of pooling none"):
        ModelRecipe(model="din", schema=pooled.to_json())()
    old = {k: v for k, v in recipe.to_extras()["recipe"].items() if k != "attention_layers"}
    assert ModelRecipe.from_extras({"recipe": old}, "x").attention_layers == (80, 40)


@pytest.mark.parametrize("actions", [False, True])
def test_it_is_exported_and_scores_as_it_was_trained(tmp_path, actions):
    schema = a_schema(actions)
    recipe = ModelRecipe(model="din", schema=schema.to_json(), attention_layers=(5,))
    module = recipe().eval()
    tables = [*schema.embedding_configs(), *schema.embedding_bag_configs()]
    rng = random.Random(4)
    truths = [make_truth(rng, t.name, t.num_embeddings, t.embedding_dim, "row") for t in tables]
    dense = {name: p.detach() for name, p in module.named_parameters() if not p.is_meta}
    extras = recipe.to_extras()
    plan = random_plan(rng, truths, 2)
    save_world(str(tmp_path / "ck"), truths, plan, dense=dense, extras=extras)
    # the model in memory, with the rows that were saved
    sequences = EmbeddingCollection(schema.embedding_configs())
    bags = EmbeddingBagCollection(schema.embedding_bag_configs())
    with torch.no_grad():
        for table, truth in zip(tables, truths, strict=True):
            held = bags.embedding_bags if table.name == "users" else sequences.embeddings
            held[table.name].weight.copy_(truth.weight)
    module.model.embedding_collection = sequences
    module.model.embedding_bag_collection = bags
    manifest = export(tmp_path / "ck", tmp_path / "out", types="fp32")
    assert manifest.program is None and "sequences" in manifest.no_program
    predictor = Predictor.load(tmp_path / "out")
    table = rows(40)
    wanted = module(to_batch(table, schema))[1][1]
    torch.testing.assert_close(predictor.logits(table), wanted, rtol=1e-5, atol=1e-5)
    asked = {"price": 0.3, "before": [1, 2, 3], "done": [4, 0, 1], "user": "u1"}
    items = [{"item": item} for item in (4, 5)]
    both = predictor.predict_candidates(asked, items)
    alone = predictor.predict([asked | item for item in items])
    torch.testing.assert_close(both, alone)
    # what the user did with each item may not differ in its length; all else may be a candidate's
    user, own = (
        {k: v for k, v in asked.items() if k != "price"},
        [i | {"price": 0.3} for i in items],
    )
    torch.testing.assert_close(predictor.predict_candidates(user, own), alone)
    lists = {k: v for k, v in asked.items() if k in ("before", "done")}
    user, own = {"user": "u1", "price": 0.3}, [item | lists for item in items]
    torch.testing.assert_close(predictor.predict_candidates(user, own), alone)
    for request, looked_up in [((asked, items), 3), ((user, own), 6)]:
        read = predictor.requests.of_user([request[0]], request[1])
        assert len(read.ids["before"].values()) == looked_up
    empty = asked | {"before": [], "done": []}
    nothing = predictor.predict([empty | item for item in items])
    torch.testing.assert_close(predictor.predict_candidates(empty, items), nothing)
    others = predictor.predict([asked | item | {"done": [0, 0, 0]} for item in items])
    assert torch.allclose(others, alone) != actions


def test_a_model_of_a_users_own_that_is_made_of_it_has_the_user_in_every_row():
    class Own(DIN):
        """Its forward pass may want anything of the histories."""

    model = din(0)
    assert Scorer(DLRMTrain(model)).user_once(are_bags=False) is not None
    model.__class__ = Own
    assert Scorer(DLRMTrain(model)).user_once(are_bags=False) is None
