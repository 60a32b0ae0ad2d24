"""The checks find what is wrong with a batch and name it; sound batches pass; the version check
names the remedy.
"""

from __future__ import annotations

import random

import pytest
import torch

from rayrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    _compat,
)
from rayrec.errors import InputError, ShapeError, VersionError
from rayrec.layout.tables import UNBOUNDED
from rayrec.optim import SGD
from rayrec.sparse import KeyedJaggedTensor, check_ids, check_kjt
from rayrec.sparse.validate import any_beyond

from .jagged_reference import random_batch


def batch(values, lengths, **more):
    return KeyedJaggedTensor(
        ["a", "b"], torch.tensor(values), lengths=torch.tensor(lengths), **more
    )


@pytest.mark.seeds(range(30))
def test_sound_batches_pass(seed):
    kjt = random_batch(seed).kjt()
    check_kjt(kjt)
    check_ids(kjt, dict.fromkeys(kjt.keys(), 100))


@pytest.mark.seeds(range(30))
@pytest.mark.parametrize("value", [100, -1, 2**40, -(2**40)])
def test_a_bad_id_is_named_with_its_key_and_row(seed, value):
    plain = random_batch(seed)
    places = [(key, row) for key, bags in plain.bags.items() for row, bag in enumerate(bags) if bag]
    if not places:
        return
    key, row = places[seed % len(places)]
    plain.bags[key][row][-1] = value
    with pytest.raises(
        InputError, match=rf"id {value} of key '{key}', row {row} in part-7 is not in \[0, 100\)"
    ):
        check_ids(plain.kjt(), dict.fromkeys(plain.bags, 100), source="part-7")
    # a key without a limit is not looked at
    check_ids(plain.kjt(), {k: 100 for k in plain.bags if k != key})


@pytest.mark.seeds(range(40))
def test_one_comparison_of_all_keys_finds_what_the_check_of_each_finds(seed):
    """It is what a GPU does; limits of 63 and 64 bits, int32 ids, keys without ids or a limit."""
    rng = random.Random(seed)
    kjt = random_batch(seed).kjt()
    keys = kjt.keys()
    limits = {key: rng.choice([100, 101, 2**40, 2**63, UNBOUNDED]) for key in keys}
    if limits and rng.random() < 0.3:
        limits.pop(rng.choice(list(limits)))
    values = kjt.values().clone()
    if values.numel() and rng.random() < 0.8:
        values[rng.randrange(values.numel())] = rng.choice([100, 101, -1, -2, 2**31 - 1, -(2**31)])
    kjt = kjt._like(values=values.to(rng.choice([torch.int64, torch.int32])))
    beyond = bool(any_beyond(kjt, limits))
    try:
        check_ids(kjt, limits)
    except InputError:
        assert beyond
    else:
        lasts = [int((kjt[key].values() == -1).sum()) for key in keys if key not in limits]
        assert beyond == (sum(lasts) > 0)


def test_lengths_that_do_not_fit_the_ids_reach_no_kernel():
    kjt = batch([0, 5, 3], [1, 1, 2, 0])
    with pytest.raises(ShapeError, match=r"3 ids, but the lengths of keys .* sum to 4"):
        any_beyond(kjt, {"a": 6, "b": 10})


@pytest.mark.gpu
def test_a_bad_id_on_a_gpu_is_named_with_its_key_and_row():
    kjt = batch([0, 5, 3, 9], [1, 1, 2, 0]).to(torch.device("cuda"))
    check_ids(kjt, {"a": 6, "b": 10})
    with pytest.raises(InputError, match=r"id 9 of key 'b', row 0 in part-7 is not in \[0, 9\)"):
        check_ids(kjt, {"a": 6, "b": 9}, source="part-7")


def test_ids_must_be_integers():
    with pytest.raises(InputError, match="float32"):
        check_ids(batch([1.0, 2.0], [1, 1]), {"a": 10})


def test_ids_must_have_one_dimension():
    ids = KeyedJaggedTensor(["a"], torch.ones(2, 1, dtype=torch.int64), lengths=torch.ones(2).int())
    with pytest.raises(ShapeError, match=r"shape \(2, 1\)"):
        check_ids(ids, {"a": 10}, source="part-7")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda: batch([1, 2, 3], [1, 1]), "sum to 2"),
        (lambda: batch([1, 2], [1, 1], weights=torch.rand(3)), "3 weights for 2 ids"),
        (lambda: batch([1, 2], [1, 1], stride=2), "for 4 bags"),
        (
            lambda: KeyedJaggedTensor(["a"], torch.arange(2), offsets=torch.tensor([1, 2])),
            "go from 1 to 2",
        ),
        (lambda: batch([1, 2], [1, 1], offsets=torch.tensor([0, 0, 2])), "sum to 2"),
        (lambda: batch([1, 2], [1, 1], stride_per_key_per_rank=[[2]]), "1 rows for 2 keys"),
        (
            lambda: batch(
                [1, 2],
                [1, 1],
                stride_per_key_per_rank=[[1], [1]],
                inverse_indices=(["a"], torch.zeros(1, 3)),
            ),
            "need one row",
        ),
    ],
)
def test_incoherent_batches_are_refused(broken, message):
    with pytest.raises(ShapeError, match=message):
        check_kjt(broken(), source="somewhere")


