"""Groups of sequences of similar length, so that attention pads little and calls seldom.

A call of attention costs a fixed time beside its work, and a padded sequence costs the work of the
longest one of its call. On CPU the sequences are sorted by length and cut into groups, so that what
padding costs in a group is at most what another call would. A batch of equal lengths, or of short
sequences, becomes one group: the padded way. Long sequences of different lengths become groups of
one: a call per sequence, without padding. On other devices there is one group, padded to a length
that the host knows, so that the host waits for nothing.

    # B sequences, n of a group and L the longest of it; T values of all sequences
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rayrec.errors import ConfigError, InputError, ShapeError
from rayrec.modules.jagged_rows import JaggedOffsets
from rayrec.sparse.ops import jagged_to_padded_dense

# One call costs as much as so many pairs of a query and a key, of 64 columns; measured forward and
# backward on one CPU core, with softmax.
CALL_PAIRS = 3_500
# Values cost as much as so many pairs each: they are copied, and read once by a call.
VALUE_PAIRS = 20
# Several groups cost so many pairs more, to find the places; measured on batches of 16 to 256.
GATHER_PAIRS = 28_000


class LengthGroup(NamedTuple):
    """Sequences of similar length that one call attends.

    Attributes:
        sequences: their number.
        length: L.
    """

    sequences: int
    length: int


class JaggedGroups:
    """The groups of a batch; made once per batch, and used by every layer.

    Args:
        offsets: (B + 1,) integers from 0 to T.
        num_values: T.
        max_length: the longest sequence that may come; other devices than the CPU pad to it, and
            without it wait for the longest one.
        width: D of what is attended; it says how dear a pair is against a call.
        call_pairs: pairs of 64 columns whose work costs as much as a call.
    Raises:
        InputError: on CPU, a sequence is longer than max_length. Elsewhere whoever reads positions
            must refuse it, since looking would cost a host sync.
    Attributes:
        sequences: the places of the values in the order in which they came.
        groups: the groups, longest first.
    """

    def __init__(
        self,
        offsets: Tensor,
        num_values: int,
        max_length: int | None = None,
        width: int = 64,
        call_pairs: int = CALL_PAIRS,
    ) -> None:
        self.sequences = JaggedOffsets(offsets, num_values)
        self.groups: list[LengthGroup] = []
        self._order: Tensor | None = None  # the sequences in the order of several groups
        count = offsets.numel() - 1
        if not count or not num_values:
            return
        if offsets.device.type != "cpu":
            self.groups = [LengthGroup(count, max_length or int(self.sequences.lengths.max()))]
            return
        lengths = self.sequences.lengths.numpy()
        longest = int(lengths.max())
        if max_length is not None and longest > max_length:
            raise InputError(
                f"a sequence has {longest} values, more than the {max_length} that this module was "
                "made for. Cut the histories, or raise max_length."
            )
        wide = max(1, width)
        costs = call_pairs * 64 // wide, GATHER_PAIRS * 64 // wide
        self.groups = [LengthGroup(count, longest)]
        # even if nothing was padded, and one call served all; most that gain nothing end here
        least = int((lengths * (lengths + VALUE_PAIRS)).sum()) + sum(costs)
        if not _is_gain(least, count, longest, costs[0]):
            return
        counts = Counter(lengths.tolist())
        # they would come last and have no values, so no group needs them
        counts.pop(0, 0)
        groups = cut_lengths(counts, *costs)
        if len(groups) == 1:
            return
        self.groups = groups
        order = torch.argsort(self.sequences.lengths, descending=True, stable=True)
        self._order = order[: sum(group.sequences for group in self.groups)]

    def pad(self, values: Tensor, heads: int | None = None) -> list[Tensor]:
        """(T,) or (T, D) -> for each group (n, L) or (n, L, D), and with heads (n, L, H, D / H),
        with zeros behind the end of each sequence.
        """
        if not self.groups:
            return []
        # one view of all values, or of both dimensions, in place of one per group or dimension
        row = values.shape[1:] if heads is None else (heads, values.shape[1] // heads)
        if self._is_full:
            return [values.view(*self.groups[0], *row)]
        if self._order is None and values.dtype != torch.float64:
            offsets, length = self.sequences.offsets, self.groups[0].length
            padded = jagged_to_padded_dense(values, offsets, length, 0.0)
            return [padded if heads is None else padded.view(*self.groups[0], *row)]
        values = values if heads is None else values.view(-1, *row)
        return self.cut(_Pad.apply(values, self.places))

    def cut(self, rows: Tensor) -> list[Tensor]:
        """Cut (P, ...) padded rows into (n, L, ...) of each group, without a copy."""
        sizes = [group.sequences * group.length for group in self.groups]
        # one split has one backward, where a slice per group would fill all places per group
        parts, row = rows.split(sizes), rows.shape[1:]
        return [part.view(*group, *row) for part, group in zip(parts, self.groups, strict=True)]

    def unpad(self, parts: Sequence[Tensor]) -> Tensor:
        """Bring (n, L, D) or (n, L, H, D / H) of at least one group back to (T, D)."""
        if self._is_full:
            return parts[0].flatten(0, 1).flatten(1)
        if self._order is None and parts[0].element_size() < 8:
            offsets, count = [self.sequences.offsets], self.sequences.num_values
            return torch.ops.fbgemm.dense_to_jagged(parts[0].flatten(2), offsets, count)[0]
        rows = torch.cat([part.flatten(0, 1) for part in parts])
        return _Unpad.apply(rows, self.places).flatten(1)

    @property
    def _is_full(self) -> bool:
        count, length = self.groups[0]
        return self._order is None and self.sequences.num_values == count * length

    @cached_property
    def places(self) -> Places:
        """Where the values are in the padded groups."""
        starts, on_cpu = self.sequences.offsets[:-1], self.sequences.lengths.device.type == "cpu"
        if self._order is None:
            count, length = self.groups[0]
            columns = torch.arange(length, device=starts.device)
            holes = (columns >= self.sequences.lengths.unsqueeze(1)).flatten()
            source = (starts.unsqueeze(1) + columns).flatten()
            firsts = torch.arange(count, device=starts.device) * length
        else:
            sizes = torch.tensor(self.groups)
            room = sizes[:, 1].repeat_interleave(sizes[:, 0])
            padded = JaggedOffsets(functional.pad(room.cumsum(0), (1, 0)), int(room.sum()))
            sequence = self._order.index_select(0, padded.row)
            lasts = self.sequences.lengths.index_select(0, sequence).sub_(1)
            holes = padded.positions > lasts
            source = starts.index_select(0, sequence) + padded.positions.minimum(lasts)
            firsts = torch.zeros_like(starts).index_copy_(0, self._order, padded.offsets[:-1])
        return Places(
            source.clamp_(max=self.sequences.num_values - 1),
            firsts.index_select(0, self.sequences.row) + self.sequences.positions,
            holes.nonzero().squeeze(1) if on_cpu else holes,
        )


class Places(NamedTuple):
    """Values and the places of the padded groups.

    Attributes:
        source: (P,) the value of a place; where it has none, of several groups the last one of its
            sequence, of one group any.
        target: (T,) the place of a value.
        holes: the numbers of places without a value; off the CPU (P,) bool, which needs no sync.
    """

    source: Tensor
    target: Tensor
    holes: Tensor

    def pad(self, values: Tensor) -> Tensor:
        """(T, ...) -> (P, ...), with zeros where no value is."""
        rows = values.index_select(0, self.source)
        if self.holes.dtype is not torch.bool:
            return rows.index_fill_(0, self.holes, 0)
        return rows.masked_fill_(self.holes.view(-1, *[1] * (rows.dim() - 1)), 0)

    def unpad(self, rows: Tensor) -> Tensor:
        """(P, ...) -> (T, ...)."""
        return rows.index_select(0, self.target)


def cut_lengths(
    counts: Counter[int], call_pairs: int = CALL_PAIRS, gather_pairs: int = GATHER_PAIRS
) -> list[LengthGroup]:
    """Cut sequences, longest first, into groups.

    Args:
        counts: length -> number of sequences.
        call_pairs: pairs whose work costs as much as a call.
        gather_pairs: pairs whose work costs as much as finding the places of several groups.
    Returns:
        The groups, longest first. One group where cutting would gain less than a
        tenth of the work, which sorting the values costs.
    """

    groups: list[LengthGroup] = []
    count, longest, of_longest, wasted, kept = 0, 0, 0, 0, 0
    top, total = max(counts), sum(counts.values())
    for length, number in sorted(counts.items(), reverse=True):
        work = length * (length + VALUE_PAIRS)
        lost = number * (of_longest - work) if count else 0
        if count and wasted + lost > call_pairs:
            groups.append(LengthGroup(count, longest))
            count, wasted, lost = 0, 0, 0
        if not count:
            longest, of_longest = length, work
            kept += call_pairs
        count, wasted = count + number, wasted + lost
        kept += number * of_longest
    groups.append(LengthGroup(count, longest))
    is_gain = _is_gain(kept + gather_pairs, total, top, call_pairs)
    return groups if is_gain else [LengthGroup(total, top)]


def _is_gain(pairs: int, sequences: int, longest: int, call_pairs: int) -> bool:
    """Return True if so many pairs are less than one group would be, and by more than a tenth: so
    much it costs to bring the values there and back.
    """
    return pairs < 0.9 * (sequences * longest * (longest + VALUE_PAIRS) + call_pairs)


# each is the backward of the other


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Places) -> Tensor:
        ctx.places = places
        return places.pad(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Unpad.apply(grad, ctx.places), None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Places) -> Tensor:
        ctx.places = places
        return places.unpad(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Pad.apply(grad, ctx.places), None


def check_rows(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check that queries, keys and values are as many and as wide: kernels would read beside them.

    Raises:
        ShapeError: they are not.
    """
    if not query.shape == key.shape == value.shape:
        shapes = ", ".join(str(tuple(one.shape)) for one in (query, key, value))
        raise ShapeError(f"query, key and value are {shapes}; all three must be (T, D).")


def check_heads(dim: int, heads: int) -> None:
    """Check that the columns of a layer can be divided among its heads.

    Raises:
        ConfigError: they cannot.
    """
    if heads < 1 or dim % heads:
        raise ConfigError(f"dim={dim} cannot be divided among heads={heads}.")
