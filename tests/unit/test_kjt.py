"""KeyedJaggedTensor against plain Python lists, over random batches: weighted or not, one stride or
many, empty bags, keys and rows.
"""

from __future__ import annotations

import copy
import pickle
import random

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from rayrec.errors import InputError, ShapeError
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor, UnknownKeyError, check_kjt

from .jagged_reference import bags_of, random_batch, weights_of

SEEDS = range(60)


@pytest.mark.seeds(SEEDS)
def test_every_view_equals_the_lists(seed):
    plain = random_batch(seed)
    kjt = plain.kjt()
    check_kjt(kjt)
    assert kjt.keys() == list(plain.bags)
    assert kjt.stride_per_key() == [len(bags) for bags in plain.bags.values()]
    assert kjt.length_per_key() == [sum(map(len, bags)) for bags in plain.bags.values()]
    assert kjt.offset_per_key()[-1] == kjt.values().numel()
    assert kjt.index_per_key() == {key: i for i, key in enumerate(plain.bags)}
    as_dict = kjt.to_dict()
    assert list(as_dict) == list(plain.bags)
    for key, bags in plain.bags.items():
        for jt in (plain.kjt()[key], as_dict[key]):
            assert [bag.tolist() for bag in jt.to_dense()] == bags
            assert jt.offsets().dtype == plain.dtype
            if plain.weights is not None:
                flat = [w for bag in plain.weights[key] for w in bag]
                assert jt.weights().tolist() == pytest.approx(flat)
    if plain.ranks is None:
        assert (
            kjt.stride() == plain.rows
            and not kjt.variable_stride_per_key()
            and kjt.stride_per_key_per_rank() == []
        )
    else:
        assert kjt.variable_stride_per_key() and kjt.stride_per_key_per_rank() == plain.ranks
        assert kjt.stride() == (
            plain.rows if plain.inverse else max((sum(row) for row in plain.ranks), default=0)
        )


@pytest.mark.seeds(SEEDS)
def test_permute_takes_keys_in_order_with_repeats(seed):
    plain = random_batch(seed)
    keys = list(plain.bags)
    rng = random.Random(seed)
    indices = [rng.randrange(len(keys)) for _ in range(rng.randint(0, 7))] if keys else []
    kjt = plain.kjt()
    permuted = kjt.permute(indices)
    assert bags_of(permuted) == [(keys[i], plain.bags[keys[i]]) for i in indices]
    assert (
        permuted.stride() == kjt.stride()
        and permuted.length_per_key() == permuted.unsync().length_per_key()
    )
    if plain.weights is not None:
        assert weights_of(permuted) == pytest.approx(
            [w for i in indices for bag in plain.weights[keys[i]] for w in bag]
        )
    if plain.inverse is not None:
        names, rows = permuted.inverse_indices()
        assert names == permuted.keys() and rows.tolist() == [plain.inverse[i] for i in indices]


@pytest.mark.seeds(SEEDS)
def test_split_and_concat_are_inverse(seed):
    plain = random_batch(seed)
    rng, segments = random.Random(seed), []
    while sum(segments) < len(plain.bags) or len(segments) < 2:
        segments.append(rng.randint(0, len(plain.bags) - sum(segments)))
    kjt = plain.kjt()
    parts = kjt.split(segments)
    assert [len(part.keys()) for part in parts] == segments
    assert all(part.stride() == kjt.stride() for part in parts)
    assert [bags for part in parts for bags in bags_of(part)] == bags_of(kjt)
    for part in parts:
        check_kjt(part)
    joined = KeyedJaggedTensor.concat(parts)
    assert bags_of(joined) == bags_of(kjt) and weights_of(joined) == weights_of(kjt)
    assert (
        joined.stride_per_key_per_rank() == kjt.stride_per_key_per_rank()
        and joined.stride() == kjt.stride()
    )
    if plain.inverse is not None:
        assert joined.inverse_indices()[1].tolist() == plain.inverse


