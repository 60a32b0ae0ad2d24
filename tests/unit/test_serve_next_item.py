"""Served next-item models: scores and lists are those of the model, asked by every door."""

from __future__ import annotations

import json
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from rayrec.data import to_batch
from rayrec.errors import ArtifactError, ConfigError, InputError
from rayrec.next_item_recipe import NextItemModel, NextItemRecipe
from rayrec.recipe import ModelRecipe
from rayrec.serve import Predictor, export
from rayrec.serve.parity import ParityBounds
from tests.unit.next_item_worlds import (
    ITEMS,
    LONGEST,
    NextItemWorld,
    Row,
    next_item_world,
    random_rows,
    schema_text,
)
from tests.unit.running_replica import Running, running
from tests.unit.serve_worlds import a_world

MODELS = {
    "sasrec": NextItemModel(model="sasrec", seen="seen", length=LONGEST, ks=(3, 7)),
    "hstu": NextItemModel(model="hstu", times="at", seen="seen", length=LONGEST, ks=(3, 7)),
    "gru4rec": NextItemModel(model="gru4rec", seen="seen", ks=(3, 7)),
}
CLOSE = {"rtol": 1e-5, "atol": 3e-5}


def without(row: Row, *names: str) -> Row:
    return {name: value for name, value in row.items() if name not in names}


def columns_of(name: str) -> tuple[str, ...]:
    """Columns that a model does not read."""
    return () if name == "hstu" else ("at",)


def loaded(folder: Path, world: NextItemWorld, dtype: str = "fp32", **options: Any) -> Predictor:
    export(world.checkpoint, folder, types=dtype)
    return Predictor.load(folder, **options)


def best(scores: Tensor, k: int, items: Collection[int]) -> list[tuple[int, float]]:
    """The best of some items by the rule of the page, in plain Python."""
    pairs = [(item, score) for item, score in enumerate(scores.tolist()) if item in items]
    listed = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:k]
    return listed + [(-1, -np.inf)] * (k - len(listed))


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.seeds(range(2))
def test_scores_and_lists_are_those_of_the_model(
    tmp_path: Path, seed: int, name: str, trusted: bool
) -> None:
    world = next_item_world(tmp_path, seed, MODELS[name])
    predictor = loaded(tmp_path / "out", world, trusted=trusted)
    rows = [without(row, *columns_of(name)) for row in random_rows(seed)]
    wanted = [world.scores(row) for row in random_rows(seed)]
    own = torch.stack([one[row["item"]] for one, row in zip(wanted, rows, strict=True)])
    torch.testing.assert_close(predictor.predict(rows), own, **CLOSE)
    # the candidates of one user, in their order
    for row, scores in zip(rows, wanted, strict=True):
        items = np.random.default_rng(seed).integers(0, ITEMS, 512)
        got = predictor.predict_candidates(without(row, "item"), [{"item": int(i)} for i in items])
        torch.testing.assert_close(got, scores[items], **CLOSE)
    asked = [without(row, "item") for row in rows]
    for k, masked in ((None, False), (1, True), (ITEMS, True)):
        found = predictor.predict_top(asked, k, masked)
        for row, scores, ids, values in zip(rows, wanted, *found.values(), strict=True):
            seen = [*row["history"][-LONGEST:], *row["seen"]] if masked else []
            wanted_ids = set(world.listed) - set(seen)
            listed = best(scores, 7 if k is None else k, wanted_ids)
            values_wanted = torch.tensor([score for _, score in listed])
            torch.testing.assert_close(values, values_wanted, **CLOSE)
            # items whose scores differ by the last digits may change places
            found_ids = [item for item in ids.tolist() if item >= 0]
            assert set(found_ids) <= wanted_ids and len(set(found_ids)) == len(found_ids)
            torch.testing.assert_close(values[: len(found_ids)], scores[found_ids], **CLOSE)


def test_lists_that_a_schema_does_not_cut_are_cut_to_the_length_of_the_model() -> None:
    schema = json.loads(schema_text())
    del schema["user"], schema["time"]
    for one in (*schema["features"], *schema["sequences"]):
        if one.pop("history", None) and one["name"] == "at":
            one["aligned_with"] = "history"
    model = NextItemModel(model="hstu", times="at", length=4)
    served = NextItemRecipe(schema=json.dumps(schema), model=model).request_schema()
    assert [(one.name, one.most_recent) for one in served.features] == [
        ("history", 4),
        ("item", None),
    ]
    assert [(one.name, one.most_recent) for one in served.sequences] == [("at", 4)]
    assert served.columns(with_labels=False) == ("item", "time")
    free = NextItemRecipe(schema=json.dumps(schema), model=MODELS["gru4rec"]).request_schema()
    assert free.features[0].most_recent is None


