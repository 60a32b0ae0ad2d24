"""Encoders of sequences: each sequence as if it were alone, causal, and the same on any ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rayrec.errors import ConfigError, InputError
from rayrec.modules import (
    GRUEncoder,
    HSTUEncoder,
    JaggedDropout,
    SASRecEncoder,
    attention_tiles,
    row_keys,
)
from rayrec.modules.jagged_dropout import mix, value_keys
from rayrec.modules.jagged_rows import JaggedOffsets
from tests.unit.sequence_reference import plain_states, random_offsets

# sums of float64 in another order, through two layers
CLOSE = {"atol": 1e-10, "rtol": 1e-10}
ENCODERS = {
    "sasrec": lambda p: SASRecEncoder(8, max_length=90, dropout=p),
    "newest": lambda p: SASRecEncoder(8, max_length=90, dropout=p, positions="newest"),
    "hstu": lambda p: HSTUEncoder(8, max_length=90, dropout=p),
    "no time": lambda p: HSTUEncoder(8, max_length=90, dropout=p, time_buckets=0),
    "gru": lambda p: GRUEncoder(8, layers=2, dropout=p),
}


def made(name: str, seed: int, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    encoder = ENCODERS[name](dropout)
    for parameter in encoder.parameters():
        # biases begin as zeros, which would hide a wrong one
        nn.init.normal_(parameter, std=0.3)
    return encoder.double()


def world(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values, offsets and times."""
    offsets = random_offsets(seed)
    total = int(offsets[-1])
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(total, 8, generator=generator, dtype=torch.float64).requires_grad_()
    times = torch.randint(0, 5000, (total,), generator=generator).cumsum(0) + 1_700_000_000
    return values, offsets, times


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.seeds(range(40))
def test_a_batch_equals_its_sequences_one_by_one(seed, name):
    encoder = made(name, seed)
    values, offsets, times = world(seed)
    ours = encoder(values, offsets, times)
    spans = list(zip(offsets.tolist(), offsets[1:].tolist(), strict=False))
    parts = [plain_states(encoder, values[a:b], times[a:b]) for a, b in spans if b > a]
    reference = torch.cat([values[:0] * 1, *parts])
    torch.testing.assert_close(ours, reference, **CLOSE)
    inputs = [values, *encoder.parameters()]
    factors = torch.linspace(-1, 1, ours.numel()).view(ours.shape)
    got = torch.autograd.grad((ours * factors).sum(), inputs, allow_unused=True)
    wanted = torch.autograd.grad((reference * factors).sum(), inputs, allow_unused=True)
    for one, want in zip(got, wanted, strict=True):
        if one is None and want is None:
            # no sequence has a value
            continue
        want = torch.zeros_like(one) if want is None else want
        one = torch.zeros_like(want) if one is None else one
        torch.testing.assert_close(one, want, **CLOSE)


@pytest.mark.parametrize("positions", ["oldest", "newest"])
@pytest.mark.parametrize("time_buckets", [0, 12])
@pytest.mark.seeds(range(20))
def test_each_target_is_encoded_as_the_last_value_of_the_sequence(
    seed, positions, time_buckets, monkeypatch
):
    torch.manual_seed(seed)
    encoder = HSTUEncoder(8, 40, positions=positions, time_buckets=time_buckets, dropout=0.5)
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, std=0.3)
    encoder = encoder.double().eval()
    before, count = (0, 1, 39, 17)[seed % 4], (0, 1, 7)[seed % 3]
    whole = torch.randn(before + count, 8, dtype=torch.float64)
    # candidates of their own times, before some of the events, too
    times = 1_700_000_000 + torch.randint(0, 5000, (before + count,)) if time_buckets else None
    if seed % 2:  # a few targets at a time
        bounds = attention_tiles.CPU_BOUNDS._replace(tile=100)
        monkeypatch.setattr(attention_tiles, "CPU_BOUNDS", bounds)
    ours = encoder.encode_targets(whole[:before], whole[before:], times)
    one_by_one = [
        encoder(
            torch.cat([whole[:before], whole[before + i :][:1]]),
            torch.tensor([0, before + 1]),
            None if times is None else torch.cat([times[:before], times[before + i :][:1]]),
        )[-1:]
        for i in range(count)
    ]
    torch.testing.assert_close(ours, torch.cat([whole[:0], *one_by_one]), **CLOSE)


def test_a_sequence_that_has_no_place_for_a_target_is_refused():
    encoder, values = HSTUEncoder(8, 5, time_buckets=0), torch.randn(5, 8)
    with pytest.raises(InputError, match="has 6 values, more than the 5"):
        encoder.encode_targets(values, values)
    with pytest.raises(InputError, match="was given no times"):
        HSTUEncoder(8, 6).encode_targets(values, values)


