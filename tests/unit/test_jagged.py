"""JaggedTensor against lists of bags, and FBGEMM's wrappers against plain torch."""

from __future__ import annotations

import copy
import random
from itertools import pairwise

import pytest
import torch
from torch.utils import _pytree as pytree

from rayrec.errors import InputError
from rayrec.sparse import JaggedTensor, JaggedTensors, KeyedJaggedTensor, ops

SEEDS = range(20)


def cumsum_from_zero(lengths):
    """`ops.complete_cumsum` in plain torch."""
    return torch.cat([lengths.new_zeros(1), torch.cumsum(lengths, 0, dtype=lengths.dtype)])


def permuted_keys(indices, lengths, values, weights):
    """`ops.permute_keys` in plain torch."""
    ids = values.split(lengths.sum(1).tolist())
    taken = torch.cat([ids[i] for i in indices] or [values[:0]])
    if weights is None:
        return lengths[list(indices)], taken, None
    parts = weights.split(lengths.sum(1).tolist())
    return lengths[list(indices)], taken, torch.cat([parts[i] for i in indices] or [weights[:0]])


def padded_dense(values, offsets, width, padding_value):
    """`ops.jagged_to_padded_dense` in plain torch."""
    bounds = offsets.tolist()
    dense = values.new_full((len(bounds) - 1, width, *values.shape[1:]), padding_value)
    for row, (start, stop) in enumerate(pairwise(bounds)):
        taken = values[start:stop][:width]
        dense[row, : len(taken)] = taken
    return dense


def random_bags(seed: int, width: int | None = None) -> list[torch.Tensor]:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    return [
        torch.rand(
            rng.choice([0, 0, 1, 3]), *([] if width is None else [width]), generator=generator
        )
        for _ in range(rng.randint(1, 6))
    ]


@pytest.mark.seeds(SEEDS)
@pytest.mark.parametrize("width", [None, 4])
def test_bags_survive_the_round_trip(seed, width):
    bags = random_bags(seed, width)
    jt = JaggedTensor.from_dense(bags, weights=[bag + 1 for bag in bags])
    for got, want in zip(jt.to_dense(), bags, strict=True):
        assert torch.equal(got, want)
    for got, want in zip(jt.to_dense_weights(), bags, strict=True):
        assert torch.equal(got, want + 1)
    assert jt.lengths().tolist() == [len(bag) for bag in bags]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [[], [0], [2, 0, 3], [0, 0]])
def test_lengths_and_offsets_derive_each_other(lengths, dtype):
    values = torch.arange(sum(lengths))
    offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    by_lengths = JaggedTensor(values, lengths=torch.tensor(lengths, dtype=dtype))
    by_offsets = JaggedTensor(values, offsets=torch.tensor(offsets, dtype=dtype))
    assert by_lengths.offsets_or_none() is None and by_offsets.lengths_or_none() is None
    assert by_lengths.offsets().tolist() == offsets and by_lengths.offsets().dtype == dtype
    assert by_offsets.lengths().tolist() == lengths and by_offsets.lengths().dtype == dtype
    assert by_lengths.offsets() is by_lengths.offsets()


@pytest.mark.seeds(SEEDS)
@pytest.mark.parametrize("width", [None, 4])
@pytest.mark.parametrize("desired", [None, 0, 1, 2, 5])
def test_padded_dense_cuts_and_pads(seed, width, desired):
    bags = random_bags(seed, width)
    jt = JaggedTensor.from_dense(bags, weights=bags)
    longest = max(len(bag) for bag in bags) if desired is None else desired
    want = padded_dense(jt.values(), jt.offsets(), longest, -2.0)
    assert torch.equal(jt.to_padded_dense(desired, -2.0), want)
    assert torch.equal(jt.to_padded_dense_weights(desired, -2.0), want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int16, torch.uint8])