def test_an_item_of_lower_id_stands_before_its_equals(tmp_path: Path) -> None:
    world = next_item_world(tmp_path, 3, MODELS["sasrec"], equal=ITEMS - 5)
    predictor = loaded(tmp_path / "out", world)
    rows = [without(row, "item", "at") for row in random_rows(3)]
    for row, ids in zip(rows, predictor.predict_top(rows, ITEMS)["item"], strict=True):
        scores = world.scores({**row, "at": row["history"]})
        assert ids.tolist() == [item for item, _ in best(scores, ITEMS, world.listed)]
        equals = [item for item in ids.tolist() if 0 <= item < ITEMS - 5]
        assert equals == [item for item in world.listed if item < ITEMS - 5] and len(equals) == 29


def test_packed_rows_are_as_far_off_as_the_export_says(tmp_path: Path) -> None:
    world = next_item_world(tmp_path, 4, MODELS["hstu"])
    rows = random_rows(4, [n % 7 for n in range(40)])
    wanted = torch.stack([world.scores(row)[row["item"]] for row in rows])
    errors = {}
    for dtype in ("fp16", "int8", "int4"):
        out = tmp_path / dtype
        manifest = export(world.checkpoint, out, types=dtype, bounds=ParityBounds(logit=9.0))
        errors[dtype] = float((Predictor.load(out).predict(rows) - wanted).abs().max())
        # 8192 other rows were compared
        assert 0 < errors[dtype] < 2 * manifest.parity["max_logit_error"]
    assert errors["fp16"] < errors["int8"] < errors["int4"] and errors["int8"] < 0.5
    with pytest.raises(ArtifactError, match=r"off by .* in logit"):
        export(world.checkpoint, tmp_path / "far", types="int4", bounds=ParityBounds(logit=1e-3))


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    folder = tmp_path_factory.mktemp("hstu")
    return loaded(folder / "out", next_item_world(folder, 5, MODELS["hstu"]))


@pytest.fixture(scope="module")
def server(predictor: Predictor):
    with running(predictor) as one:
        yield one


def test_every_door_answers_as_the_predictor(predictor: Predictor, server: Running) -> None:
    rows = random_rows(6)
    asked = [without(row, "item") for row in rows]
    user, candidates = asked[3], [{"item": item} for item in (5, 5, 0, ITEMS - 1)]
    scores = predictor.predict(rows)
    of_user = predictor.predict_candidates(user, candidates)
    lists = {(k, m): predictor.predict_top(asked, k, m) for k in (None, 2, ITEMS) for m in (0, 1)}
    # without an item a plain request is one for lists
    assert torch.equal(predictor.predict(asked)["item"], lists[None, 0]["item"])
    with server.client() as client:
        np.testing.assert_allclose(client.predict(rows), scores, **CLOSE)
        np.testing.assert_allclose(client.predict_candidates(user, candidates), of_user, **CLOSE)
        for (k, masked), wanted in lists.items():
            got = client.predict_top(asked, k, bool(masked))
            assert got["item"].dtype == np.int64
            np.testing.assert_array_equal(got["item"], wanted["item"])
            np.testing.assert_allclose(got["score"], wanted["score"], **CLOSE)
        np.testing.assert_array_equal(client.predict(asked)["item"], lists[None, 0]["item"])
        with pytest.raises(ConfigError, match=r"k=0"):
            client.predict_top(asked, 0)
        with pytest.raises(InputError, match=r"k=38 is longer than a list of all 37 items"):
            client.predict_top(asked, 38)
    said = server.http("/predict", {"rows": candidates, "user": user})[1]
    np.testing.assert_allclose(said["scores"], of_user, **CLOSE)
    said = server.http("/predict", {"rows": asked, "k": ITEMS, "masked": True})[1]["scores"]
    np.testing.assert_array_equal(said["item"], lists[ITEMS, 1]["item"])
    assert said["item"][0][-1] == -1 and said["score"][0][-1] is None
    for body, says in (
        ({"rows": candidates, "user": user, "k": 2}, "a user is given with candidates"),
        ({"rows": rows, "k": 2}, "the rows have column 'item', the item to score"),
        ({"rows": asked, "k": 0}, "k=0; it must be at least 1"),
        ({"rows": asked, "k": "2"}, "k='2'; it must be a whole number"),
        ({"rows": asked, "masked": 1}, "masked=1; it must be true or false"),
    ):
        status, said, _ = server.http("/predict", body)
        assert status == 400 and says in said["message"], said


def test_lists_of_other_lengths_that_wait_together_are_each_as_asked(
    predictor: Predictor, server: Running
) -> None:
    asked = [without(row, "item") for row in random_rows(7)]
    options = [(k, m) for k in (1, 2, 9) for m in (False, True)] * 3
    with ThreadPoolExecutor(len(options)) as pool, server.client() as client:
        answers = pool.map(lambda option: client.predict_top(asked, *option), options)
        for option, answer in zip(options, answers, strict=True):
            np.testing.assert_array_equal(
                answer["item"], predictor.predict_top(asked, *option)["item"]
            )


