"""Bucketizing by row blocks equals its plain-torch reference."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rayrec.distributed.steps.bucketize import block_bucketize


def reference(
    lengths: Tensor,
    ids: Tensor,
    weights: Tensor | None,
    cuts: Sequence[Tensor],
    bags: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """What `block_bucketize` does, in plain torch."""
    blocks = cuts[0].numel() - 1
    feature_of = [f for f, count in enumerate(bags) for _ in range(count)]
    per_bag = lengths.tolist()
    positions = torch.arange(ids.numel())
    out_lengths: list[int] = []
    picked = [positions[:0]]
    local = [ids[:0]]
    for block in range(blocks):
        for feature, bag, where in zip(
            feature_of, ids.split(per_bag), positions.split(per_bag), strict=True
        ):
            low, high = cuts[feature][block : block + 2].tolist()
            inside = (bag >= low) & (bag < high)
            out_lengths.append(int(inside.sum()))
            picked.append(where[inside])
            local.append(bag[inside] - low)
    origin = torch.cat(picked)
    return (
        torch.tensor(out_lengths, dtype=lengths.dtype),
        torch.cat(local),
        None if weights is None else weights[origin],
        origin,
    )


@pytest.mark.parametrize("varying", [False, True])
@pytest.mark.seeds(range(50))
def test_block_bucketize_equals_reference(seed: int, varying: bool) -> None:
    rng = random.Random(seed)
    features, batch, blocks = rng.randint(1, 4), rng.randint(0, 5), rng.randint(2, 5)
    sizes = [rng.randint(blocks, 30) for _ in range(features)]
    bags = [rng.randint(0, 5) if varying else batch for _ in range(features)]
    feature_of = [f for f, count in enumerate(bags) for _ in range(count)]
    cuts = [torch.tensor([0, *sorted(rng.sample(range(1, n), blocks - 1)), n]) for n in sizes]
    lengths = torch.tensor([rng.randint(0, 4) for _ in feature_of], dtype=torch.int32)
    ids = torch.tensor(
        [
            rng.randrange(sizes[f])
            for f, n in zip(feature_of, lengths.tolist(), strict=True)
            for _ in range(n)
        ],
        dtype=torch.int64,
    )
    weights = torch.rand(ids.numel()) if rng.random() < 0.5 else None
    got = block_bucketize(lengths, ids, weights, cuts, bags if varying else None, where=True)
    want = reference(lengths, ids, weights, cuts, bags)
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        assert g is None or torch.equal(g, w)
