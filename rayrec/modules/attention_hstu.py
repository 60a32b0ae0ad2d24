"""HSTU's pointwise attention over jagged sequences: SiLU in place of the softmax, with two biases.

A value i takes from each value j up to itself silu(q_i k_j / sqrt(d) + p[i - j] + t[bucket]) v_j,
divided by i + 1: p and t are learned per distance in places and per bucket of the time between
them. The bucket is floor(1.2 log2(seconds)), of times below 1 s the first.

torch has no fused kernel for it, so it is done here in tiles of bounded size, of groups of similar
lengths (`JaggedGroups`). The backward pass makes each tile again, but for those whose scores were
kept. Memory beside the inputs: the padded groups, the scores that a call keeps, and tiles of a
bounded number of weights, or those of one query of one sequence (`attention_tiles.TileBounds`). A
small batch on CPU is attended whole, by autograd; else the gradient is not differentiable once
more.

    # T values, D columns of H heads, P distances, K buckets, L longest of a group
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rayrec.errors import InputError
from rayrec.modules.attention_groups import JaggedGroups, check_heads, check_rows
from rayrec.modules.attention_tiles import (
    HSTU_CALL_PAIRS,
    PaddedGroup,
    Tile,
    bounds_of,
    distances_of,
    sums_by_bucket,
    tiles_of,
    time_buckets,
)


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
        ConfigError: D is not divisible by `heads`.
        ShapeError: query, key and value differ in shape.
        InputError: on CPU, a sequence is longer than P or max_length; or there is a time_bias and
            not a time for each value.
    """
    check_rows(query, key, value)
    places, (values, width) = len(position_bias), query.shape
    check_heads(width, heads)
    if time_bias is not None and (times is None or times.shape != (values,)):
        given = None if times is None else tuple(times.shape)
        raise InputError(f"times {given} of {values} values; give a time for each.")
    longest = places if max_length is None else min(max_length, places)
    groups = JaggedGroups(offsets, values, longest, width, HSTU_CALL_PAIRS)
    return attend_pointwise(query, key, value, groups, heads, position_bias, time_bias, times)


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
    """Attend as `hstu_attention` does, in groups that are there."""
    given = query, key, value, position_bias, time_bias, times
    if len(groups.groups) == 1:
        group = groups.groups[0]
        if group.sequences * heads * group.length**2 <= bounds_of(query.device).whole:
            return _attend_whole(groups, heads, *given)
    return _Pointwise.apply(*given, groups, heads)


