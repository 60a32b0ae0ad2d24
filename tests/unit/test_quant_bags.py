"""What a packed collection makes of bags of one id each, which it knows by their lengths."""

from __future__ import annotations

import random

import pytest
import torch

from rayrec.errors import InputError, ShapeError
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.quant import quantize
from rayrec.sparse import KeyedJaggedTensor

KEYS, ROWS = ["x", "y", "z"], [10, 5, 7]


def packed(is_weighted=False):
    tables = [
        EmbeddingBagConfig(rows, 8, f"t_{key}", feature_names=[key])
        for key, rows in zip(KEYS, ROWS, strict=True)
    ]
    return quantize(EmbeddingBagCollection(tables, is_weighted=is_weighted))


def ids_of(rng, lengths, rows):
    counts = [sum(lengths[i * rows : (i + 1) * rows]) for i in range(3)]
    return [rng.randrange(limit) for limit, n in zip(ROWS, counts, strict=True) for _ in range(n)]


@pytest.mark.parametrize("ids_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths_type", [torch.int32, torch.int64])
def test_lengths_and_offsets_give_the_same_rows(ids_type, lengths_type):
    """One id a bag, and lengths that add up to as many in all."""
    rng, collection = random.Random(3), packed()
    for _ in range(60):
        rows = rng.randint(1, 5)
        lengths = [1] * (3 * rows)
        for _ in range(rng.choice([0, 0, 1, 3])):
            giver, taker = rng.randrange(3 * rows), rng.randrange(3 * rows)
            if lengths[giver]:
                lengths[giver], lengths[taker] = lengths[giver] - 1, lengths[taker] + 1
        ids = torch.tensor(ids_of(rng, lengths, rows), dtype=ids_type)
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        by_lengths = KeyedJaggedTensor(KEYS, ids, lengths=torch.tensor(lengths, dtype=lengths_type))
        by_offsets = KeyedJaggedTensor(KEYS, ids, offsets=offsets)
        wanted = collection(by_offsets).values()
        # twice, since what is kept of a number of rows must stay as it is
        for _ in range(2):
            assert torch.equal(collection(by_lengths).values(), wanted)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("sizes", [[1, 1, 1, 1, 1, 1], [2, 0, 1, 1, 0, 2]])
def test_ids_lengths_and_weights_may_be_columns_of_matrices(sizes, is_weighted):
    collection = packed(is_weighted)
    matrix = torch.tensor([[1, 9], [2, 9], [3, 9], [4, 9], [0, 9], [4, 9]])
    weights, lengths = torch.rand(6, 2), torch.tensor([[size, 1] for size in sizes])
    columns = matrix[:, 0], weights[:, 0], lengths[:, 0]
    ids, own, counts = (column.clone() for column in columns)
    wanted = collection(KeyedJaggedTensor(KEYS, ids, own, counts)).values()
    assert torch.equal(collection(KeyedJaggedTensor(KEYS, *columns)).values(), wanted)
    offsets = torch.stack([torch.tensor([0, *sizes]).cumsum(0), torch.zeros(7, dtype=int)], 1)
    batch = KeyedJaggedTensor(KEYS, columns[0], columns[1], offsets=offsets[:, 0])
    assert torch.equal(collection(batch).values(), wanted)


@pytest.mark.parametrize(
    ("ids", "lengths"),
    [
        ([1, 2], [1, 1, 1]),
        ([1, 2, 3, 4], [1, 1, 1]),
        ([1, 2, 3], [1, 3, -1]),
        ([1, 2, 3], [1, 1]),
        ([[1], [2], [3]], [1, 1, 1]),
    ],
)
def test_lengths_that_do_not_fit_the_ids_are_refused(ids, lengths):
    with pytest.raises((ShapeError, InputError)):
        packed()(KeyedJaggedTensor(KEYS, torch.tensor(ids), lengths=torch.tensor(lengths)))


def test_weights_that_do_not_fit_bags_of_one_id_are_refused():
    ids, lengths = torch.tensor([1, 2, 3]), torch.ones(3, dtype=torch.int64)
    with pytest.raises((ShapeError, InputError)):
        packed(is_weighted=True)(KeyedJaggedTensor(KEYS, ids, torch.ones(2), lengths))
