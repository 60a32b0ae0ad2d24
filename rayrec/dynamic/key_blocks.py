"""Blocks of keys: a key of a dynamic table belongs to one block of its rows, by a hash."""

# N keys

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rayrec.data.hashing import mix
from rayrec.dynamic.columns import Ints


def blocks_of(keys: Ints, blocks: int) -> Ints:
    """Return (N,) blocks of (N,) keys, of so many, a power of two, by the upper bits of a hash."""
    if blocks == 1:
        return np.zeros(len(keys), np.int64)
    shift = np.uint64(64 - (blocks.bit_length() - 1))
    return (mix(keys.view(np.uint64)) >> shift).view(np.int64)


def first_rows(ids: Tensor, blocks: int, size: int) -> Tensor:
    """Return (N,) the first row of the block of (N,) ids, in a table of blocks of `size` rows."""
    return torch.from_numpy(blocks_of(ids.cpu().numpy(), blocks) * size).to(ids.device)
