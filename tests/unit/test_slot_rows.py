"""Rows of bfloat16, which FBGEMM's CPU operators do not know, are looked up as their float32 values
are.
"""

from __future__ import annotations

import random

import pytest
import torch

from rayrec.distributed.kernels import slot_rows
from rayrec.distributed.kernels.slot_rows import SlotRows
from rayrec.distributed.kernels.workers import Workers
from rayrec.sparse.ops import complete_cumsum, offsets_of

CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # float32 sums in another order


@pytest.mark.parametrize("longest", [1, 0, 6])
@pytest.mark.parametrize("widened", [8, 1 << 17])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.seeds(range(6))
def test_lookups_and_gradients_of_weights_equal_those_of_float32(
    seed: int, threads: int, widened: int, longest: int, monkeypatch
) -> None:
    monkeypatch.setattr(slot_rows, "_WIDENED", widened)
    monkeypatch.setattr("rayrec.distributed.kernels.parts.LEAST_VALUES", 1)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    slots, bags = rng.randint(1, 4), rng.choice([0, 1, 9])
    sizes, widths = (
        [rng.randint(1, 20) for _ in range(slots)],
        [rng.randint(1, 9) for _ in range(slots)],
    )
    flat = torch.randn(
        3 + sum(n * w for n, w in zip(sizes, widths, strict=True)), generator=generator
    ).bfloat16()
    starts = [
        3 + first for first in offsets_of(n * w for n, w in zip(sizes, widths, strict=True))[:-1]
    ]

    def both(column: int) -> list[SlotRows]:
        return [
            SlotRows(rows, starts, offsets_of(sizes), widths, Workers(threads), column)
            for rows in (flat.float(), flat)
        ]

    exact, ours = both(0)
    lengths = torch.tensor(
        [rng.randint(min(longest, 1), longest) for _ in range(slots * bags)], dtype=torch.int64
    )
    ids = torch.cat(
        [
            torch.randint(0, n, (int(part.sum()),))
            for n, part in zip(sizes, lengths.split([bags] * slots), strict=True)
        ]
    )
    offsets = complete_cumsum(lengths)
    for weights in (None, torch.rand(ids.numel(), generator=generator)):
        found, want = ours.look_up(ids, offsets, weights), exact.look_up(ids, offsets, weights)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, want, **CLOSE)
    exact, ours = both(2)  # gradients may begin in any column
    grad = torch.randn(bags, 2 + sum(widths) + 1, generator=generator)
    torch.testing.assert_close(
        ours.weight_grad(grad, ids, offsets), exact.weight_grad(grad, ids, offsets), **CLOSE
    )
