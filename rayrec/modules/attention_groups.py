"""Groups of sequences of similar length, so that attention pads little and calls seldom.

A call of attention costs a fixed time beside its work, and a padded sequence costs the work of the
longest one of its call. On CPU the sequences are sorted by length and cut into groups, so that what
padding costs in a group is at most what another call would. A batch of equal lengths, or of short
sequences, becomes one group: the padded way. Long sequences of different lengths become groups of
one: a call per sequence, without padding. On other devices there is one group, padded to a length
that the host knows, so that the host waits for nothing.

    # B sequences, T values of all of them, L longest of a group, D columns
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rayrec.errors import InputError
from rayrec.modules.jagged_rows import JaggedOffsets
from rayrec.sparse.ops import jagged_to_padded_dense

# One call costs as much as so many pairs of a query and a key, of 64 columns. Measured forward and
# backward on one CPU core: a call takes 0.15 ms, and a sequence of 100 values as much beside it.
CALL_PAIRS = 10_000
# Values cost as much as so many pairs each: they are copied, and read once by a call.
VALUE_PAIRS = 20
SORT_CALLS = 6


class LengthGroup(NamedTuple):
    """Neighbouring sequences that one call attends.

    Attributes:
        sequences: their number.
        length: L.
        values: the number of their values.
        offsets: (sequences + 1,) int64 from 0 to `values`; None where all have L values.
    """

    sequences: int
    length: int
    values: int
    offsets: Tensor | None

    def pad(self, values: Tensor) -> Tensor:
        """(values, D) -> (sequences, L, D), zeros behind the end of each; a view where none is."""
        if self.offsets is None:
            return values.view(self.sequences, self.length, -1)
        if values.element_size() == 8:
            return _Pad.apply(values, self.offsets, self.length)
        return jagged_to_padded_dense(values, self.offsets, self.length, 0.0)

    def unpad(self, padded: Tensor) -> Tensor:
        """(sequences, L, D) -> (values, D); the reverse of `pad`."""
        if self.offsets is None:
            return padded.reshape(self.values, -1)
        if padded.element_size() == 8:
            return _Unpad.apply(padded, self.offsets, self.values)
        return torch.ops.fbgemm.dense_to_jagged(padded, [self.offsets], self.values)[0]


class JaggedGroups:
    """The groups of a batch; made once per batch, and used by every layer.

    Args:
        offsets: (B + 1,) integers from 0 to T.
        num_values: T.
        max_length: the longest sequence that may come; other devices than the CPU pad to it, and
            without it wait for the longest one.
        width: D of what is attended; it says how dear a pair is against a call.
    Raises:
        InputError: on CPU, a sequence is longer than max_length. Elsewhere whoever reads positions
            must refuse it, since looking would cost a host sync.
    Attributes:
        sequences: the places of the values in the order in which they came.
        groups: the groups, in the order of the sorted values.
    """

    def __init__(
        self, offsets: Tensor, num_values: int, max_length: int | None = None, width: int = 64
    ) -> None:
        self.sequences = JaggedOffsets(offsets, num_values)
        self.groups: list[LengthGroup] = []
        self._order: Tensor | None = None
        self._inverse: Tensor | None = None
        count = offsets.numel() - 1
        if not count or not num_values:
            return
        if offsets.device.type != "cpu":
            longest = max_length or int(offsets.diff().max())
            self.groups = [LengthGroup(count, longest, num_values, self.sequences.offsets)]
            return
        lengths = self.sequences.offsets.diff()
        self._cut(lengths, width)
        longest = max(group.length for group in self.groups)
        if max_length is not None and longest > max_length:
            raise InputError(
                f"a sequence has {longest} values, more than the {max_length} that this module was "
                "made for. Cut the histories, or raise max_length."
            )

    def _cut(self, lengths: Tensor, width: int) -> None:
        """Cut the sequences of these lengths into groups, and sort them where there are several."""
        counts = Counter(lengths.tolist())
        # they come last and have no values, so no group needs them
        empty = counts.pop(0, 0)
        sizes = cut_lengths(counts, CALL_PAIRS * 64 // max(1, width))
        if len(sizes) == 1:
            same = len(counts) == 1 and not empty
            offsets = None if same else self.sequences.offsets
            self.groups = [
                LengthGroup(len(lengths), sizes[0][1], self.sequences.num_values, offsets)
            ]
            return
        # longest first, as `cut_lengths` counts; equal lengths keep their order
        by_length = torch.argsort(lengths, descending=True, stable=True)
        sorted_lengths = lengths.index_select(0, by_length)
        sorted_offsets = torch.cat([lengths.new_zeros(1), sorted_lengths.cumsum(0)])
        first = 0
        for number, length in sizes:
            own = sorted_offsets[first : first + number + 1]
            own = own - own[0]
            values = int(own[-1])
            full = values == number * length
            self.groups.append(LengthGroup(number, length, values, None if full else own))
            first += number
        into = JaggedOffsets(sorted_offsets, self.sequences.num_values)
        starts = self.sequences.offsets[:-1].index_select(0, by_length)
        self._order = starts.index_select(0, into.row) + into.positions
        self._inverse = torch.empty_like(self._order)
        self._inverse[self._order] = torch.arange(len(self._order))

    def sort(self, values: Tensor) -> Tensor:
        """Bring (T, ...) values into the order of the groups."""
        return values if self._order is None else _Reorder.apply(values, self._order, self._inverse)

    def unsort(self, values: Tensor) -> Tensor:
        """Bring (T, ...) values back into the order in which they came."""
        return values if self._order is None else _Reorder.apply(values, self._inverse, self._order)

    def parts(self, *tensors: Tensor) -> Iterator[tuple[LengthGroup, tuple[Tensor, ...]]]:
        """Yield each group with its part of some (T, ...) tensors in the order of the groups."""
        if len(self.groups) == 1:
            yield self.groups[0], tensors
            return
        # one split has one backward, where a slice per group would fill T values per group
        sizes = [group.values for group in self.groups]
        yield from zip(
            self.groups, zip(*(tensor.split(sizes) for tensor in tensors), strict=True), strict=True
        )


def cut_lengths(counts: Counter[int], call_pairs: int = CALL_PAIRS) -> list[tuple[int, int]]:
    """Cut sequences, longest first, into groups.

    Args:
        counts: length -> number of sequences.
        call_pairs: pairs whose work costs as much as a call.
    Returns:
        (sequences, longest length) of each group. One group where cutting would gain less than a
        tenth of the work, which sorting the values costs.
    """

    def work(length: int) -> int:
        return length * (length + VALUE_PAIRS)

    groups: list[tuple[int, int]] = []
    count, longest, wasted, kept, whole = 0, 0, 0, 0, 0
    top = max(counts)
    for length in sorted(counts, reverse=True):
        number = counts[length]
        whole += number * work(top)
        lost = number * (work(longest) - work(length)) if count else 0
        if count and wasted + lost > call_pairs:
            groups.append((count, longest))
            count, wasted, lost = 0, 0, 0
        if not count:
            longest = length
            kept += call_pairs
        count, wasted = count + number, wasted + lost
        kept += number * work(longest)
    groups.append((count, longest))
    # the values are sorted and brought back, which takes calls, too, and a tenth of the work
    kept += SORT_CALLS * call_pairs
    whole += call_pairs
    return groups if kept < 0.9 * whole else [(sum(counts.values()), top)]


class _Reorder(torch.autograd.Function):
    # the backward of a permutation is its inverse, which is a copy; autograd would add instead
    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return values.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return _Reorder.apply(grad, inverse, order), None, None


# FBGEMM pads no values of 64 bits, so they go through it as two words of 32; zeros stay zeros.


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Tensor, length: int) -> Tensor:
        ctx.offsets, ctx.values = offsets, len(values)
        padded = jagged_to_padded_dense(_words(values), offsets, length, 0.0)
        return padded.view(values.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Unpad.apply(grad, ctx.offsets, ctx.values), None, None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: Tensor, offsets: Tensor, values: int) -> Tensor:
        ctx.offsets, ctx.length = offsets, padded.shape[1]
        own = torch.ops.fbgemm.dense_to_jagged(_words(padded), [offsets], values)[0]
        return own.view(padded.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Pad.apply(grad, ctx.offsets, ctx.length), None, None


def _words(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.float32)
