"""Columns of lists that belong together: shortened, aligned, in order, beside plain numbers."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
import torch

from rayrec.data import FeatureSchema, to_batch
from rayrec.errors import InputError

LISTS = {
    "label": "label",
    "features": [
        {"name": "items", "column": "item", "most_recent": 2},
        {"name": "weighted", "column": "item", "weights": "weight", "most_recent": 2},
    ],
    "sequences": [
        {
            "name": "times",
            "column": "time",
            "most_recent": 2,
            "aligned_with": "items",
            "ascending": True,
        },
        {"name": "prices", "column": "price", "dtype": "float32"},
    ],
    "tables": [
        {"name": "t", "num_embeddings": 9, "embedding_dim": 4, "features": ["items", "weighted"]}
    ],
}


def lists(**columns: list) -> pa.Table:
    """Rows with lists of three entries, none, one and null."""
    usual = {"label": [0, 1, 0, 1], "item": [[1, 2, 3], [], [4], None]}
    usual |= {"weight": [[0.1, 0.2, 0.3], [], [0.4], None]}
    usual |= {"time": [[5, 5, 7], [], [1], None], "price": [0.5, 1.0, None, 2.0]}
    return pa.table(usual | columns)


def list_schema() -> FeatureSchema:
    return FeatureSchema.from_json(json.dumps(LISTS))


@pytest.mark.parametrize("view", [False, True])
def test_lists_keep_their_most_recent_entries(view):
    table = lists()
    if view:
        # the lists lie in another order among their values, as those of the weights do not
        starts, sizes = pa.array([1, 0, 0, 0], pa.int32()), pa.array([3, 0, 1, 0], pa.int32())
        views = pa.ListViewArray.from_arrays(starts, sizes, pa.array([4, 1, 2, 3]))
        table = table.set_column(1, "item", views)
    batch = to_batch(table, list_schema())
    for name in ("items", "weighted"):
        bags = [bag.tolist() for bag in batch.sparse_features[name].to_dense()]
        assert bags == [[2, 3], [], [4], []]
    weights = [bag.tolist() for bag in batch.sparse_features["weighted"].to_dense_weights()]
    assert weights == [pytest.approx([0.2, 0.3]), [], pytest.approx([0.4]), []]
    assert [bag.tolist() for bag in batch.sequences["times"].to_dense()] == [[5, 7], [], [1], []]
    prices = batch.sequences["prices"]
    assert prices.values().dtype == torch.float32
    assert [bag.tolist() for bag in prices.to_dense()] == [[0.5], [1.0], [], [2.0]]


BAD_LISTS = {
    "unequal lengths": (
        {"time": [[5, 7], [], [1], None]},
        r"'time' of 'times' has 2 entries and column 'item' of 'items' has 3 in row 0 of",
    ),
    "equal sums": (
        {"time": [[5, 6, 7], [1], [], None]},
        r"'time' of 'times' has 1 entries and column 'item' of 'items' has 0 in row 1 of",
    ),
    "times that fall": (
        {"time": [[5, 4, 7], [], [1], None]},
        r"'time' does not ascend in row 0 of",
    ),
    "a null time": (
        {"time": [[5, None, 7], [], [1], None]},
        r"'time' has a null inside .* row 0 of",
    ),
    "no number": ({"price": ["a", "b", "c", "d"]}, r"'price' has type string"),
    "a fraction": ({"time": [[5.0, 5.0, 7.0], [], [1.0], None]}, r"whole numbers .*64 bits"),
    "nan": ({"price": [0.5, 1.0, float("nan"), 2.0]}, r"'price' holds NaN or infinity in row 2 of"),
}


@pytest.mark.parametrize("name", BAD_LISTS)
def test_bad_lists_are_refused(name):
    columns, message = BAD_LISTS[name]
    with pytest.raises(InputError, match=message):
        to_batch(lists(**columns), list_schema())


def test_the_schema_reads_back():
    schema = list_schema()
    assert FeatureSchema.from_json(schema.to_json()) == schema
    assert schema.embedding_configs() == []


@pytest.mark.parametrize("item", [[[[1]], [], [[2, 3]], None], [[["a"]], [], None, []]])
def test_a_list_inside_of_a_list_is_an_error(item: list):
    """Also where no file says so beforehand, as in requests and in rows of a stream."""
    for buckets in ({}, {"hash_buckets": 9}):
        spec = json.loads(json.dumps(LISTS))
        spec["features"] = [{"name": "items", "column": "item"} | buckets]
        spec["sequences"], spec["tables"][0]["features"] = [], ["items"]
        schema = FeatureSchema.from_json(json.dumps(spec))
        with pytest.raises(InputError, match=r"'item' of feature 'items' has type list<item: list"):
            to_batch(pa.table({"label": [0, 1, 0, 1], "item": item}), schema)