TABLE = {"name": "t", "num_embeddings": 10, "embedding_dim": 4, "feature_names": ["a", "b"]}


@pytest.fixture(scope="module", params=["plain", "sharded"])
def lookups(request):
    """A pooled and a sequence collection; the fused ones are sharded, with `check_ids`."""
    bags, rows = [EmbeddingBagConfig(**TABLE)], [EmbeddingConfig(**TABLE)]
    if request.param == "plain":
        return EmbeddingBagCollection(bags, is_weighted=True), EmbeddingCollection(rows)
    return (
        FusedEmbeddingBagCollection(bags, SGD, {"lr": 0.1}, is_weighted=True),
        FusedEmbeddingCollection(rows, SGD, {"lr": 0.1}),
    )


@pytest.mark.parametrize(
    ("lengths", "more", "message"),
    [
        ([1, 1, 1, 0], {}, "4 ids, but the lengths .* sum to 3"),
        ([1, 1, 1, 2], {}, "4 ids, but the lengths .* sum to 5"),
        (None, {"offsets": torch.tensor([1, 1, 2, 3, 4])}, "the offsets go from 1 to 4"),
        ([1, 1, 1, 0], {"offsets": torch.arange(5)}, "sum to 3"),
        ([1, 0, 4, -1], {}, r"sum to 4 \(the least is -1\)"),
        ([1, -1, 1, 3], {}, r"sum to 4 \(the least is -1\)"),
        (None, {"offsets": torch.tensor([0, 1, 1, 5, 4])}, r"sum to 4 \(the least is -1\)"),
        ([2, 0, 1, 1], {"offsets": torch.arange(5)}, "by other lengths"),
        ([1, 1, 1, 1, 0, 0], {"offsets": torch.arange(5)}, "6 lengths and 5 offsets"),
        ([1, 1, 1, 1], {"weights": torch.ones(5)}, "5 weights for 4 ids"),
    ],
)
def test_a_lookup_drops_no_ids_silently(lookups, lengths, more, message):
    sizes = None if lengths is None else torch.tensor(lengths)
    for collection in lookups:
        kjt = KeyedJaggedTensor(
            ["a", "b"], torch.arange(4), lengths=sizes, **{"weights": torch.ones(4)} | more
        )
        with pytest.raises(ShapeError, match=message):
            collection(kjt)


@pytest.mark.parametrize(("length", "bags", "ids"), [(2**30, 4, 0), (2**16, 2**16 + 1, 2**16)])
def test_lengths_whose_sum_wraps_around_reach_no_kernel(length, bags, ids):
    lengths = torch.full((bags,), length, dtype=torch.int32)
    kjt = KeyedJaggedTensor(["a"], torch.zeros(ids, dtype=torch.int64), lengths=lengths)
    assert kjt.offsets()[-1] == ids
    for check in (check_kjt, KeyedJaggedTensor.length_per_key):
        with pytest.raises(ShapeError, match=f"{ids} ids, but .*sum to {length * bags}"):
            check(kjt)


def test_a_repeated_key_is_named():
    with pytest.raises(InputError, match="key 'a' occurs 2 times in step 3"):
        check_kjt(
            KeyedJaggedTensor(
                ["a", "b", "a"], torch.arange(3), lengths=torch.ones(3, dtype=torch.int64)
            ),
            source="step 3",
        )


def test_negative_lengths_and_wild_inverse_indices_are_named():
    with pytest.raises(InputError, match="length -1 of key 'b', row 0"):
        check_kjt(batch([1, 2], [3, -1]))
    wild = (["a", "b"], torch.tensor([[0, 0], [0, 5]]))
    with pytest.raises(InputError, match=r"inverse index 5 of key 'b', row 1 is not in \[0, 1\)"):
        check_kjt(batch([1, 2], [1, 1], stride_per_key_per_rank=[[1], [1]], inverse_indices=wild))


def test_version_pairs():
    _compat.check_pair("2.13.0+cpu", ("fbgemm-gpu-cpu", "1.8.0"))
    _compat.check_pair("2.11.1+cu128", ("fbgemm-gpu", "1.6.0"))
    for torch_version, fbgemm in [
        ("2.13.0", ("fbgemm-gpu", "1.6.0")),
        ("2.12.0", ("fbgemm-gpu", "1.8.0")),
        ("2.13.0", None),
    ]:
        with pytest.raises(
            VersionError, match=r"pip install torch==2\.13\.0 fbgemm-gpu-cpu==1\.8\.0"
        ):
            _compat.check_pair(torch_version, fbgemm)
