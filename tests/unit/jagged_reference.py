"""Random batches as plain Python lists, and the same as tensors: the reference of the tests of
jagged containers.

A `PlainBatch` is key -> bags -> ids. Batches may be weighted, may have a variable number of bags
per key, may have empty bags, empty keys, no rows and no keys.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from rayrec.sparse import KeyedJaggedTensor


@dataclass(frozen=True, kw_only=True)
class PlainBatch:
    """Bags of ids per key; `weights` has the same shape or is None; `ranks` is bags per key per
    rank of a VBE batch.
    """

    bags: dict[str, list[list[int]]]
    weights: dict[str, list[list[float]]] | None
    ranks: list[list[int]] | None
    inverse: list[list[int]] | None
    rows: int
    as_offsets: bool
    dtype: torch.dtype

    def kjt(self) -> KeyedJaggedTensor:
        """The same batch as tensors."""
        lengths = torch.tensor(
            [len(bag) for bags in self.bags.values() for bag in bags], dtype=self.dtype
        )
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(self.dtype)])
        weights = (
            None
            if self.weights is None
            else [w for bags in self.weights.values() for bag in bags for w in bag]
        )
        return KeyedJaggedTensor(
            keys=list(self.bags),
            values=torch.tensor(
                [i for bags in self.bags.values() for bag in bags for i in bag], dtype=torch.int64
            ),
            weights=None if weights is None else torch.tensor(weights, dtype=torch.float32),
            lengths=None if self.as_offsets else lengths,
            offsets=offsets if self.as_offsets else None,
            stride=self.rows if not self.bags else None,
            stride_per_key_per_rank=self.ranks,
            inverse_indices=None
            if self.inverse is None
            else (list(self.bags), torch.tensor(self.inverse).view(len(self.bags), -1)),
        )


def random_batch(seed: int, variable: bool | None = None, keys: int | None = None) -> PlainBatch:
    """A batch drawn from `seed`; `variable` and `keys` force a kind."""
    rng = random.Random(seed)
    count = rng.randint(0, 5) if keys is None else keys
    rows = rng.choice([0, 1, 2, 5])
    if variable is None:
        variable = bool(count) and rng.random() < 0.4
    ranks = inverse = None
    if variable:
        ranks = [[rng.randint(1 if rows else 0, 3) for _ in range(2)] for _ in range(count)]
        inverse = (
            [[rng.randrange(sum(row)) for _ in range(rows)] for row in ranks] if rows else None
        )
    sizes = [sum(row) for row in ranks] if ranks is not None else [rows] * count
    bags = {
        f"f{k}": [
            [rng.randrange(100) for _ in range(rng.choice([0, 0, 1, 2, 4]) * (k % 3 != 2))]
            for _ in range(size)
        ]
        for k, size in enumerate(sizes)
    }
    weighted = rng.random() < 0.5
    weights = (
        {key: [[rng.random() for _ in bag] for bag in all_bags] for key, all_bags in bags.items()}
        if weighted
        else None
    )
    return PlainBatch(
        bags=bags,
        weights=weights,
        ranks=ranks,
        inverse=inverse,
        rows=rows,
        as_offsets=rng.random() < 0.5,
        dtype=rng.choice([torch.int32, torch.int64]),
    )


def bags_of(kjt: KeyedJaggedTensor) -> list[tuple[str, list[list[int]]]]:
    """(key, bags) in order, by Python arithmetic from keys, strides, lengths and values."""
    found, bag, at = [], 0, 0
    lengths, values = kjt.lengths().reshape(-1).tolist(), kjt.values().tolist()
    for key, stride in zip(kjt.keys(), kjt.stride_per_key(), strict=True):
        bags = []
        for length in lengths[bag : bag + stride]:
            bags.append(values[at : at + length])
            at += length
        bag += stride
        found.append((key, bags))
    assert at == len(values) and bag == len(lengths)
    return found


def weights_of(kjt: KeyedJaggedTensor) -> list[float] | None:
    """All weights in order."""
    return None if kjt.weights_or_none() is None else kjt.weights().tolist()
