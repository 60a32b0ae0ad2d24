"""Attention over jagged sequences: equal to the padded one, and within its bound of memory."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from rayrec.errors import ConfigError, InputError, ShapeError
from rayrec.modules import (
    TargetAttention,
    attention,
    attention_tiles,
    causal_attention,
    hstu_attention,
)
from rayrec.modules.attention_groups import JaggedGroups, LengthGroup, cut_lengths
from rayrec.modules.jagged_rows import (
    JaggedOffsets,
    dots,
    expand_rows,
    softmax_rows,
    sum_rows,
    weighted_sum,
)
from tests.unit.sequence_reference import (
    padded_causal,
    padded_pointwise,
    padded_target,
    random_offsets,
)

# Sums of up to 90 products in float32, in another order.
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def leaves(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def check_equal(ours: Tensor, reference: Tensor, inputs: list[Tensor]) -> None:
    """Outputs and the gradients of a loss of them are equal; gradients by their largest part.

    The reference is in float64, since a bias has the sum of thousands of pairs as its gradient.
    """
    torch.testing.assert_close(ours.double(), reference, **CLOSE)
    factors = torch.linspace(-1, 1, ours.numel()).view(ours.shape)
    wanted = torch.autograd.grad((reference * factors).sum(), inputs)
    for got, want in zip(torch.autograd.grad((ours * factors).sum(), inputs), wanted, strict=True):
        scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
        # a bias adds up the scores of thousands of pairs
        close = CLOSE if want.dim() > 1 else {"atol": 5e-5, "rtol": 5e-5}
        torch.testing.assert_close(got / scale, want / scale, **close)


@pytest.mark.seeds(range(100))
def test_target_attention_equals_the_padded_one(seed):
    offsets = random_offsets(seed)
    query, values = leaves(seed, (len(offsets) - 1, 6), (int(offsets[-1]), 6))
    torch.manual_seed(seed)
    module = TargetAttention(6, [(), (5,), (7, 3)][seed % 3], softmax=seed % 2 == 0)
    inputs = [query, values, *module.parameters()]
    reference = padded_target(module, query.double(), values.double(), offsets)
    check_equal(module(query, values, offsets), reference, inputs)


@pytest.mark.seeds(range(100))
def test_causal_attention_equals_the_padded_one(seed):
    offsets = random_offsets(seed)
    heads = 1 + seed % 3
    inputs = leaves(seed, *[(int(offsets[-1]), 12)] * 3)
    ours = causal_attention(*inputs, offsets, heads=heads)
    reference = padded_causal(*(one.double() for one in inputs), offsets, heads)
    check_equal(ours, reference, inputs)


def test_a_value_that_is_no_number_stays_in_its_sequence():
    """Of several groups what is padded is no zero, and must be of the same sequence."""
    lengths = [150] * 10 + [3, 2, 1] * 60
    offsets = torch.tensor(np.cumsum([0, *lengths]))
    inputs = leaves(0, *[(int(offsets[-1]), 12)] * 3)
    assert len(JaggedGroups(offsets, len(inputs[0]), width=12).groups) > 1
    with torch.no_grad():
        for one in inputs:
            one[-1] = torch.nan  # the only value of the last sequence
    out = causal_attention(*inputs, offsets, heads=2)
    assert out[:-1].isfinite().all() and out[-1].isnan().all()
    grads = torch.autograd.grad(out[:-1].sum(), inputs)
    assert all(grad[:-1].isfinite().all() for grad in grads)


@pytest.mark.seeds(range(100))
def test_causal_attention_may_be_in_half_width_and_under_autocast(seed):
    offsets = random_offsets(seed)
    inputs = leaves(seed, *[(int(offsets[-1]), 12)] * 3)
    exact = causal_attention(*inputs, offsets, heads=2)
    half = causal_attention(*(one.bfloat16() for one in inputs), offsets, heads=2)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), exact, atol=0.05, rtol=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        cast = causal_attention(*inputs, offsets, heads=2)
    torch.testing.assert_close(cast.float(), exact, atol=0.05, rtol=0.05)
    half.sum().backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in inputs)


@pytest.mark.seeds(range(100))
def test_hstu_attention_equals_the_padded_one(seed, monkeypatch):
    # bounds that real batches would meet, so that there are many tiles, of one query too
    bounds = attention_tiles.TileBounds(
        tile=[1, 300, 1 << 19][seed % 3],
        queries=[64, 512][seed % 2],
        least=[1, 32, 512][seed // 2 % 3],
        kept=[0, 2000, 1 << 22][seed // 3 % 3],
        whole=[0, 0, 1 << 18][seed % 3],
    )
    monkeypatch.setattr(attention_tiles, "CPU_BOUNDS", bounds)
    offsets = random_offsets(seed)
    total, heads = int(offsets[-1]), 1 + seed % 3
    query, key, value, position, time = leaves(seed, *[(total, 12)] * 3, (90,), (9,))
    # seconds since 1970, some equal and some that go back
    generator = torch.Generator().manual_seed(seed)
    times = torch.randint(-2, 5000, (total,), generator=generator).cumsum(0) + 1_700_000_000
    of_time = time if seed % 5 else None
    ours = hstu_attention(query, key, value, offsets, position, of_time, times, heads)
    inputs = [query, key, value, position] + ([] if of_time is None else [time])
    q, k, v, p, *t = (one.double() for one in inputs)
    reference = padded_pointwise(q, k, v, offsets, p, t[0] if t else None, times, heads)
    check_equal(ours, reference, inputs)


@pytest.mark.parametrize("histories", [0, 3])
def test_no_values_have_no_states_and_gradients_of_zero(histories):
    offsets = torch.zeros(histories + 1, dtype=torch.int64)
    position, time, *inputs = leaves(0, (9,), (4,), (0, 6), (0, 6), (0, 6))
    times = torch.zeros(0, dtype=torch.int64)
    ours = hstu_attention(*inputs, offsets, position, time, times, 2)
    assert ours.shape == causal_attention(*inputs, offsets, heads=2).shape == (0, 6)
    grads = torch.autograd.grad(ours.sum(), [position, time, *inputs])
    assert [grad.shape for grad in grads] == [(9,), (4,), (0, 6), (0, 6), (0, 6)]
    assert not any(grad.any() for grad in grads)


def test_rows_have_the_gradients_of_their_gradients():
    offsets = torch.tensor([0, 2, 2, 5, 6])
    sequences = JaggedOffsets(offsets, 6)
    rows, values, scores = (x.double() for x in leaves(0, (4, 3), (6, 3), (6,)))
    for function, inputs in (
        (expand_rows, [rows]),
        (sum_rows, [values]),
        (sum_rows, [scores]),
        (dots, [rows, values]),
        (weighted_sum, [scores, values]),
        (softmax_rows, [scores]),
    ):
        inputs = [one.detach().requires_grad_() for one in inputs]
        call = lambda *given, function=function: function(*given, sequences)  # noqa: E731
        assert torch.autograd.gradcheck(call, inputs)
        assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.seeds(range(50))
def test_groups_hold_every_sequence_and_pad_less_than_a_call(seed):
    offsets = random_offsets(seed)
    lengths = offsets.diff()
    total = int(offsets[-1])
    groups = JaggedGroups(offsets, total)
    values = torch.randint(1, 1 << 62, (total, 3))
    sequences = {tuple(bag[:, 0].tolist()) for bag in values.tensor_split(offsets[1:-1])}
    left = Counter(lengths.tolist())
    parts = groups.pad(values)
    for group, padded in zip(groups.groups, parts, strict=True):
        assert padded.shape == (group.sequences, group.length, 3)
        for sequence in padded:
            is_value = sequence[:, 0] > 0
            own = sequence[is_value]
            assert tuple(own[:, 0].tolist()) in sequences
            assert is_value[: len(own)].all() and not sequence[len(own) :].any()
            left[len(own)] -= 1
    assert not parts or torch.equal(groups.unpad(parts), values)
    if len(groups.groups) > 1:
        assert [group.length for group in groups.groups] == sorted(
            (group.length for group in groups.groups), reverse=True
        )
    assert not any(number for length, number in left.items() if length), "each one once"
    assert not total or max(group.length for group in groups.groups) == int(lengths.max())


def test_the_way_follows_fill_and_length():
    equal = cut_lengths(Counter({50: 200}))
    assert equal == [(200, 50)]
    short = cut_lengths(Counter(range(1, 20)))
    assert short == [(19, 19)], "short sequences are padded to one call"
    long = cut_lengths(Counter(range(100, 2000, 100)))
    assert long == [(1, length) for length in range(1900, 0, -100)], "a call for each"
    middle = cut_lengths(Counter(dict.fromkeys(range(1, 101), 20)))
    assert 1 < len(middle) < 100
    assert sum(count for count, _ in middle) == 2000


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("hidden", [(), (5,)])
def test_target_attention_under_autocast(hidden, softmax):
    """Products are in bfloat16 then, and the values whose weights they become are not."""
    torch.manual_seed(0)
    offsets, attend = torch.tensor([0, 3, 3, 7, 8]), TargetAttention(4, hidden, softmax=softmax)
    query, values = torch.randn(4, 4), torch.randn(8, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(query, values, offsets)
    found.sum().backward()
    assert found.dtype is torch.float32 and values.grad.isfinite().all()
    torch.testing.assert_close(found, attend(query, values, offsets), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "offsets", [[], [0], [0, 2], [0, 4], [1, 3], [0, 3, 2, 3], [-1, 3], [[0, 3], [0, 3]]]
)
def test_offsets_that_are_not_those_of_the_values_are_refused(offsets):
    """Kernels would read, and write, beside the values."""
    values, offsets = torch.randn(3, 8), torch.tensor(offsets, dtype=torch.int64)
    for attend in (
        lambda: causal_attention(values, values, values, offsets, heads=2),
        lambda: TargetAttention(8)(torch.randn(max(len(offsets) - 1, 0), 8), values, offsets),
    ):
        with pytest.raises(InputError, match="must ascend from 0 to 3"):
            attend()


@pytest.mark.parametrize("hidden", [(), (6,), (5, 4)])
@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("length", [0, 1, 9])
def test_many_queries_of_one_sequence(hidden, softmax, length, monkeypatch):
    monkeypatch.setattr(attention, "_MOST_PAIRS", 30)
    torch.manual_seed(length)
    attend = TargetAttention(8, hidden, softmax).double()
    query, values = (torch.randn(n, 8, dtype=torch.float64) for n in (11, length))
    query.requires_grad_(), values.requires_grad_()
    for rows in (query, query[:0]):
        ours = attend(rows, values, torch.tensor([0, length]))
        offsets = length * torch.arange(len(rows) + 1)
        wanted = attend(rows, values.repeat(len(rows), 1), offsets)
        torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-10)
    ours = attend(query, values, torch.tensor([0, length]))
    wanted = attend(query, values.repeat(11, 1), length * torch.arange(12))
    given = [query, values, *attend.parameters()]
    grads = [torch.autograd.grad(one.square().sum(), given) for one in (ours, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


def test_offsets_without_numbers_are_not_looked_at():
    """Programs are traced with such: the attention of a candidate exports."""
    values, offsets, attend = torch.randn(6, 8), torch.tensor([0, 2, 2, 6]), TargetAttention(8)
    given = (torch.randn(3, 8), values, offsets)
    with torch.no_grad():
        program = torch.export.export(attend, given).module()
        assert torch.equal(program(*given), attend(*given))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert attend(*(mode.from_tensor(one) for one in given)).shape == (3, 8)


def test_a_longer_sequence_than_said_is_refused():
    offsets = torch.tensor([0, 2, 9])
    values = torch.randn(9, 4)
    with pytest.raises(InputError, match=r"has 7 values, more than the 6 .*max_length"):
        causal_attention(values, values, values, offsets, max_length=6)
    for longest in (None, 8):
        with pytest.raises(InputError, match="has 7 values, more than the 6"):
            hstu_attention(values, values, values, offsets, torch.zeros(6), max_length=longest)
    with pytest.raises(ConfigError, match="hidden"):
        TargetAttention(4, (0,))


def test_heads_and_queries_that_do_not_fit_are_refused():
    values, offsets = torch.randn(3, 8), torch.tensor([0, 1, 3])
    for attend in (causal_attention, partial(hstu_attention, position_bias=torch.zeros(6))):
        for heads in (0, 3):
            with pytest.raises(ConfigError, match=f"dim=8 .* heads={heads}"):
                attend(values, values, values, offsets, heads=heads)
    with pytest.raises(ShapeError, match="3 queries for 2 sequences; give one for each"):
        TargetAttention(8)(values, values, offsets)


def test_keys_values_and_times_of_another_number_are_refused():
    """Kernels would read beside them, and a sequence would have the times of another one."""
    values, offsets, places = torch.randn(3, 8), torch.tensor([0, 1, 3]), torch.zeros(6)
    for attend in (causal_attention, partial(hstu_attention, position_bias=places)):
        for key, value in ((values[:2], values), (values, values.repeat(2, 1))):
            with pytest.raises(ShapeError, match=r"query, key and value are \(3, 8\), .* \(T, D\)"):
                attend(values, key, value, offsets)
    for times in (None, torch.arange(2), torch.arange(4), torch.zeros(3, 1)):
        with pytest.raises(InputError, match=r"times .* of 3 values; give a time for each"):
            hstu_attention(values, values, values, offsets, places, torch.zeros(4), times)


@pytest.mark.parametrize("bounds", [attention_tiles.CPU_BOUNDS, attention_tiles.GPU_BOUNDS])
def test_tiles_are_within_their_bound_and_cover_every_query(bounds):
    for sequences, length, heads in ((1, 9000, 2), (300, 50, 4), (7, 1, 1), (2, 300_000, 4)):
        group = LengthGroup(sequences, length)
        seen = Counter()
        for tile in attention_tiles.tiles_of(group, heads, bounds):
            count = tile.span.stop - tile.span.start
            queries = tile.rows.stop - tile.rows.start
            weights = count * heads * queries * tile.rows.stop
            assert weights <= max(bounds.tile, heads * length)
            seen[tile.rows.start] += count * queries
        assert sum(seen.values()) == sequences * length


@pytest.mark.parametrize("kept", [0, 1 << 16])
def test_no_tensor_of_all_queries_by_all_keys_is_made(kept, monkeypatch):
    bounds = attention_tiles.CPU_BOUNDS._replace(tile=1 << 12, kept=kept)
    monkeypatch.setattr(attention_tiles, "CPU_BOUNDS", bounds)
    largest = _Largest()
    offsets = torch.tensor([0, 400, 500, 800])
    query, key, value, position, time = leaves(0, *[(800, 8)] * 3, (400,), (5,))
    times = torch.arange(800)
    with largest:
        ours = hstu_attention(query, key, value, offsets, position, time, times)
        ours = ours + causal_attention(query, key, value, offsets, heads=2)
        ours.sum().backward()
    # 800 x 8 values, padded to at most 3 x 400 x 8; a matrix of one head has 160,000 weights
    assert largest.elements <= 3 * 400 * 8


class _Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most elements of any tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else [out]:
            if isinstance(one, Tensor):
                self.elements = max(self.elements, one.numel())
        return out


def test_types_of_half_width_are_close():
    offsets = torch.tensor(np.cumsum([0, 5, 0, 30, 12]))
    query, key, value, position = leaves(1, *[(47, 8)] * 3, (30,))
    exact = hstu_attention(query, key, value, offsets, position, heads=2)
    parts = [one.bfloat16() for one in (query, key, value)]
    close = hstu_attention(*parts, offsets, position, heads=2)
    assert close.dtype == torch.bfloat16
    torch.testing.assert_close(close.float(), exact, atol=0.05, rtol=0.05)
    close.sum().backward()
    assert position.grad is not None and position.grad.isfinite().all()
