"""The ids that one kernel reads in one step."""

# N ids

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec.sparse.ops import complete_cumsum

WORD = torch.int32  # the type of a word of a message


@dataclass(frozen=True)
class GroupIds:
    """Ids that one lookup kernel reads in a step, in bags.

    Pooled: for each slot, the bags of all ranks in rank order. Sequence: for each rank, the ids of
    all slots, each a bag of its own.

    Attributes:
        ids: (N,) int64; in pooled groups local to the shard's first row, in sequence groups rows of
            all shards one after the other.
        offsets: (bags + 1,) int64.
        weights: (N,) float32, or None when the group is unweighted.
        lags: (N,) int64 of `DynamicConfig.lag`, of dynamic tables; None where all are 0.
        parts: of dynamic tables, how many ids every slot has from every rank: slot by slot, but of
            sequences that are exchanged rank by rank.
        places: of sequences of dynamic tables that are read in place, where these ids are; else
            empty.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    lags: Tensor | None = None
    parts: tuple[int, ...] = ()
    places: Sequence[Sequence[slice | Tensor]] = ()


def bag_offsets(lengths: Tensor) -> Tensor:
    """Return (bags + 1,) int64 offsets of (bags,) lengths."""
    return complete_cumsum(lengths).to(torch.int64)
