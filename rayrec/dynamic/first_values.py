"""First values of the rows of ids: a function of seed, table, id and column, by splitmix64."""

# N ids, C columns

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayrec.data.hashing import mix
from rayrec.layout.tables import BaseEmbeddingConfig

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # the step of splitmix64's streams


def first_values(
    seed: int, table: BaseEmbeddingConfig, ids: NDArray[np.int64], cols: range
) -> Tensor:
    """Return (N, C) float32 first values of some columns of the rows of (N,) ids.

    They are uniform within the table's `init_bounds()`: a value is the upper 24 bits of number c of
    the splitmix64 stream that seed, table name and id begin.
    """
    low, high = table.init_bounds()
    digest = hashlib.sha256(f"{seed}/{table.name}".encode()).digest()
    streams = mix(ids.view(np.uint64) ^ np.uint64(int.from_bytes(digest[:8], "little")))
    counters = np.arange(cols.start, cols.stop, dtype=np.uint64) * _GOLDEN
    bits = mix(streams[:, None] + counters) >> np.uint64(40)
    values = bits.astype(np.float32) * np.float32((high - low) * 2.0**-24) + np.float32(low)
    return torch.from_numpy(np.minimum(values, np.float32(high)))