@pytest.mark.parametrize("width", [None, 4])
def test_padded_dense_takes_values_of_any_type(dtype, width):
    bags = [(10 * bag).to(dtype) for bag in random_bags(1, width)]
    jt = JaggedTensor.from_dense(bags)
    for desired in (1, 2, 5):
        want = padded_dense(jt.values(), jt.offsets(), desired, 3.0)
        assert torch.equal(jt.to_padded_dense(desired, 3.0), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_padded_dense_is_differentiable(dtype):
    values = torch.rand(5, requires_grad=True, dtype=dtype)
    JaggedTensor(values, lengths=torch.tensor([3, 2])).to_padded_dense(2).sum().backward()
    assert values.grad.tolist() == [1, 1, 0, 1, 1]


def test_dense_lengths_keep_the_head_of_each_row():
    jt = JaggedTensor.from_dense_lengths(
        torch.tensor([[1, 2], [3, 4], [5, 6]]),
        torch.tensor([1, 0, 2]),
        torch.tensor([[0.1, 0], [0, 0], [0.5, 0.6]]),
    )
    assert jt.values().tolist() == [1, 5, 6]
    assert jt.weights().tolist() == pytest.approx([0.1, 0.5, 0.6])


def test_mistakes_raise_typed_errors():
    with pytest.raises(InputError, match="lengths or offsets"):
        JaggedTensor(torch.arange(3))
    with pytest.raises(InputError, match="must be integers"):
        JaggedTensor(torch.arange(3), lengths=torch.tensor([3.0]))
    with pytest.raises(InputError, match="no weights"):
        JaggedTensor(torch.arange(3), lengths=torch.tensor([3])).weights()
    with pytest.raises(InputError, match="at least one tensor"):
        JaggedTensor.from_dense([])


@pytest.mark.parametrize("weighted", [False, True])
def test_empty_has_no_bags(weighted):
    jt = JaggedTensor.empty(weighted, values_dtype=torch.int64, weights_dtype=torch.float64)
    assert jt.offsets().tolist() == [0] and jt.lengths().tolist() == [] and jt.to_dense() == []
    assert jt.to_padded_dense().shape == (0, 0) and (jt.weights_or_none() is not None) == weighted
    like = JaggedTensor.empty_like(JaggedTensor(torch.arange(3), offsets=torch.tensor([0, 1, 3])))
    assert (
        like.values().numel() == 0
        and like.values().dtype == torch.int64
        and like.offsets().tolist() == [0]
    )
    assert JaggedTensor(
        torch.empty(0), offsets=torch.empty(0, dtype=torch.int32)
    ).offsets().tolist() == [0]


@pytest.mark.parametrize("sizes", ["lengths", "offsets"])
def test_sizes_from_an_empty_list_are_integers(sizes):
    # torch makes floats of an empty list
    jt = JaggedTensor(torch.tensor([]), **{sizes: torch.tensor([])})
    assert jt.lengths().dtype == jt.offsets().dtype == torch.int64 and jt.to_dense() == []
    assert jt.lengths().numel() == 0 and jt.offsets().tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_narrow_lengths_have_room_for_their_sum(dtype):
    jt = JaggedTensor(torch.arange(300), lengths=torch.tensor([100] * 3, dtype=dtype))
    assert jt.offsets().tolist() == [0, 100, 200, 300] and jt.lengths().dtype == torch.int32
    kjt = KeyedJaggedTensor(["f"], torch.arange(300), lengths=torch.tensor([100] * 3, dtype=dtype))
    assert [len(bag) for bag in kjt["f"].to_dense()] == [100] * 3


def test_empty_like_on_a_device_keeps_shapes():
    like = JaggedTensor.empty_like(
        JaggedTensor(torch.arange(3), offsets=torch.tensor([0, 1, 3])), device="meta"
    )
    assert (
        like.values().shape == (3,)
        and like.offsets().shape == (3,)
        and like.device().type == "meta"
    )


def test_pytree_map_reaches_only_the_tensors_that_are_there():
    jt = JaggedTensor(torch.arange(3), lengths=torch.tensor([1, 2]))
    doubled = pytree.tree_map(lambda t: t * 2, jt)
    assert (
        doubled.values().tolist() == [0, 2, 4]
        and doubled.weights_or_none() is None
        and doubled.offsets_or_none() is None
    )
    named = pytree.tree_map(lambda t: t * 2, JaggedTensors(a=jt))
    assert isinstance(named, JaggedTensors) and named["a"].values().tolist() == [0, 2, 4]


def test_text_shows_the_bags():
    jt = JaggedTensor(torch.tensor([1.0, 2.0, 3.0]), offsets=torch.tensor([0, 2, 2, 3]))
    assert str(jt) == "JaggedTensor({\n    [[1.0, 2.0], [], [3.0]]\n})\n"
    assert repr(jt) == "JaggedTensor(bags=3, values=(3,) float32, weights=None, device='cpu')"
    weighted = JaggedTensor(
        torch.tensor([1, 2]), torch.tensor([0.5, 1.0]), lengths=torch.tensor([1, 1])
    )
    assert (
        str(weighted)
        == 'JaggedTensor({\n    "values": [[1], [2]],\n    "weights": [[0.5], [1.0]]\n})\n'
    )


def test_copies_are_independent_objects():
    jt = JaggedTensor(torch.arange(3), lengths=torch.tensor([1, 2]))
    assert jt.to("cpu") is not jt and torch.equal(copy.deepcopy(jt).values(), jt.values())
    assert jt.size_in_bytes() == 5 * 8


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [0, 1, 1000])
def test_complete_cumsum_equals_reference(size, dtype):
    lengths = torch.randint(0, 9, (size,), generator=torch.Generator().manual_seed(size)).to(dtype)
    got, want = ops.complete_cumsum(lengths), cumsum_from_zero(lengths)
    assert torch.equal(got, want) and got.dtype == dtype


@pytest.mark.seeds(SEEDS)
def test_gathers_of_keys_equal_reference(seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    keys, rows = rng.randint(1, 5), rng.randint(1, 4)
    lengths = torch.randint(0, 4, (keys, rows), generator=generator)
    values = torch.randint(0, 100, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(values), generator=generator) if seed % 2 else None
    indices = [rng.randrange(keys) for _ in range(rng.randint(1, 7))]
    total = int(lengths.sum(1)[indices].sum())
    want = permuted_keys(indices, lengths, values, weights)
    got = ops.permute_keys(indices, lengths, values, weights, total)
    for one, two in zip(got, want, strict=True):
        assert (one is None and two is None) or torch.equal(one, two)
    cuts = ops.offsets_of(lengths.sum(1).tolist())
    assert torch.equal(ops.gather_segments(values, cuts, indices), want[1])


def test_runs_join_neighbours():
    assert (
        ops.runs([3, 4, 5, 1, 1, 2]) == [range(3, 6), range(1, 2), range(1, 3)]
        and ops.runs([]) == []
    )