def test_split_makes_views_and_all_keys_is_self():
    kjt = random_batch(3, variable=False, keys=3).kjt()
    assert kjt.split([3])[0] is kjt
    assert (
        kjt.split([1, 2])[1].values().untyped_storage().data_ptr()
        == kjt.values().untyped_storage().data_ptr()
    )


@pytest.mark.seeds(SEEDS)
def test_jt_dict_round_trip(seed):
    plain = random_batch(seed)
    if not plain.bags:
        return
    back = KeyedJaggedTensor.from_jt_dict(plain.kjt().to_dict())
    assert bags_of(back) == list(plain.bags.items()) and weights_of(back) == weights_of(plain.kjt())
    assert back.length_per_key_or_none() is not None
    assert back.variable_stride_per_key() == (len({len(bags) for bags in plain.bags.values()}) > 1)


@pytest.mark.seeds(SEEDS)
def test_copies_and_pytrees_keep_the_batch(seed):
    plain = random_batch(seed)
    kjt = plain.kjt()
    leaves, spec = pytree.tree_flatten(kjt)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    for same in (
        kjt.to("cpu"),
        kjt.flatten_lengths(),
        pytree.tree_unflatten(leaves, spec),
        pytree.tree_map(torch.clone, kjt),
        copy.deepcopy(kjt),
        pickle.loads(pickle.dumps(kjt)),
    ):
        assert (
            same is not kjt
            and bags_of(same) == bags_of(kjt)
            and weights_of(same) == weights_of(kjt)
        )
        assert (
            same.stride() == kjt.stride()
            and same.stride_per_key_per_rank() == kjt.stride_per_key_per_rank()
        )
        assert (same.inverse_indices_or_none() is None) == (kjt.inverse_indices_or_none() is None)


def test_weights_dtype_follows_to():
    kjt = KeyedJaggedTensor(["a"], torch.arange(2), torch.rand(2), torch.tensor([2]))
    assert (
        kjt.to("cpu", dtype=torch.float16).weights().dtype == torch.float16
        and kjt.to("cpu").values().dtype == torch.int64
    )


def test_lengths_per_key_are_computed_once_and_forgotten_by_unsync():
    kjt = KeyedJaggedTensor(["a", "b"], torch.arange(3), lengths=torch.tensor([1, 0, 2, 0]))
    assert kjt.length_per_key_or_none() is None and kjt.offset_per_key_or_none() is None
    assert (
        kjt.sync() is kjt
        and kjt.length_per_key_or_none() == [1, 2]
        and kjt.offset_per_key_or_none() == [0, 1, 3]
    )
    assert kjt.unsync().length_per_key_or_none() is None and kjt.lengths_offset_per_key() == [
        0,
        2,
        4,
    ]
    from_lengths = KeyedJaggedTensor.from_lengths_sync(
        ["a", "b"], torch.arange(3), torch.tensor([1, 0, 2, 0])
    )
    from_offsets = KeyedJaggedTensor.from_offsets_sync(
        ["a", "b"], torch.arange(3), torch.tensor([0, 1, 1, 3, 3])
    )
    assert from_lengths.length_per_key_or_none() == from_offsets.length_per_key_or_none() == [1, 2]


