"""Encoders of sequences: rows of embeddings in, a state after each of them out, without padding.

`SASRecEncoder` is a stack of causal attention, `HSTUEncoder` of HSTU's pointwise attention,
`GRUEncoder` a recurrence. All have the same forward, so one takes another's place. A state depends
on its own value and those before it. All layers work on the T values that there are; attention pads
them in groups (`JaggedGroups`), which all layers share. Dropout follows the keys of rows that are
given (`rayrec.modules.jagged_dropout`), so ranks together train as one.

    # B sequences, T values of all of them, D columns
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.errors import ConfigError, InputError
from rayrec.modules import attention_tiles
from rayrec.modules.attention_causal import attend_causal
from rayrec.modules.attention_groups import CALL_PAIRS, JaggedGroups, check_heads
from rayrec.modules.attention_hstu import attend_pointwise, attend_targets
from rayrec.modules.jagged_dropout import JaggedDropout, value_keys

Device = torch.device | str | None
Positions = Literal["oldest", "newest"]


class _Context(NamedTuple):
    """What the layers of a batch share."""

    groups: JaggedGroups
    keys: Tensor | None
    times: Tensor | None
    targets: int = 0


class AttentionEncoder(nn.Module):
    """Positions, a stack of layers and a last LayerNorm; the common part of two encoders.

    Args:
        make_layer: number of a layer -> module of (values, context).
        dim: D.
        max_length: the longest sequence that may come.
        layers: number of layers.
        dropout: share of the columns that are dropped behind the positions.
        positions: "oldest": place 0 is the first value of a sequence. "newest": place 0 is its last
            one, as in SASRec's paper, which pads in front; then a state depends on how many values
            follow.
    """

    _call_pairs = CALL_PAIRS

    def __init__(
        self,
        make_layer: Callable[[int], nn.Module],
        dim: int,
        max_length: int,
        layers: int,
        dropout: float,
        positions: Positions,
        device: Device,
    ) -> None:
        super().__init__()
        if min(dim, max_length, layers) < 1 or positions not in ("oldest", "newest"):
            raise ConfigError(
                f"an encoder of dim={dim}, max_length={max_length}, layers={layers}, "
                f"positions={positions!r}: sizes must be at least 1, positions oldest or newest."
            )
        self.dim, self.max_length, self.positions = dim, max_length, positions
        self.position = nn.Embedding(max_length, dim, device=device)
        nn.init.normal_(self.position.weight, std=0.02)
        self.dropout = JaggedDropout(dropout)
        self.layers = nn.ModuleList(make_layer(number) for number in range(layers))
        self.norm = nn.LayerNorm(dim, device=device)

    def forward(
        self,
        values: Tensor,
        offsets: Tensor,
        times: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """Encode.

        Args:
            values: (T, D) embeddings, oldest first; they are multiplied by the root of D.
            offsets: (B + 1,) integers from 0 to T.
            times: (T,) seconds of the values, for encoders that read them.
            keys: (B,) int64 of `row_keys`, for dropout that does not depend on ranks.
        Returns:
            (T, D) states, each of its value and those before it.
        Raises:
            InputError: on CPU, a sequence is longer than max_length (elsewhere a kernel asserts
                it); or the encoder reads times, and there are none.
        """
        groups = JaggedGroups(offsets, len(values), self.max_length, self.dim, self._call_pairs)
        sequences = groups.sequences
        own = None if keys is None else value_keys(keys, sequences)
        places = sequences.positions
        if self.positions == "newest":
            places = sequences.lengths.index_select(0, sequences.row) - places - 1
        return self._states(values, places, _Context(groups, own, self._times(times, len(values))))

    def _states(self, values: Tensor, places: Tensor, context: _Context) -> Tensor:
        states = self.dropout(values * self.dim**0.5 + self.position(places), context.keys)
        for layer in self.layers:
            states = layer(states, context)
        normed: Tensor = self.norm(states)
        return normed

    def _times(self, times: Tensor | None, num_values: int) -> Tensor | None:
        return None


class SASRecEncoder(AttentionEncoder):
    """Causal self-attention and a feed-forward layer per block, with the norm before each.

    Args:
        dim, max_length, layers, dropout, positions: as of `AttentionEncoder`; dropout is also of
            what each part of a block adds.
        heads: heads of the attention.
    Raises:
        ConfigError: sizes do not fit.
    Source: Kang and McAuley, Self-Attentive Sequential Recommendation, ICDM 2018. Differences:
    the norm stands before attention and feed-forward for queries, keys and values alike, GELU takes
    the place of ReLU, and the weights of the attention themselves are not dropped.
    """

    def __init__(
        self,
        dim: int = 64,
        max_length: int = 50,
        layers: int = 2,
        heads: int = 2,
        dropout: float = 0.3,
        positions: Positions = "oldest",
        device: Device = None,
    ) -> None:
        def make_layer(number: int) -> nn.Module:
            return _CausalBlock(dim, heads, dropout, 3 * number + 1, device)

        super().__init__(make_layer, dim, max_length, layers, dropout, positions, device)


class HSTUEncoder(AttentionEncoder):
    """Pointwise attention with biases of position and time, and a gate, per block.

    Args:
        dim, max_length, layers, dropout, positions: as of `AttentionEncoder`; dropout is also of
            what a block adds.
        heads: heads of the attention.
        time_buckets: buckets of the time between two values; 0 for no bias of time, and then times
            are not read.
    Raises:
        ConfigError: sizes do not fit.
    Source: Zhai et al., Actions Speak Louder than Words (HSTU), ICML 2024. Differences: the weights
    of a value are divided by the number of values that it looks at, not by the longest length, and
    positions are learned beside the biases.
    """

    _call_pairs = attention_tiles.HSTU_CALL_PAIRS

    def __init__(
        self,
        dim: int = 64,
        max_length: int = 50,
        layers: int = 2,
        heads: int = 2,
        dropout: float = 0.3,
        positions: Positions = "oldest",
        time_buckets: int = 40,
        device: Device = None,
    ) -> None:
        def make_layer(number: int) -> nn.Module:
            sizes = (dim, heads, max_length, time_buckets)
            return _PointwiseBlock(*sizes, dropout, number + 1, device)

        super().__init__(make_layer, dim, max_length, layers, dropout, positions, device)
        self.time_buckets = time_buckets

    def encode_targets(
        self, values: Tensor, targets: Tensor, times: Tensor | None = None
    ) -> Tensor:
        """Return the state that each target has as the last value of one sequence, (N, D).

        Values before them are encoded once. Dropout is that of values without keys.

        Args:
            values: (T, D), the sequence before the targets.
            targets: (N, D).
            times: (T + N,) seconds of values and targets, for an encoder that reads them.
        Raises:
            InputError: the sequence is longer than max_length, or there is not a time for each.
        """
        before, count = len(values), len(targets)
        if before >= self.max_length:
            raise InputError(
                f"a sequence has {before + 1} values, more than the {self.max_length} that this "
                "module was made for. Cut the histories, or raise max_length."
            )
        ends = torch.tensor([0, before], device=values.device)
        groups = JaggedGroups(ends, before, self.max_length, self.dim, self._call_pairs)
        places = torch.arange(before + count, device=values.device).clamp_(max=before)
        if self.positions == "newest":
            places = before - places
        whole = torch.cat([values, targets])
        context = _Context(groups, None, self._times(times, len(whole)), count)
        return self._states(whole, places, context)[before:]

    def _times(self, times: Tensor | None, num_values: int) -> Tensor | None:
        if not self.time_buckets:
            return None
        if times is None:
            raise InputError(
                "this HSTUEncoder has a bias of time and was given no times; give (T,) seconds, or "
                "make it with time_buckets=0."
            )
        if len(times) != num_values:
            raise InputError(f"{len(times)} times of {num_values} values; give one for each.")
        return times


class _CausalBlock(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float, layer: int, device: Device) -> None:
        super().__init__()
        check_heads(dim, heads)
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim, device=device)
        self.query_key_value = nn.Linear(dim, 3 * dim, device=device)
        self.output = nn.Linear(dim, dim, device=device)
        self.forward_norm = nn.LayerNorm(dim, device=device)
        self.inner = nn.Linear(dim, dim, device=device)
        self.outer = nn.Linear(dim, dim, device=device)
        self.dropouts = nn.ModuleList(JaggedDropout(dropout, layer + i) for i in range(3))

    def forward(self, states: Tensor, context: _Context) -> Tensor:
        after_attention, inside, after_forward = self.dropouts
        query, key, value = self.query_key_value(self.attention_norm(states)).chunk(3, dim=1)
        attended = attend_causal(query, key, value, context.groups, self.heads)
        states = states + after_attention(self.output(attended), context.keys)
        hidden = functional.gelu(self.inner(self.forward_norm(states)))
        added = self.outer(inside(hidden, context.keys))
        return states + after_forward(added, context.keys)


class _PointwiseBlock(nn.Module):
    def __init__(
        self,
        dim: int,
        heads: int,
        max_length: int,
        time_buckets: int,
        dropout: float,
        layer: int,
        device: Device,
    ) -> None:
        super().__init__()
        check_heads(dim, heads)
        self.heads = heads
        self.input_norm = nn.LayerNorm(dim, device=device)
        self.gate_value_query_key = nn.Linear(dim, 4 * dim, device=device)
        self.position_bias = nn.Parameter(torch.zeros(max_length, device=device))
        self.time_bias = (
            nn.Parameter(torch.zeros(time_buckets, device=device)) if time_buckets else None
        )
        self.output_norm = nn.LayerNorm(dim, device=device)
        self.output = nn.Linear(dim, dim, device=device)
        self.dropout = JaggedDropout(dropout, layer)

    def forward(self, states: Tensor, context: _Context) -> Tensor:
        projected = functional.silu(self.gate_value_query_key(self.input_norm(states)))
        gate, value, query, key = projected.chunk(4, dim=1)
        attended = self._attend(query, key, value, context)
        added = self.output(self.output_norm(attended) * gate)
        return states + self.dropout(added, context.keys)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, context: _Context) -> Tensor:
        targets, times, heads = context.targets, context.times, self.heads
        biases = self.position_bias, self.time_bias
        if not targets:
            return attend_pointwise(query, key, value, context.groups, heads, *biases, times)
        first = query[:-targets], key[:-targets], value[:-targets]
        own = None if times is None else times[:-targets]
        attended = attend_pointwise(*first, context.groups, heads, *biases, own)
        last = attend_targets(query, key, value, targets, heads, *biases, times)
        return torch.cat([attended, last])
