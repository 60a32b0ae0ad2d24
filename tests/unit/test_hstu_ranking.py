"""HSTU for ranking: equal to a padded twin; built from a schema, with its times; served."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from rayrec.data import DenseColumn, Feature, FeatureSchema, SequenceColumn, to_batch
from rayrec.data.batch import BatchPlace
from rayrec.errors import ConfigError, InputError
from rayrec.hstu_config import HSTUConfig
from rayrec.layout import EmbeddingBagConfig, EmbeddingConfig
from rayrec.layout.schema_sequences import schema_of_lists
from rayrec.models import HSTURanking
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection, HSTUEncoder
from rayrec.recipe import ModelRecipe
from rayrec.serve import Predictor, export
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor
from tests.unit.checkpoint_worlds import make_truth, random_plan, save_world
from tests.unit.hstu_twin import DIM, HISTORIES, KEYS, Rows, cut, ranking, twin


@pytest.mark.seeds(range(100))
def test_it_equals_its_twin(seed):
    model, batch = ranking(seed), Rows(seed)
    ours, reference = model.forward_batch(batch), twin(model, batch)
    if not batch.sparse_features.stride():
        assert len(ours) == 0
        ours.sum().backward()
        return
    # float32 sums of up to 94 tokens, through two layers
    scale = max(1.0, float(reference.detach().abs().max()))
    torch.testing.assert_close(ours.double() / scale, reference / scale, atol=2e-5, rtol=1e-5)
    parameters = list(model.parameters())
    got = torch.autograd.grad(ours.sum(), parameters, allow_unused=True)
    wanted = torch.autograd.grad(reference.sum(), parameters, allow_unused=True)
    for one, want in zip(got, wanted, strict=True):
        want = torch.zeros_like(one) if want is None else want
        scale = max(1.0, float(want.abs().max()))
        torch.testing.assert_close(one / scale, want / scale, atol=5e-5, rtol=1e-5)


def test_dropout_follows_the_place_of_a_row_in_the_run():
    """Two halves of a batch drop what the whole does, and another step drops something else."""
    model, batch = ranking(1), Rows(6)
    for module in model.modules():
        if hasattr(module, "p"):
            module.p = 0.4
    rows = batch.sparse_features.stride()
    batch.place = BatchPlace(-7, 3, 0)
    whole, parts = model.forward_batch(batch), []
    for rank in range(2):
        low, high = rank * rows // 2, (rank + 1) * rows // 2
        part = Rows(6)
        part.place = BatchPlace(-7, 3, low)
        part.sparse_features = cut(batch.sparse_features, low, high)
        part.dense_features = batch.dense_features[low:high]
        part.sequences = {
            name: cut(KeyedJaggedTensor([name], one.values(), lengths=one.lengths()), low, high)[
                name
            ]
            for name, one in batch.sequences.items()
        }
        parts.append(model.forward_batch(part))
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-5)
    batch.place = BatchPlace(-7, 4, 0)
    assert not torch.allclose(model.forward_batch(batch), whole, atol=1e-3)
    batch.place = None
    assert not torch.allclose(model.forward_batch(batch), model.forward_batch(batch), atol=1e-3)
    assert torch.equal(model.eval().forward_batch(batch), model.forward_batch(batch))


def test_a_first_row_without_events_has_a_time_too():
    model, batch = ranking(5), Rows(5)
    lengths = batch.sparse_features["items"].lengths().tolist()
    empty = lengths.index(0)
    batch.sparse_features = cut(batch.sparse_features, empty, len(lengths))
    batch.dense_features = batch.dense_features[empty:]
    times = batch.sequences["times"].to_dense()[empty:]
    lengths = torch.tensor(lengths[empty:])
    batch.sequences["times"] = JaggedTensor(torch.cat(times), lengths=lengths)
    reference = twin(model, batch)
    torch.testing.assert_close(model.forward_batch(batch).double(), reference, atol=2e-5, rtol=1e-5)


def test_what_does_not_fit_is_refused():
    model, batch = ranking(1), Rows(2)
    collections = list(model.embedding_collections)

    def made(histories: dict[str, str | None], **options: Any) -> HSTURanking:
        encoder = HSTUEncoder(DIM, 94, time_buckets=options.pop("buckets", 0))
        return HSTURanking(collections, histories, encoder, [1], **options)

    with pytest.raises(ConfigError, match="histories name 'gone'"):
        made({"gone": "item"})
    with pytest.raises(ConfigError, match="no history has a candidate"):
        made({"actions": None})
    with pytest.raises(ConfigError, match=r"times=None and an encoder with time_buckets=4"):
        made(HISTORIES, buckets=4)
    with pytest.raises(ConfigError, match=r"times='times' and an encoder with time_buckets=0"):
        made(HISTORIES, times="times")
    with pytest.raises(ConfigError, match=r"candidate_time='now' without times"):
        made(HISTORIES, candidate_time="now")
    with pytest.raises(ConfigError, match=r"two EmbeddingCollections look up 'actions'"):
        HSTURanking([*collections, collections[1]], HISTORIES, HSTUEncoder(DIM), [1])

    ids = batch.sparse_features
    lengths = ids.lengths().clone().view(len(KEYS), -1)
    # as many events in all, and not in each row
    lengths[3] = lengths[3].roll(1)
    batch.sparse_features = KeyedJaggedTensor(
        KEYS, ids.values(), lengths=lengths.flatten(), stride=ids.stride()
    )
    with pytest.raises(InputError, match=r"'items' and 'makers' have not as many events"):
        model.forward_batch(batch)
    batch = Rows(2)
    times = batch.sequences["times"]
    batch.sequences["times"] = JaggedTensor(times.values()[1:], lengths=times.lengths())
    with pytest.raises(InputError, match=r"'items' and 'times' have not as many events"):
        model.forward_batch(batch)
    batch = Rows(2)
    batch.sequences["now"] = batch.sequences["times"]
    with pytest.raises(InputError, match=r"row \d of the batch has \d+ times, in 'now'; each row"):
        model.forward_batch(batch)


def a_schema(times: bool = False, **changes: Any) -> FeatureSchema:
    """Items with their makers and actions as lists of the last ten; a user, a dense column."""
    recent = {"most_recent": 10, "aligned_with": "items"}
    given: dict[str, dict[str, Any]] = {
        "item": {},
        "items": {"most_recent": 10},
        "maker": {},
        "makers": recent,
        "actions": recent,
        "user": {"hash_buckets": 8},
    }
    for name, other in changes.items():
        given[name] = given[name] | other
    features = [Feature(name=name, column=name, **own) for name, own in given.items()]
    sequences = (
        SequenceColumn(name="times", column="times", **recent),
        SequenceColumn(name="now", column="now"),
    )
    return FeatureSchema(
        label="click",
        dense=(DenseColumn(column="price"),),
        features=tuple(features),
        sequences=sequences if times else (),
        tables=(
            EmbeddingConfig(20, 4, name="goods", feature_names=["item", "items"]),
            EmbeddingConfig(9, 4, name="makers", feature_names=["maker", "makers"]),
            EmbeddingConfig(4, 3, name="actions", feature_names=["actions"]),
            EmbeddingBagConfig(8, 6, name="users", feature_names=["user"]),
        ),
    )


def a_recipe(schema: FeatureSchema, **options: Any) -> ModelRecipe:
    hstu = HSTUConfig(width=8, **options)
    return ModelRecipe(model="hstu_ranking", schema=schema.to_json(), hstu=hstu)


def rows(count: int) -> pa.Table:
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 14, count)

    def lists(most: int) -> pa.Array:
        own = [rng.integers(0, most, n).tolist() for n in lengths]
        return pa.array(own, pa.list_(pa.int64()))

    return pa.table(
        {
            "click": rng.integers(0, 2, count).astype(np.float32),
            "price": rng.normal(size=count),
            "item": rng.integers(0, 20, count),
            "items": lists(20),
            "maker": rng.integers(0, 9, count),
            "makers": lists(9),
            "actions": lists(4),
            "times": lists(10**6),
            "now": rng.integers(10**6, 10**7, count),
            "user": [f"u{k}" for k in rng.integers(0, 99, count)],
        }
    )


def test_a_recipe_builds_it_from_a_schema():
    recipe = a_recipe(a_schema(times=True), layers=3, times="times", candidate_time="now")
    assert ModelRecipe.from_extras(recipe.to_extras(), "x") == recipe
    module = recipe()
    model = module.model
    assert model.histories == {"items": "item", "makers": "maker", "actions": None}
    # a dense column, a user, ten events and the candidate
    assert (model.encoder.max_length, len(model.encoder.layers)) == (13, 3)
    old = {k: v for k, v in recipe.to_extras()["recipe"].items() if k != "hstu"}
    assert ModelRecipe.from_extras({"recipe": old}, "x").hstu == HSTUConfig()
    # what the batch has reaches the model: its times, and its place for dropout
    for collection in (*model.embedding_collections, model.embedding_bag_collection):
        collection.to_empty(device="cpu").reset_parameters()
    batch = to_batch(rows(20), a_schema(times=True))
    batch.place = BatchPlace(1, 2, 0)
    logits = module(batch)[1][1]
    assert torch.equal(module(batch)[1][1], logits)
    later = replace(batch, place=BatchPlace(1, 3, 0))
    assert not torch.equal(module(later)[1][1], logits)
    module.eval()
    for name in ("times", "now"):
        for layer in model.encoder.layers:
            torch.nn.init.normal_(layer.time_bias)
        own = batch.sequences[name]
        moved = JaggedTensor(own.values() * 9, lengths=own.lengths())
        other = replace(batch, sequences={**batch.sequences, name: moved})
        assert not torch.equal(module(other)[1][1], module(batch)[1][1]), name


@pytest.mark.parametrize(
    ("schema", "options", "says"),
    [
        ({"items": {"most_recent": None}}, {}, r"'makers' is aligned with 'items', and they keep"),
        ({"item": {"most_recent": 10}}, {}, r"'items' has not one entry for each of 'item'"),
        ({"maker": {"weights": "w"}}, {}, r"'maker' has weights"),
        ({"makers": {"aligned_with": None}}, {}, r"'makers' has not one entry for each of 'items'"),
        ({"makers": {"most_recent": None, "aligned_with": None}}, {}, r"beside them \['maker', 'm"),
        ({}, {"times": "gone"}, r"times='gone' is no sequence of the schema, which has \['now', "),
        ({}, {"times": "now"}, r"'now' has not one entry for each of 'items'"),
        ({}, {"times": "times", "candidate_time": "times"}, r"candidate_time='times' is a history"),
        ({}, {"candidate_time": "now"}, r"candidate_time='now' without times"),
        ({}, {"heads": 3}, r"width=8 cannot be divided among heads=3"),
        ({}, {"dropout": 1.0}, r"dropout=1\.0; it must be at least 0 and below 1"),
        ({}, {"layers": 0}, r"layers=0"),
    ],
)
def test_a_schema_that_is_not_one_sequence_is_refused(schema, options, says):
    with pytest.raises(ConfigError, match=says):
        a_recipe(a_schema(times=True, **schema), **options)()


def test_a_schema_without_a_candidate_is_refused():
    whole = a_schema()
    actions = replace(whole.features[4], aligned_with=None)
    alone = replace(whole, features=(actions,), tables=whole.tables[2:3])
    with pytest.raises(ConfigError, match="no table of pooling none with a history and a cand"):
        a_recipe(alone)()


def of_log(schema: FeatureSchema) -> FeatureSchema:
    """The schema of a log, from which the last ten events are cut."""
    features = [
        one if one.most_recent is None else replace(one, most_recent=None, **LOG)
        for one in schema.features
    ]
    columns = {"items": "item", "makers": "maker", "actions": "action"}
    features = [replace(one, column=columns.get(one.name, one.column)) for one in features]
    sequences = [
        one if one.most_recent is None else replace(one, column="now", most_recent=None, **LOG)
        for one in schema.sequences
    ]
    return replace(
        schema, features=tuple(features), sequences=tuple(sequences), user="user", time="now"
    )


LOG: dict[str, Any] = {"history": 10, "aligned_with": None}


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"times": "times"}, {"times": "times", "candidate_time": "now"}]
)
def test_it_is_exported_and_scores_as_it_was_trained(tmp_path, log, options):
    schema = a_schema(times=bool(options))
    schema = of_log(schema) if log else schema
    recipe = a_recipe(schema, **options)
    module = recipe().eval()
    for layer in module.model.encoder.layers if options else ():
        torch.nn.init.normal_(layer.time_bias)
    tables = [*schema.embedding_configs(), *schema.embedding_bag_configs()]
    rng = random.Random(4)
    truths = [make_truth(rng, t.name, t.num_embeddings, t.embedding_dim, "row") for t in tables]
    dense = {name: p.detach() for name, p in module.named_parameters() if not p.is_meta}
    plan = random_plan(rng, truths, 2)
    save_world(str(tmp_path / "ck"), truths, plan, dense=dense, extras=recipe.to_extras())
    # the model in memory, with the rows that were saved
    goods, actions = tables[:2], tables[2:3]
    sequences = torch.nn.ModuleList(EmbeddingCollection(own) for own in (goods, actions))
    bags = EmbeddingBagCollection(tables[3:])
    for table, truth in zip(tables, truths, strict=True):
        for collection in (*sequences, bags):
            held = getattr(collection, "embeddings", None) or collection.embedding_bags
            if table.name in held:
                held[table.name].weight.data.copy_(truth.weight)
    module.model.embedding_collections = sequences
    module.model.embedding_bag_collection = bags
    # the made-up rows of the export have as many makers and actions as items
    manifest = export(tmp_path / "ck", tmp_path / "out", types="fp32")
    assert manifest.program is None and "sequences" in manifest.no_program
    predictor = Predictor.load(tmp_path / "out")
    table = rows(40)
    wanted = module(to_batch(table, schema_of_lists(schema)))[1][1]
    assert wanted.std() > 0.01
    torch.testing.assert_close(predictor.logits(table), wanted, rtol=1e-5, atol=1e-5)
    # a request needs the times that the model reads, and no others
    assert {one.name for one in predictor.schema.sequences} == set(options.values())
    for name in options.values():
        moved = table.set_column(table.schema.get_field_index(name), name, later(table[name]))
        assert not torch.allclose(predictor.logits(moved), wanted, atol=1e-3), name
        with pytest.raises(InputError, match=f"column '{name}' is missing"):
            predictor.logits(table.drop_columns([name]))
    asked = {"price": 0.3, "items": [1, 2, 3], "makers": [1, 2, 0], "actions": [0, 3, 3]}
    asked |= {"times": [5, 5, 900], "now": 1000} if options else {}
    candidates = [{"item": item, "maker": item % 9} for item in (4, 15)]
    candidates += [{"item": item, "maker": 3} for item in range(9)]
    alone = predictor.predict([asked | {"user": "u1"} | one for one in candidates])
    # rows of the history that are looked up; a context of each candidate wants all in every row
    user, times = {"user": "u1"}, {"now": asked.pop("now")} if options else {}
    for of_user, own, looked_up in [
        (user | times, {}, 3),
        (times, user, 33),
        (user, times, 33 if "candidate_time" in options else 3),
    ]:
        given = [asked | of_user], [one | own for one in candidates]
        assert len(predictor.requests.of_user(*given).ids["items"].values()) == looked_up
        torch.testing.assert_close(predictor.predict_candidates(*given), alone)
        of_one = predictor.predict_candidates(given[0], given[1][:1])
        torch.testing.assert_close(of_one, alone[:1])
        assert predictor.predict_candidates(given[0], []).shape == (0,)
    none = asked | user | times | {name: [] for name in asked if name != "price"}
    nothing = predictor.predict([none | one for one in candidates])
    torch.testing.assert_close(predictor.predict_candidates(none, candidates), nothing)
    asked |= times
    with pytest.raises(InputError, match=r"not as many events in each row|they are aligned"):
        predictor.predict([asked | {"user": "u1", "makers": [1]} | candidates[0]])
    if options:
        with pytest.raises(InputError, match=r"'times' has 2 entries|they are aligned"):
            predictor.predict([asked | {"user": "u1", "times": [1, 2]} | candidates[0]])


def later(column: pa.ChunkedArray) -> pa.Array:
    """Every time, or list of times, spread out."""
    spread = [
        [9 * t for t in one] if isinstance(one, list) else 9 * one for one in column.to_pylist()
    ]
    return pa.array(spread)


@pytest.mark.parametrize("beside", ["pooled", "dense"])
def test_a_candidate_that_stands_in_the_context_too_is_a_row_of_its_own(tmp_path, beside):
    schema = a_schema()
    if beside == "pooled":
        fame = EmbeddingBagConfig(20, 6, name="fame", feature_names=["item"])
        schema = replace(schema, tables=(*schema.tables, fame))
    else:
        schema = replace(schema, dense=(DenseColumn(column="item"),))
    recipe, rng = a_recipe(schema), random.Random(4)
    tables = [*schema.embedding_configs(), *schema.embedding_bag_configs()]
    truths = [make_truth(rng, t.name, t.num_embeddings, t.embedding_dim, "row") for t in tables]
    dense = {name: p.detach() for name, p in recipe().named_parameters() if not p.is_meta}
    plan = random_plan(rng, truths, 2)
    save_world(str(tmp_path / "ck"), truths, plan, dense=dense, extras=recipe.to_extras())
    export(tmp_path / "ck", tmp_path / "out", types="fp32")
    predictor = Predictor.load(tmp_path / "out")
    user = {"price": 0.3, "items": [1, 2], "makers": [1, 2], "actions": [0, 3], "user": "u1"}
    candidates = [{"item": item, "maker": 3} for item in (4, 15, 7)]
    wanted = predictor.predict([user | one for one in candidates])
    torch.testing.assert_close(predictor.predict_candidates(user, candidates), wanted)
