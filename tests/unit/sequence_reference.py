"""Attention over sequences in plain torch, padded or one sequence after the other."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.modules import GRUEncoder, SASRecEncoder, TargetAttention


def random_offsets(seed: int) -> Tensor:
    """Offsets of none to 40 sequences of 0 to 90 values: equal ones, short ones or a few long."""
    rng = np.random.default_rng(seed)
    count, kind = int(rng.integers(0, 40)), seed % 4
    if kind == 0:
        lengths = np.full(count, rng.integers(0, 40))
    elif kind == 1:
        lengths = rng.integers(0, 3, count)
    else:
        lengths = np.minimum(90, rng.lognormal(kind, 1.2, count).astype(np.int64))
        lengths[rng.random(count) < rng.choice([0, 0.3])] = 0
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def pad(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """(T, D) -> (B, L, D) with zeros at the end, and which of the (B, L) are values."""
    bags = list(values.tensor_split(offsets[1:-1].tolist())) if len(offsets) > 1 else []
    longest = max([len(bag) for bag in bags], default=0)
    lengths = offsets.diff()
    is_value = torch.arange(longest) < lengths.unsqueeze(1)
    padded = torch.zeros(len(bags), longest, *values.shape[1:], dtype=values.dtype)
    return padded.masked_scatter(
        is_value.reshape(*is_value.shape, *[1] * (values.dim() - 1)).expand_as(padded), values
    ), is_value


def _heads(padded: Tensor, heads: int) -> Tensor:
    # (B, L, D) -> (B, H, L, D / H)
    return padded.unflatten(2, (heads, padded.shape[2] // heads)).transpose(1, 2)


def padded_causal(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, heads: int) -> Tensor:
    """Causal softmax attention with a matrix of all queries by all keys: (T, D)."""
    (q, is_value), (k, _), (v, _) = (pad(one, offsets) for one in (query, key, value))
    q, k, v = (_heads(one, heads) for one in (q, k, v))
    scores = q @ k.mT / math.sqrt(q.shape[3])
    ahead = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(ahead, -torch.inf).softmax(3)
    return (weights @ v).transpose(1, 2).flatten(2)[is_value]


def padded_pointwise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    position_bias: Tensor,
    time_bias: Tensor | None,
    times: Tensor,
    heads: int,
) -> Tensor:
    """HSTU's attention with a matrix of all queries by all keys: (T, D)."""
    (q, is_value), (k, _), (v, _), (t, _) = (
        pad(one, offsets) for one in (query, key, value, times)
    )
    q, k, v = (_heads(one, heads) for one in (q, k, v))
    places = torch.arange(q.shape[2])
    bias = position_bias[(places.unsqueeze(1) - places).clamp(min=0)]
    if time_bias is not None:
        seconds = (t.unsqueeze(2) - t.unsqueeze(1)).clamp(min=1)
        buckets = (torch.log2(seconds.float()) * 1.2).long().clamp(max=len(time_bias) - 1)
        bias = (bias + time_bias[buckets]).unsqueeze(1)
    scores = q @ k.mT / math.sqrt(q.shape[3]) + bias
    weights = (scores * scores.sigmoid()).tril()
    attended = (weights @ v) / (places + 1).unsqueeze(1)
    return attended.transpose(1, 2).flatten(2)[is_value]


def padded_target(
    module: TargetAttention, query: Tensor, values: Tensor, offsets: Tensor
) -> Tensor:
    """DIN's attention with the parameters of `module`, padded: (B, D)."""
    keys, is_value = pad(values, offsets)
    queries = query.unsqueeze(1).expand_as(keys)
    if len(module.layers):
        scores = torch.cat([queries, keys, queries - keys, queries * keys], dim=2)
        for number, layer in enumerate(module.layers):
            scores = scores.sigmoid() if number else scores
            scores = functional.linear(scores, layer.weight.double(), layer.bias.double())
        scores = scores.squeeze(2)
    else:
        scores = (queries * keys).sum(2) / math.sqrt(keys.shape[2])
    if module.softmax:
        # a sequence without values has weights that are no numbers, and no values to weigh
        scores = scores.masked_fill(~is_value, -torch.inf).softmax(1).nan_to_num()
    return (scores.masked_fill(~is_value, 0).unsqueeze(2) * keys).sum(1)


def plain_states(encoder: nn.Module, values: Tensor, times: Tensor) -> Tensor:
    """One sequence through the layers of an encoder, in plain torch."""
    length = len(values)
    offsets = torch.tensor([0, length])
    if isinstance(encoder, GRUEncoder):
        return encoder.output(encoder.gru(values.unsqueeze(1))[0].squeeze(1))
    places = torch.arange(length)
    if encoder.positions == "newest":
        places = places.flip(0)
    states = values * values.shape[1] ** 0.5 + encoder.position.weight[places]
    for block in encoder.layers:
        if isinstance(encoder, SASRecEncoder):
            query, key, value = block.query_key_value(block.attention_norm(states)).chunk(3, dim=1)
            states = states + block.output(padded_causal(query, key, value, offsets, 2))
            hidden = functional.gelu(block.inner(block.forward_norm(states)))
            states = states + block.outer(hidden)
        else:
            projected = functional.silu(block.gate_value_query_key(block.input_norm(states)))
            gate, value, query, key = projected.chunk(4, dim=1)
            biases = block.position_bias, block.time_bias
            attended = padded_pointwise(query, key, value, offsets, *biases, times, 2)
            states = states + block.output(block.output_norm(attended) * gate)
    return encoder.norm(states)