def attend_targets(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    targets: int,
    heads: int,
    position_bias: Tensor,
    time_bias: Tensor | None,
    times: Tensor | None,
) -> Tensor:
    """Attend from each of the last `targets` values to itself and to all values before the first of
    them, as if it were the only one behind these: (T, D) -> (targets, D).
    """
    before, width = len(key) - targets, key.shape[1] // heads
    query, key, value = (one.view(-1, heads, width).transpose(0, 1) for one in (query, key, value))
    query = query[:, before:] * width**-0.5
    of_place = position_bias[: before + 1].flip(0)
    self_scores = (query * key[:, before:]).sum(2) + of_place[-1]
    if time_bias is not None:
        self_scores = self_scores + time_bias[0]
    rows = max(1, bounds_of(query.device).tile // max(1, heads * before))
    parts = []
    for first in range(0, targets, rows):
        part = slice(first, first + rows)
        scores = query[:, part] @ key[:, :before].mT + of_place[:-1]
        if time_bias is not None:
            assert times is not None
            apart = times[before:][part].unsqueeze(1) - times[:before]
            scores += time_bias[time_buckets(apart, len(time_bias)).long()]
        parts.append(functional.silu(scores) @ value[:, :before])
    own = functional.silu(self_scores).unsqueeze(2) * value[:, before:]
    return ((torch.cat(parts, dim=1) + own) / (before + 1)).transpose(0, 1).flatten(1)


def _attend_whole(
    groups: JaggedGroups,
    heads: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_bias: Tensor,
    time_bias: Tensor | None,
    times: Tensor | None,
) -> Tensor:
    """Attend in one group that is one small tile, by autograd."""
    query, key, value = (groups.pad(one, heads)[0].transpose(1, 2) for one in (query, key, value))
    places = torch.arange(query.shape[2], device=query.device)
    apart = places.unsqueeze(1) - places
    # as in the tiles, keys behind their query get scores whose weights and gradients are 0
    low = torch.finfo(query.dtype).min / 2
    bias = position_bias[apart.clamp(min=0)].to(query.dtype).masked_fill(apart < 0, low)
    if time_bias is not None:
        assert times is not None
        (padded,) = groups.pad(times)
        buckets = time_buckets(padded.unsqueeze(2) - padded.unsqueeze(1), len(time_bias))
        of_time = time_bias.to(query.dtype).index_select(0, buckets.flatten())
        bias = (of_time.view(buckets.shape) + bias).unsqueeze(1)
    scores = (query * query.shape[3] ** -0.5) @ key.mT + bias
    weights = functional.silu(scores)
    attended = weights @ value / (places + 1).unsqueeze(1)
    return groups.unpad([attended.transpose(1, 2)])


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
        ctx.groups, ctx.heads, ctx.bounds = groups, heads, bounds_of(query.device)
        tensors = (query, key, value, position_bias, time_bias, times)
        ctx.save_for_backward(*tensors)
        out = []
        # of each group what was padded, and of its tiles the buckets and scores; a forward without
        # a backward keeps none
        ctx.kept, room = [], ctx.bounds.kept if any(ctx.needs_input_grad) else 0
        with torch.autocast(query.device.type, enabled=False):
            for group, *parts in zip(groups.groups, *map(groups.pad, _read(tensors)), strict=True):
                own = PaddedGroup(group, heads, tuple(parts))
                result = torch.empty_like(own.value)
                room -= 3 * own.value.numel()
                kept: list[tuple[Tensor | None, Tensor] | None] = []
                ctx.kept.append((own if room >= 0 else None, kept))
                for tile in tiles_of(group, heads, ctx.bounds):
                    buckets, scores = _scores(own, tile, position_bias, time_bias)
                    room -= scores.numel() + (0 if buckets is None else buckets.numel())
                    kept.append((buckets, scores) if room >= 0 else None)
                    weights = functional.silu(scores, inplace=room < 0)
                    # torch multiplies batches into parts of a tensor one by one, so not in place
                    own.queries(tile, result).copy_(torch.bmm(weights, own.keys(tile, own.value)))
                out.append(own.together(result.div_(own.counts())))
        return groups.unpad(out) if out else torch.zeros_like(query)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        position_bias, time_bias = tensors[3:5]
        found: list[list[Tensor]] = [[] for _ in range(3)]
        of_position = torch.zeros_like(position_bias)
        of_time = None if time_bias is None else torch.zeros_like(time_bias)
        groups: JaggedGroups = ctx.groups
        with torch.autocast(grad.device.type, enabled=False):
            if all(own is not None for own, _ in ctx.kept):
                again = [()] * len(groups.groups)
            else:
                again = list(zip(*map(groups.pad, _read(tensors)), strict=True))
            for group, above, parts, (own, kept) in zip(
                groups.groups, groups.pad(grad), again, ctx.kept, strict=True
            ):
                own = PaddedGroup(group, ctx.heads, parts) if own is None else own
                above = own.by_head(above) / own.counts()
                grads = [torch.zeros_like(own.query) for _ in range(3)]
                tiles = tiles_of(group, ctx.heads, ctx.bounds)
                for tile, found_before in zip(tiles, kept, strict=True):
                    buckets, scores = found_before or _scores(own, tile, position_bias, time_bias)
                    of_scores = _tile_backward(own, tile, scores, above, grads)
                    # a bias has many pairs, whose sum bfloat16 could not hold
                    wide = torch.promote_types(of_scores.dtype, torch.float32)
                    pairs = of_scores.unflatten(0, (-1, ctx.heads)).sum(1, dtype=wide)
                    apart = distances_of(tile, grad.device).clamp_(min=0).flatten()
                    sums = pairs.sum(0).flatten().to(of_position.dtype)
                    of_position.index_add_(0, apart, sums)
                    if of_time is not None and buckets is not None:
                        of_time += sums_by_bucket(buckets, pairs, len(of_time))
                grads[0].mul_(own.scale)
                for own_parts, one in zip(found, grads, strict=True):
                    own_parts.append(own.together(one))
        return (
            *(groups.unpad(one) if one else torch.zeros_like(grad) for one in found),
            of_position,
            of_time,
            None,
            None,
            None,
        )


def _tile_backward(
    own: PaddedGroup, tile: Tile, scores: Tensor, above: Tensor, grads: list[Tensor]
) -> Tensor:
    """Add the gradients of a tile to those of queries, keys and values; return the scores'."""
    of_query, of_key, of_value = grads
    above = own.queries(tile, above)
    own.keys(tile, of_value).add_(torch.bmm(functional.silu(scores).mT, above))
    of_weights = torch.bmm(above, own.keys(tile, own.value).mT)
    of_scores = torch.ops.aten.silu_backward(of_weights, scores)
    own.queries(tile, of_query).copy_(torch.bmm(of_scores, own.keys(tile, own.key)))
    own.keys(tile, of_key).add_(torch.bmm(of_scores.mT, own.queries(tile, own.query)))
    return of_scores


def _scores(
    own: PaddedGroup, tile: Tile, position_bias: Tensor, time_bias: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """Return the buckets and the scores of a tile."""
    position_bias = position_bias.to(own.query.dtype)
    if time_bias is None:
        return None, own.scores(tile, position_bias, None)
    buckets = own.buckets(tile, len(time_bias))
    return buckets, own.scores(tile, position_bias, (buckets, time_bias.to(own.query.dtype)))


def _read(tensors: Sequence[Any]) -> list[Tensor]:
    """The tensors that tiles are made of; times only where there is a bias of time."""
    query, key, value, _, time_bias, times = tensors
    return [query, key, value] if time_bias is None else [query, key, value, times]