def test_no_rows_and_no_candidates_have_no_scores(predictor: Predictor) -> None:
    row = without(random_rows(8)[2], "item")
    assert predictor.predict([]).shape == predictor.predict_candidates(row, []).shape == (0,)
    table = pa.Table.from_pylist([row])
    assert predictor.predict_top(table[:0], 4)["item"].shape == (0, 4)
    torch.testing.assert_close(predictor.predict_top(table, 4), predictor.predict_top([row], 4))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"item": ITEMS}, r"column 'item'.*37"),
        ({"history": [1, -1], "at": [1, 2]}, r"column 'history'.*-1"),
        ({"history": [1, 2, 3]}, r"column 'at' of 'at' has 2 entries and column 'history'.* has 3"),
        ({"at": None}, r"column 'at' of 'at' has 0 entries"),
        ({"item": None}, r"feature 'item' has 0 ids in row 0 of the batch; it must"),
        ({"item": [1, 2]}, r"feature 'item' has 2 ids in row 0 of the batch; it must"),
    ],
)
def test_a_bad_row_is_said(predictor: Predictor, change: Row, says: str) -> None:
    row = {**random_rows(9)[2], **change}
    with pytest.raises(InputError, match=says):
        predictor.predict([row])
    if set(change) == {"item"}:
        with pytest.raises(InputError, match=says):
            predictor.predict_candidates(without(row, "item"), [{"item": row["item"]}])
    else:
        with pytest.raises(InputError, match=says):
            predictor.predict_top([without(row, "item")])


def test_rows_of_two_kinds_and_what_is_no_rows_are_refused(predictor: Predictor) -> None:
    row = random_rows(10)[3]
    past = without(row, "item")
    with pytest.raises(InputError, match=r"row 0 of the request has no 'item', which other rows"):
        predictor.predict([past, row])
    with pytest.raises(InputError, match=r"the rows have column 'item', the item to score"):
        predictor.predict_top([past, row])
    with pytest.raises(InputError, match="'item' has 2 ids in row 1 of the batch"):
        predictor.predict([{**past, "item": items} for items in ([3], [1, 2], [])])
    for nothing, says in ((row, "is a dict; give a list"), (None, "is of NoneType; give")):
        for ask in (predictor.predict, predictor.predict_top):
            with pytest.raises(InputError, match=says):
                ask(nothing)
        with pytest.raises(InputError, match=says):
            predictor.predict_candidates(past, None if nothing is None else {"item": 1})


def test_mistakes_of_a_caller_are_said(predictor: Predictor, tmp_path: Path) -> None:
    row = random_rows(10)[3]
    past = without(row, "item")
    with pytest.raises(InputError, match=r"column 'at' is missing"):
        predictor.predict_top([without(past, "at")])
    with pytest.raises(InputError, match=r"the user has the columns \['history', 'seen'\]; to a"):
        predictor.predict_candidates(without(past, "at"), [{"item": 1, "at": [1]}])
    with pytest.raises(InputError, match=r"the rows have column 'item', the item to score"):
        predictor.predict_top([row])
    with pytest.raises(InputError, match=r"k=38 is longer than a list of all 37 items"):
        predictor.predict_top([past], 38)
    with pytest.raises(ConfigError, match=r"k=0; it must be at least 1"):
        predictor.predict_top([past], 0)
    with pytest.raises(InputError, match=r"200000 lists of k=37 items are more than 4194304"):
        predictor.predict_top(pa.Table.from_pylist([past]).take([0] * 200_000), ITEMS)
    with pytest.raises(InputError, match=r"the user has 2 rows"):
        predictor.predict_candidates([past, past], [{"item": 1}])
    batch = to_batch(pa.Table.from_pylist([row]), predictor.schema, with_labels=False)
    assert torch.equal(predictor.predict_batch(batch), predictor.predict([row]))
    with pytest.raises(InputError, match=r"is given rows of columns; these are tensors"):
        predictor.predict(batch.sparse_features)
    clicks = a_world(tmp_path)
    export(clicks.checkpoint, tmp_path / "clicks")
    with pytest.raises(ConfigError, match=r"k and masked are for next-item models"):
        Predictor.load(tmp_path / "clicks").predict_top([past])
    with pytest.raises(ConfigError, match=r"is of kind 'next_item'.*only click models and"):
        ModelRecipe.from_extras({"next_item": {}}, "x")
    with pytest.raises(ConfigError, match=r"does not say how to build its next-item model"):
        NextItemRecipe.from_extras({"next_item": {"model": "sasrec"}}, "x")
