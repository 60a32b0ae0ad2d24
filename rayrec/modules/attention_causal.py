"""Causal self-attention over jagged sequences: every value attends to itself and those before it.

It is torch's scaled dot product attention, called once per group of similar lengths
(`JaggedGroups`). Padding stands behind the values of a sequence, where no query of it may look, so
no mask is needed beside the causal one. Memory: the padded groups, and never a matrix of queries by
keys, where torch has a fused kernel: on CPU, and on CUDA for the types and widths that it takes.

    # B sequences, T values of all of them, L longest of a group, H heads, D columns of all heads
"""

from __future__ import annotations

from torch import Tensor
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
    out = []
    for parts in zip(*(groups.pad(one, heads) for one in (query, key, value)), strict=True):
        own_query, own_key, own_value = (part.transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(
            own_query, own_key, own_value, is_causal=True
        )
        out.append(attended.transpose(1, 2))
    return groups.unpad(out)
