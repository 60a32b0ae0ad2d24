"""HSTU's pointwise attention over jagged sequences: SiLU in place of the softmax, with two biases.

A value i takes from each value j up to itself silu(q_i k_j / sqrt(d) + p[i - j] + t[bucket]) v_j,
divided by i + 1: p and t are learned per distance in places and per bucket of the time between
them. The bucket is floor(1.2 log2(seconds)), of times below 1 s the first.

torch has no fused kernel for it, so it is done here in tiles: some sequences of a group of similar
lengths (`JaggedGroups`), some queries, and the keys up to the last of them. The backward pass makes
each tile again, but for those whose scores were kept. Memory beside the inputs: `KEPT_ELEMENTS`
scores per call, and tiles of at most `TILE_ELEMENTS` weights, or those of one query of one
sequence. The gradient is not differentiable once more.

    # T values, H heads, L longest of a group, d columns of a head, P distances, K buckets
    # n sequences, r queries and c keys of a tile
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rayrec.modules.attention_groups import Group, JaggedGroups

TILE_ELEMENTS = 1 << 19  # 2 MiB of float32: about what a core's cache holds
KEPT_ELEMENTS = 1 << 22  # 16 MiB of float32, which spares short sequences a third of the time
TILE_QUERIES = range(16, 65)
BUCKETS_PER_OCTAVE = 1.2


def hstu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    position_bias: Tensor,
    time_bias: Tensor | None = None,
    times: Tensor | None = None,
    heads: int = 1,
    max_length: int | None = None,
) -> Tensor:
    """Attend within each sequence, to the value itself and those before it.

    Args:
        query, key, value: (T, D), D divisible by `heads`; head h has the columns from h D / H on.
        offsets: (B + 1,) integers from 0 to T.
        position_bias: (P,), P at least the longest sequence.
        time_bias: (K,), or None for none; the last bucket takes all longer times.
        times: (T,) seconds, needed with time_bias; int64 or float64 for seconds since 1970.
        max_length: the longest sequence that may come, at most P; see `JaggedGroups`.
    Returns:
        (T, D).
    Raises:
        InputError: on CPU, a sequence is longer than P or max_length.
    """
    places = len(position_bias)
    groups = JaggedGroups(offsets, len(query), max_length or places, query.shape[1])
    query, key, value = (groups.sort(tensor) for tensor in (query, key, value))
    times = None if times is None else groups.sort(times)
    return groups.unsort(
        attend_pointwise(query, key, value, groups, heads, position_bias, time_bias, times)
    )


def attend_pointwise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: JaggedGroups,
    heads: int,
    position_bias: Tensor,
    time_bias: Tensor | None,
    times: Tensor | None,
) -> Tensor:
    """Attend, as `hstu_attention` does, to values that are in the order of the groups."""
    return _Pointwise.apply(query, key, value, position_bias, time_bias, times, groups, heads)


class _Tile(NamedTuple):
    """Queries `rows` of the sequences `span`, and the keys before `rows.stop`."""

    span: slice
    rows: slice

    @property
    def keys(self) -> tuple[slice, slice]:
        """The place of the tile's keys."""
        return self.span, slice(0, self.rows.stop)