def test_lengths_of_two_dimensions_are_a_batch_too():
    kjt = KeyedJaggedTensor(["a", "b"], torch.arange(3), lengths=torch.tensor([[1, 0], [2, 0]]))
    assert (
        kjt.stride() == 2
        and kjt["b"].to_dense()[0].tolist() == [1, 2]
        and kjt.flatten_lengths().lengths().shape == (4,)
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_empty_has_no_keys(weighted):
    kjt = KeyedJaggedTensor.empty(weighted, values_dtype=torch.int64)
    assert (
        kjt.keys(),
        kjt.stride(),
        kjt.length_per_key(),
        kjt.offset_per_key(),
        kjt.to_dict(),
    ) == ([], 0, [], [0], {})
    assert (
        kjt.offsets().tolist() == [0]
        and str(kjt) == "KeyedJaggedTensor()\n"
        and (weights_of(kjt) is not None) == weighted
    )
    full = random_batch(3, variable=False, keys=2).kjt()
    like = KeyedJaggedTensor.empty_like(full)
    assert (
        like.keys() == []
        and like.stride() == full.stride()
        and like.values().dtype == full.values().dtype
    )
    on_meta = KeyedJaggedTensor.empty_like(full, device="meta")
    assert (
        on_meta.keys() == full.keys()
        and on_meta.values().shape == full.values().shape
        and on_meta.device().type == "meta"
    )
    assert bags_of(
        KeyedJaggedTensor.concat([kjt, full])
        if weighted == (weights_of(full) is not None)
        else full
    ) == bags_of(full)


@pytest.mark.parametrize("sizes", ["lengths", "offsets"])
def test_sizes_from_an_empty_list_are_integers(sizes):
    kjt = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([], dtype=torch.int64), **{sizes: torch.tensor([])}
    )
    assert kjt.stride() == 0 and kjt.length_per_key() == [0, 0]
    assert kjt.lengths().dtype == kjt.offsets().dtype == torch.int64 and kjt.lengths().numel() == 0


def test_text_shows_keys_and_bags():
    plain = KeyedJaggedTensor(["a", "b"], torch.arange(8), lengths=torch.tensor([2, 0, 1, 1, 1, 3]))
    assert (
        str(plain)
        == 'KeyedJaggedTensor({\n    "a": [[0, 1], [], [2]],\n    "b": [[3], [4], [5, 6, 7]]\n})\n'
    )
    assert (
        repr(plain)
        == "KeyedJaggedTensor(keys=['a', 'b'], stride=3, values=(8,) int64, weights=None, "
        "device='cpu')"
    )
    weighted = KeyedJaggedTensor(
        ["a"], torch.arange(2), torch.tensor([0.5, 1.0]), torch.tensor([1, 1])
    )
    assert str(weighted) == (
        'KeyedJaggedTensor({\n    "a": {\n        "values": [[0], [1]],\n'
        '        "weights": [[0.5], [1.0]]\n    }\n})\n'
    )


def test_meta_batches_have_made_up_but_coherent_lengths():
    kjt = KeyedJaggedTensor(
        ["a", "b"],
        torch.empty(5, dtype=torch.int64, device="meta"),
        lengths=torch.empty(4, dtype=torch.int32, device="meta"),
    )
    assert sum(kjt.length_per_key()) == 5 and kjt.stride() == 2


def test_gradients_reach_the_weights_through_permute():
    weights = torch.rand(3, requires_grad=True)
    KeyedJaggedTensor(["a", "b"], torch.arange(3), weights, torch.tensor([1, 2])).permute(
        [1, 1, 0]
    ).weights().sum().backward()
    assert weights.grad.tolist() == [1, 2, 2]


def test_mistakes_raise_typed_errors():
    kjt = KeyedJaggedTensor(["a", "b"], torch.arange(3), lengths=torch.tensor([1, 2]))
    with pytest.raises(UnknownKeyError, match="no key 'c'"):
        kjt["c"]
    with pytest.raises(KeyError):
        kjt["c"]
    with pytest.raises(InputError, match="no weights"):
        kjt.weights()
    with pytest.raises(InputError, match="no inverse"):
        kjt.inverse_indices()
    with pytest.raises(ShapeError, match="2 keys"):
        kjt.split([1, 2])
    with pytest.raises(ShapeError, match="permute"):
        kjt.permute([2])
    with pytest.raises(ShapeError, match="do not divide"):
        KeyedJaggedTensor(["a", "b"], torch.arange(3), lengths=torch.tensor([1, 1, 1])).stride()
    with pytest.raises(ShapeError, match="2 lengths"):
        KeyedJaggedTensor(
            ["a", "b"], torch.arange(3), lengths=torch.tensor([1, 2]), stride=2
        ).length_per_key()
    with pytest.raises(InputError, match="neither"):
        KeyedJaggedTensor(["a"], torch.arange(3)).lengths()
    with pytest.raises(InputError, match="must be integers"):
        KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([3.0]))
    given = {"values": [1, 2, 3], "weights": [1.0] * 3, "lengths": [1, 2], "offsets": [0, 1, 3]}
    tensors = {name: torch.tensor(value) for name, value in given.items()}
    for name, value in given.items():
        for wrong in (value, np.array(value)):
            with pytest.raises(InputError, match=f"^{name} is a .*torch.as_tensor"):
                KeyedJaggedTensor(["a"], **tensors | {name: wrong})
    for stride in (torch.tensor(1), torch.arange(200), 1.0, "1"):
        with pytest.raises(InputError, match=r"^stride=.* is no number of bags; give int"):
            KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([3]), stride=stride)