@pytest.mark.parametrize("name", ["sasrec", "hstu", "gru"])
def test_a_state_does_not_depend_on_later_values(name):
    encoder = made(name, 0).eval()
    values, _, times = world(2)
    offsets = torch.tensor([0, 30, 45])
    first = encoder(values[:45], offsets, times[:45])
    changed, later = values[:45].clone(), times[:45].clone()
    changed[20:30] = changed[20:30].flip(1)
    later[20:30] += 999
    second = encoder(changed, offsets, later)
    assert torch.equal(first[:20], second[:20])
    assert torch.equal(first[30:], second[30:])
    assert not torch.isclose(first[20:30], second[20:30]).all(1).any()


@pytest.mark.parametrize("name", ["sasrec", "hstu", "gru"])
@pytest.mark.seeds(range(30))
def test_dropout_is_the_same_on_any_number_of_ranks(seed, name):
    encoder = made(name, seed, dropout=0.4)
    values, offsets, times = world(seed)
    rows = len(offsets) - 1
    whole = encoder(values, offsets, times, row_keys(seed, 7, 0, rows))
    ranks = 1 + seed % 3
    parts = []
    for rank in range(ranks):
        low, high = rank * rows // ranks, (rank + 1) * rows // ranks
        own, span = offsets[low : high + 1], slice(int(offsets[low]), int(offsets[high]))
        keys = row_keys(seed, 7, low, high - low)
        parts.append(encoder(values[span], own - own[0], times[span], keys))
    torch.testing.assert_close(torch.cat(parts), whole, **CLOSE)
    if len(values):
        other = encoder(values, offsets, times, row_keys(seed, 8, 0, rows))
        assert not torch.allclose(other, whole), "another step, another mask"
        assert torch.equal(
            encoder.eval()(values, offsets, times, row_keys(seed, 8, 0, rows)),
            encoder(values, offsets, times),
        ), "nothing is dropped outside of training"


def _mixed(x: int) -> int:
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
    return x ^ x >> 31


def test_the_mask_is_that_of_its_definition():
    seed, step, first, layer, p = -3, 2**40, 11, 6, 0.3
    offsets = torch.tensor([0, 3, 3, 5])
    keys = value_keys(row_keys(seed, step, first, 3), JaggedOffsets(offsets, 5))
    mask = JaggedDropout(p, layer).mask(keys, 10)
    bound = (1 << 64) - 1
    dropped = round(p * 65536)
    for value, (row, position) in enumerate([(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)]):
        key = _mixed(_mixed(_mixed(seed & bound) ^ step) ^ (first + row))
        key = _mixed(key ^ position)
        for column in range(10):
            word = (layer << 32) + column // 4
            bits = _mixed((key + word * 0x9E3779B97F4A7C15) & bound) >> 16 * (column % 4) & 0xFFFF
            signed = bits - 65536 if bits >= 32768 else bits
            kept = signed >= dropped - 32768
            assert mask[value, column] == pytest.approx(kept / (1 - dropped / 65536))


def test_a_mask_drops_its_share_and_differs_by_layer():
    keys = mix(torch.arange(20_000))
    masks = [JaggedDropout(p, layer).mask(keys, 16) for p in (0.1, 0.5) for layer in (0, 1)]
    for mask, p in zip(masks, (0.1, 0.1, 0.5, 0.5), strict=True):
        # five standard deviations of 320,000 draws
        share = float((mask == 0).float().mean())
        assert share == pytest.approx(p, abs=5 * np.sqrt(0.25 / 320_000))
        assert float(mask.mean()) == pytest.approx(1, abs=0.01)
        assert float((mask == 0).float().mean(0).max()) == pytest.approx(p, abs=0.02)
    together = ((masks[2] == 0) & (masks[3] == 0)).float().mean()
    assert float(together) == pytest.approx(0.25, abs=0.01), "layers are independent"


def test_a_share_just_below_one_leaves_some():
    mask = JaggedDropout(1 - 1e-6).mask(mix(torch.arange(200_000)), 8)
    kept = mask[mask != 0]
    assert 0 < len(kept) < 100 and kept.unique().tolist() == [65536]


def test_what_does_not_fit_is_refused():
    values, times = torch.randn(91, 8, dtype=torch.float64), torch.arange(91)
    offsets = torch.tensor([0, 91])
    for name in ("sasrec", "hstu"):
        with pytest.raises(InputError, match="91 values, more than the 90"):
            made(name, 0)(values, offsets, times)
    with pytest.raises(InputError, match="was given no times"):
        made("hstu", 0)(values[:3], torch.tensor([0, 3]))
    with pytest.raises(ConfigError, match="heads=3"):
        SASRecEncoder(8, heads=3)
    with pytest.raises(ConfigError, match="positions='first'"):
        HSTUEncoder(8, positions="first")
    with pytest.raises(ConfigError, match="layers=0"):
        GRUEncoder(8, layers=0)
    with pytest.raises(ConfigError, match=r"p=1"):
        JaggedDropout(1.0)
