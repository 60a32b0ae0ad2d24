"""Sending every id of a sequence feature once per batch: a switch for data with many repeats.

The distinct ids of each feature make a KJT of their own, which is routed, looked up and returned;
at home an index spreads the rows over all places of their ids, and its backward sums their
gradients before they travel. Costs one sort of the ids; pays where rows are wide and ids repeat.
Pooled features have nothing to gain: their rows are pooled where they lie.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec.sparse import KeyedJaggedTensor
from rayrec.sparse.ops import to_device


@dataclass(frozen=True)
class Distinct:
    """The distinct ids of a KJT.

    Attributes:
        kjt: one bag per wanted key, its distinct ids in ascending order.
        places: per key (N,), index of each of its ids among them.
    """

    kjt: KeyedJaggedTensor
    places: dict[str, Tensor]


def distinct_ids(kjt: KeyedJaggedTensor, wanted: frozenset[str]) -> Distinct:
    """Distinct ids of every key in `wanted`, by one sort over all of them."""
    # other keys may have any ids, whose numbers would not sort key by key
    if not set(kjt.keys()) <= wanted:
        kjt = kjt.permute([index for index, key in enumerate(kjt.keys()) if key in wanted])
    ids, counts = kjt.values().to(torch.int64), kjt.length_per_key()
    # ids lie in [0, limit): shifted by their key they sort key by key
    span = ids.max() + 1 if ids.numel() else ids.new_ones(())
    numbers = torch.arange(len(counts) + 1, device=ids.device)
    keys = numbers[:-1].repeat_interleave(to_device(counts, ids.device), output_size=ids.numel())
    found, inverse = torch.unique(ids + keys * span, return_inverse=True)
    owner = found // span
    lengths = torch.searchsorted(found, numbers * span).diff()  # `found` ascends
    firsts = lengths.cumsum(0) - lengths
    local = inverse - firsts[keys]
    unique = KeyedJaggedTensor(
        kjt.keys(), found - owner * span, lengths=lengths.to(torch.int32), stride=1
    )
    return Distinct(unique, dict(zip(kjt.keys(), local.split(counts), strict=True)))