def tiles_of(group: Group, heads: int) -> Iterator[_Tile]:
    """Yield the tiles of a group; each has at most TILE_ELEMENTS weights, or one query of one
    sequence.
    """
    # few queries leave out more keys that stand behind them, many are quicker for each of them
    queries = max(TILE_QUERIES[0], min(-(-group.length // 4), TILE_QUERIES[-1]))
    queries = max(1, min(queries, group.length, TILE_ELEMENTS // (heads * group.length)))
    count = max(1, TILE_ELEMENTS // (heads * queries * group.length))
    for first in range(0, group.sequences, count):
        span = slice(first, min(first + count, group.sequences))
        for start in range(0, group.length, queries):
            yield _Tile(span, slice(start, min(start + queries, group.length)))


class _Padded(NamedTuple):
    """The tensors of one group: (n, H, L, d), and (n, L) times."""

    query: Tensor
    key: Tensor
    value: Tensor
    times: Tensor | None

    @classmethod
    def of(cls, group: Group, heads: int, parts: tuple[Tensor, ...]) -> _Padded:
        query, key, value = (_by_head(group, part, heads) for part in parts[:3])
        # the scale goes into the queries, which are fewer than the weights
        query = query * query.shape[3] ** -0.5
        times = None if len(parts) == 3 else group.pad(parts[3].unsqueeze(1)).squeeze(2)
        return cls(query, key, value, times)

    def scores(self, tile: _Tile, position_bias: Tensor, time_bias: Tensor | None) -> Tensor:
        """(n, H, r, c) scores of a tile, with their biases."""
        scores = self.query[tile.span, :, tile.rows] @ self.key[tile.keys[0], :, tile.keys[1]].mT
        distances = _distances(tile, scores.device)
        bias = position_bias.index_select(0, distances.flatten()).view_as(distances)
        if time_bias is not None:
            buckets = self.buckets(tile, len(time_bias))
            of_times = time_bias.index_select(0, buckets.flatten()).view(buckets.shape)
            bias = (of_times + bias).unsqueeze(1)
        return scores.add_(bias)

    def buckets(self, tile: _Tile, count: int) -> Tensor:
        """(n, r, c) bucket of the time between each query and key."""
        assert self.times is not None
        span, keys = tile.keys
        between = self.times[span, tile.rows].unsqueeze(2) - self.times[span, keys].unsqueeze(1)
        return time_buckets(between, count)


def time_buckets(seconds: Tensor, count: int) -> Tensor:
    """Return the bucket of each time, from 0 to count - 1, int32."""
    octaves = seconds.float().clamp_(min=1.0).log2_()
    return octaves.mul_(BUCKETS_PER_OCTAVE).clamp_(max=count - 1).int()


def _by_head(group: Group, part: Tensor, heads: int) -> Tensor:
    return group.pad(part).unflatten(2, (heads, -1)).transpose(1, 2).contiguous()


def _together(group: Group, heads_first: Tensor) -> Tensor:
    return group.unpad(heads_first.transpose(1, 2).flatten(2))


def _distances(tile: _Tile, device: torch.device) -> Tensor:
    """(r, c) places between query and key; 0 for keys behind the query, which are masked."""
    keys = torch.arange(tile.rows.stop, device=device)
    return (keys[tile.rows].unsqueeze(1) - keys).clamp_(min=0)


def _mask(weights: Tensor, tile: _Tile) -> Tensor:
    """Set the weights of keys behind their queries to 0, in place."""
    weights[..., tile.rows].tril_()
    return weights


class _Pointwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        position_bias: Tensor,
        time_bias: Tensor | None,
        times: Tensor | None,
        groups: JaggedGroups,
        heads: int,
    ) -> Tensor:
        ctx.groups, ctx.heads = groups, heads
        ctx.save_for_backward(query, key, value, position_bias, time_bias, times)
        biases = _biases(position_bias, time_bias, query.dtype)
        tensors = _read(query, key, value, times, time_bias)
        out = [query[:0]]
        # scores of tiles, in their order; a forward without a backward keeps none
        ctx.kept, room = [], KEPT_ELEMENTS if any(ctx.needs_input_grad) else 0
        with torch.autocast(query.device.type, enabled=False):
            for group, parts in groups.parts(*tensors):
                own = _Padded.of(group, heads, parts)
                result = torch.empty_like(own.value)
                for tile in tiles_of(group, heads):
                    scores = own.scores(tile, *biases)
                    room -= scores.numel()
                    ctx.kept.append(scores if room >= 0 else None)
                    weights = _mask(functional.silu(scores, inplace=room < 0), tile)
                    span, keys = tile.keys
                    result[span, :, tile.rows] = weights @ own.value[span, :, keys]
                out.append(_together(group, result.div_(_counts(group, result))))
        return torch.cat(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, position_bias, time_bias, times = ctx.saved_tensors
        biases = _biases(position_bias, time_bias, query.dtype)
        tensors = _read(query, key, value, times, time_bias)
        found: list[list[Tensor]] = [[tensor[:0]] for tensor in tensors[:3]]
        of_position = torch.zeros_like(position_bias)
        of_time = None if time_bias is None else torch.zeros_like(time_bias)
        kept = iter(ctx.kept)
        with torch.autocast(query.device.type, enabled=False):
            for group, (above, *parts) in ctx.groups.parts(grad, *tensors):
                own = _Padded.of(group, ctx.heads, tuple(parts))
                above = _by_head(group, above, ctx.heads)
                above = above / _counts(group, above)
                grads = [torch.zeros_like(one) for one in own[:3]]
                for tile in tiles_of(group, ctx.heads):
                    scores = next(kept)
                    scores = own.scores(tile, *biases) if scores is None else scores
                    _tile_backward(own, tile, scores, above, grads, of_position, of_time)
                grads[0].mul_(own.query.shape[3] ** -0.5)
                for parts_of, one in zip(found, grads, strict=True):
                    parts_of.append(_together(group, one))
        return *(torch.cat(parts_of) for parts_of in found), of_position, of_time, None, None, None


def _tile_backward(
    own: _Padded,
    tile: _Tile,
    scores: Tensor,
    above: Tensor,
    grads: list[Tensor],
    of_position: Tensor,
    of_time: Tensor | None,
) -> None:
    """Add the gradients of a tile to those of queries, keys, values and biases."""
    (span, keys), rows = tile.keys, tile.rows
    weights = _mask(functional.silu(scores), tile)
    above_rows = above[span, :, rows]
    grads[2][span, :, keys] += weights.mT @ above_rows
    of_weights = _mask(above_rows @ own.value[span, :, keys].mT, tile)
    of_scores = torch.ops.aten.silu_backward(of_weights, scores)
    grads[0][span, :, rows] = of_scores @ own.key[span, :, keys]
    grads[1][span, :, keys] += of_scores.mT @ own.query[span, :, rows]
    # a bias has many pairs, whose sum bfloat16 could not hold
    by_sequence = of_scores.sum(1, dtype=torch.promote_types(of_scores.dtype, torch.float32))
    distances = _distances(tile, scores.device).flatten()
    of_position.index_add_(0, distances, by_sequence.sum(0).flatten().to(of_position.dtype))
    if of_time is not None:
        buckets = own.buckets(tile, len(of_time)).flatten()
        sums = torch.bincount(buckets, by_sequence.flatten(), minlength=len(of_time))
        of_time.add_(sums.to(of_time.dtype))


def _read(
    query: Tensor, key: Tensor, value: Tensor, times: Tensor | None, time_bias: Tensor | None
) -> list[Tensor]:
    """The tensors that tiles are made of; times only where there is a bias of time."""
    if time_bias is None:
        return [query, key, value]
    assert times is not None
    return [query, key, value, times]


def _biases(position: Tensor, time: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Any]:
    return position.to(dtype), None if time is None else time.to(dtype)


def _counts(group: Group, like: Tensor) -> Tensor:
    """(L, 1): the number of values that each place looks at."""
    counts = torch.arange(1, group.length + 1, device=like.device, dtype=like.dtype)
    return counts.unsqueeze(1)