def test_concat_refuses_parts_that_do_not_fit():
    one = KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([1, 2]))
    with pytest.raises(ShapeError, match="strides"):
        KeyedJaggedTensor.concat(
            [one, KeyedJaggedTensor(["b"], torch.arange(3), lengths=torch.tensor([3]))]
        )
    with pytest.raises(InputError, match="weights"):
        KeyedJaggedTensor.concat(
            [one, KeyedJaggedTensor(["b"], torch.arange(3), torch.rand(3), torch.tensor([1, 2]))]
        )
    with pytest.raises(InputError, match="variable stride"):
        KeyedJaggedTensor.concat(
            [
                one,
                KeyedJaggedTensor(
                    ["b"],
                    torch.arange(3),
                    None,
                    torch.tensor([1, 2]),
                    stride_per_key_per_rank=[[2]],
                ),
            ]
        )
    of_two, of_three = (
        KeyedJaggedTensor(
            [key],
            torch.arange(1),
            lengths=torch.tensor([1]),
            stride_per_key_per_rank=[[1]],
            inverse_indices=([key], torch.zeros(1, rows, dtype=torch.int64)),
        )
        for key, rows in (("a", 2), ("b", 3))
    )
    with pytest.raises(ShapeError, match="strides"):
        KeyedJaggedTensor.concat([of_two, of_three])
    with pytest.raises(InputError, match="at least one"):
        KeyedJaggedTensor.concat([])
    with pytest.raises(InputError, match="no entries"):
        KeyedJaggedTensor.from_jt_dict({})
    with pytest.raises(InputError, match="weights"):
        bags = torch.tensor([1])
        KeyedJaggedTensor.from_jt_dict(
            {"a": JaggedTensor(bags, lengths=bags), "b": JaggedTensor(bags, bags, lengths=bags)}
        )


def test_what_is_made_of_a_batch_has_its_time():
    kjt = KeyedJaggedTensor(["a", "b"], torch.arange(3), lengths=torch.tensor([1, 2]), time=70)
    none = KeyedJaggedTensor(["c"], torch.arange(1), lengths=torch.tensor([1]))
    later = KeyedJaggedTensor(["d"], torch.arange(1), lengths=torch.tensor([1]), time=90)
    leaves, form = pytree.tree_flatten(kjt)
    made = [
        *kjt.split([1, 1]),
        kjt.permute([1]),
        kjt.to("cpu"),
        kjt.flatten_lengths(),
        copy.deepcopy(kjt),
        pickle.loads(pickle.dumps(kjt)),
        pytree.tree_unflatten(leaves, form),
        KeyedJaggedTensor.concat([none, kjt]),
    ]
    assert [one.time for one in made] == [70] * len(made)
    assert KeyedJaggedTensor.concat([later, kjt]).time == 90
    assert KeyedJaggedTensor.concat([none]).time is None
    with pytest.raises(InputError, match="the time 1700000000000 is not in seconds since 1970"):
        KeyedJaggedTensor(["c"], torch.arange(1), lengths=torch.tensor([1]), time=1_700_000_000_000)
