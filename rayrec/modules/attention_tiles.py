"""Tiles of pointwise attention: the scores of some queries and the keys before them.

A tile has some sequences of a group of similar lengths, some queries of each, and the keys up to
the last of them, so that it has at most `TileBounds.tile` weights, or those of one query of one
sequence. On CPU a tile stays in a core's cache; elsewhere it is as large as may be, since each one
costs the host some fifty launches. Keys behind their query get scores so low that silu gives them
the weight 0.

    # H heads, L longest of a group, d columns of a head
    # n sequences, r queries and c keys of a tile
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rayrec.modules.attention_groups import LengthGroup

BUCKETS_PER_OCTAVE = 1.2
HSTU_CALL_PAIRS = 14_000  # see `JaggedGroups`: a call has more operators than that of the softmax


class TileBounds(NamedTuple):
    """What may be in memory at a time.

    Attributes:
        tile: weights of a tile.
        queries: those of a sequence in a tile. Few leave out more keys that stand behind them, many
            are quicker for each.
        least: so many of a sequence make one tile; more are cut in half at least.
        kept: scores that a call keeps for its backward pass.
        whole: weights of a batch up to which it is attended whole, by autograd.
    """

    tile: int
    queries: int
    least: int
    kept: int
    whole: int


# 2 MiB of float32 are about what a core's cache holds; 16 MiB of scores spare short sequences a
# third of the time; below 1 MiB tiles cost more than they spare
CPU_BOUNDS = TileBounds(1 << 19, 64, 32, 1 << 22, 1 << 18)
# 128 and 256 MiB of float32; autograd adds up a bias of a CUDA tensor one by one
GPU_BOUNDS = TileBounds(1 << 25, 512, 512, 1 << 26, 0)


def bounds_of(device: torch.device) -> TileBounds:
    """Return the bounds for tensors of a device."""
    return CPU_BOUNDS if device.type == "cpu" else GPU_BOUNDS


class Tile(NamedTuple):
    """Queries `rows` of the sequences `span`, and the keys before `rows.stop`."""

    span: slice
    rows: slice


def tiles_of(group: LengthGroup, heads: int, bounds: TileBounds) -> Iterator[Tile]:
    """Yield the tiles of a group; each has at most `bounds.tile` weights, or one query of one
    sequence.
    """
    of_query = heads * group.length
    queries = max(min(bounds.least, group.length), -(-group.length // 2))
    queries = max(1, min(bounds.queries, queries, bounds.tile // of_query))
    count = max(1, bounds.tile // (of_query * queries))
    for first in range(0, group.sequences, count):
        span = slice(first, min(first + count, group.sequences))
        for start in range(0, group.length, queries):
            yield Tile(span, slice(start, min(start + queries, group.length)))


def time_buckets(seconds: Tensor, count: int) -> Tensor:
    """Return the bucket of each time, from 0 to count - 1, int32."""
    octaves = seconds.float().clamp_(min=1.0).log2_()
    return octaves.mul_(BUCKETS_PER_OCTAVE).clamp_(max=count - 1).int()


class PaddedGroup:
    """The tensors of one group: (n H, L, d) queries, keys and values, and (n, L) times."""

    def __init__(self, group: LengthGroup, heads: int, parts: tuple[Tensor, ...]) -> None:
        self.group, self.heads = group, heads
        self.query, self.key, self.value = (self.by_head(part) for part in parts[:3])
        # the scale goes into the queries, which are fewer than the weights
        self.scale = self.query.shape[2] ** -0.5
        self.query = self.query * self.scale
        self.times = parts[3] if len(parts) > 3 else None

    def by_head(self, part: Tensor) -> Tensor:
        """(n, L, D) -> (n H, L, d)."""
        return part.unflatten(2, (self.heads, -1)).transpose(1, 2).flatten(0, 1)

    def together(self, of_heads: Tensor) -> Tensor:
        """(n H, L, d) -> (n, L, D)."""
        return of_heads.unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(2)

    def counts(self) -> Tensor:
        """(L, 1): the number of values that each place looks at."""
        like = self.value
        counts = torch.arange(1, self.group.length + 1, device=like.device, dtype=like.dtype)
        return counts.unsqueeze(1)

    def queries(self, tile: Tile, tensor: Tensor) -> Tensor:
        """Return the part of (n H, L, d) that belongs to the queries of a tile."""
        return tensor[tile.span.start * self.heads : tile.span.stop * self.heads, tile.rows]

    def keys(self, tile: Tile, tensor: Tensor) -> Tensor:
        """Return the part of (n H, L, d) that belongs to the keys of a tile."""
        span = slice(tile.span.start * self.heads, tile.span.stop * self.heads)
        return tensor[span, : tile.rows.stop]

    def scores(
        self, tile: Tile, position_bias: Tensor, bucket_bias: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """(n H, r, c) scores of a tile, with their biases; those of keys behind their query are so
        low that their weights and gradients are 0.
        """
        scores = torch.bmm(self.queries(tile, self.query), self.keys(tile, self.key).mT)
        apart = distances_of(tile, scores.device)
        bias = position_bias.index_select(0, apart.clamp(min=0).flatten()).view_as(apart)
        bias.masked_fill_(apart < 0, torch.finfo(bias.dtype).min / 2)
        if bucket_bias is not None:
            buckets, time_bias = bucket_bias
            bias = time_bias.index_select(0, buckets.flatten()).view(buckets.shape).add_(bias)
            bias = bias.unsqueeze(1)
        scores.unflatten(0, (-1, self.heads)).add_(bias)
        return scores

    def buckets(self, tile: Tile, count: int) -> Tensor:
        """(n, r, c) bucket of the time between each query and key."""
        assert self.times is not None
        of_queries = self.times[tile.span, tile.rows].unsqueeze(2)
        return time_buckets(of_queries - self.times[tile.span, None, : tile.rows.stop], count)


def distances_of(tile: Tile, device: torch.device) -> Tensor:
    """(r, c) places between query and key; negative for keys behind the query."""
    keys = torch.arange(tile.rows.stop, device=device)
    return keys[tile.rows].unsqueeze(1) - keys


def sums_by_bucket(buckets: Tensor, pairs: Tensor, count: int) -> Tensor:
    """Sum (n, r, c) float numbers by the (n, r, c) buckets of them: (count,)."""
    if buckets.device.type == "cpu":
        return torch.bincount(buckets.flatten(), pairs.flatten(), count)
    # a row for each query, so that few threads wait for each other, and the host for nothing
    sums = pairs.new_zeros(pairs.shape[0] * pairs.shape[1], count)
    return sums.scatter_add_(1, buckets.flatten(0, 1).long(), pairs.flatten(0, 1)).sum(0)
