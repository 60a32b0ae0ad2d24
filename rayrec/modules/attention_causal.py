"""Causal self-attention over jagged sequences: every value attends to itself and those before it.

It is torch's scaled dot product attention, called once per group of similar lengths
(`JaggedGroups`). Padding stands behind the values of a sequence, where no query of it may look, so
no mask is needed beside the causal one. Memory: the padded groups, and never a matrix of queries by
keys, where torch has a fused kernel: on CPU, and on CUDA for the types and widths that it takes.

    # B sequences, T values of all of them, L longest of a group, H heads, D columns of all heads
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rayrec.modules.attention_groups import JaggedGroups, check_heads, check_rows


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    heads: int = 1,
    max_length: int | None = None,
) -> Tensor:
    """Attend within each sequence, to the value itself and those before it.

    Args:
        query, key, value: (T, D), D divisible by `heads`; head h has the columns from h D / H on.
        offsets: (B + 1,) integers from 0 to T.
        max_length: the longest sequence that may come; see `JaggedGroups`.
    Returns:
        (T, D).
    Raises:
        ConfigError: D is not divisible by `heads`.
        ShapeError: query, key and value differ in shape.
        InputError: on CPU, a sequence is longer than max_length.
    """
    check_rows(query, key, value)
    check_heads(query.shape[1], heads)
    groups = JaggedGroups(offsets, len(query), max_length, query.shape[1])
    return attend_causal(query, key, value, groups, heads)


def attend_causal(
    query: Tensor, key: Tensor, value: Tensor, groups: JaggedGroups, heads: int
) -> Tensor:
    """Attend as `causal_attention` does, in groups that are there."""
    # no values, no groups: the empty result stays in the graph of all three
    if not groups.groups:
        return query + key + value
    device = query.device.type
    if device == "cpu" and len(groups.groups) > 1 and not torch.is_autocast_enabled(device):
        return _Grouped.apply(query, key, value, groups, heads)
    out = []
    for parts in zip(*(groups.pad(one, heads) for one in (query, key, value)), strict=True):
        own_query, own_key, own_value = (part.transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(
            own_query, own_key, own_value, is_causal=True
        )
        out.append(attended.transpose(1, 2))
    return groups.unpad(out)


class _Grouped(torch.autograd.Function):
    """Attention of several groups, by torch's kernel for CPU: one node of the graph, where padding,
    views and calls of each group would be a dozen, which short sequences notice.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, groups: JaggedGroups, heads: int
    ) -> Tensor:
        # behind the end of a sequence stands its last value: no query of it looks there
        padded = (one.index_select(0, groups.places.source) for one in (query, key, value))
        parts = [_by_head(one, groups, heads) for one in padded]
        attended = [_attend(*part, 0.0, True) for part in zip(*parts, strict=True)]
        out, log_sums = zip(*attended, strict=True)
        ctx.groups, ctx.heads = groups, heads
        ctx.save_for_backward(*chain(*parts, out, log_sums))
        return _together(out, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = _by_head(ctx.groups.places.pad(grad), ctx.groups, ctx.heads)
        number = len(grads)
        saved = [ctx.saved_tensors[i::number] for i in range(number)]
        found = [
            _attend_backward(above, *of_group, 0.0, True)
            for above, of_group in zip(grads, saved, strict=True)
        ]
        of_inputs = (_together(one, ctx.groups) for one in zip(*found, strict=True))
        return (*of_inputs, None, None)


_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _by_head(padded: Tensor, groups: JaggedGroups, heads: int) -> list[Tensor]:
    """(P, D) -> (n, H, L, D / H) of each group."""
    rows = padded.view(len(padded), heads, -1)
    return [part.transpose(1, 2) for part in groups.cut(rows)]


def _together(parts: Sequence[Tensor], groups: JaggedGroups) -> Tensor:
    """(n, H, L, D / H) of each group -> (T, D)."""
    return groups.places.unpad(
        torch.cat([part.transpose(1, 2).flatten(2).flatten(0, 1) for part in parts])
    )
