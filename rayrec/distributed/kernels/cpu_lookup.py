"""Row-wise Adagrad on CPU by FBGEMM's operators alone, without the module around them.

The module costs about as much time per step as a small lookup itself, and allocates its rows where
it likes. Here they lie on huge pages where the kernel allows them, since looking up random rows is
bound by the translation of addresses. float32 rows and no weight decay: this is the one update that
FBGEMM's CPU kernels vectorize, for tables that one feature looks up. It counts the bytes before a
row in 32 bits, without a check (fbgemm-gpu-cpu 1.8.0): the gradient of a row that begins at 4 GiB
of its shard would go to the first one. So the rows of a larger shard are updated band by band.
"""

# S slots, T shards, N ids, D columns of all slots

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from rayrec.checkpoint import ShardState
from rayrec.comm.pages import Allocate
from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.kernels.parts import (
    RowShare,
    cut_rows,
    ids_per_slot,
    take_share,
    take_where,
)
from rayrec.distributed.kernels.slot_rows import SlotRows, take_rows
from rayrec.distributed.kernels.table_space import TableSpace
from rayrec.distributed.kernels.workers import Workers
from rayrec.distributed.program.groups import LookupGroup
from rayrec.optim import RowWiseAdagrad
from rayrec.sparse.ops import offsets_of

_SUM = 0  # FBGEMM's pooling mode
MOST_VALUES = 1 << 30  # float32 numbers of a band of rows


def _lanes(group: LookupGroup, rows: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return a number of each lane's shard, ascending; and the rows before it, and of all.

    The update's kernel wants slots without gaps. So the columns between two slots become a lane,
    too: a slot of a table of one row that nobody looks up, with a number of its own.

    Args:
        rows: rows of each lane.
    """
    numbers: list[int] = []
    bounds: list[int] = []
    number = used = 0
    before = None
    for shard, own in zip(group.lanes, rows, strict=True):
        if shard is None or shard != before:
            number, used = number + 1, used + own
        numbers.append(number - 1)
        bounds.append(used - own)
        before = before if shard is None else shard
    return numbers, [*bounds, used]


class RowWiseAdagradLookup:
    """A kernel of one group on CPU; see the module.

    Args:
        group: slots and shards to look up; its key names a row-wise Adagrad.
        workers: threads that share the work; see `parts`.
        space: memory of rows that all ranks share; memory of its own when None.
        allocate: returns memory of so many bytes.
    """

    iteration = 0  # row-wise Adagrad corrects no bias

    def __init__(
        self, group: LookupGroup, workers: Workers, space: TableSpace | None, allocate: Allocate
    ) -> None:
        optimizer = group.key.optimizer
        assert isinstance(optimizer, RowWiseAdagrad), "it is the one that is vectorized"
        self.group, self.optimizer, self.workers = group, optimizer, workers
        if space is None:
            *self._starts, end = offsets_of(prod(shard.shape) for shard in group.shards)
            self.rows = allocate(4 * end).view(torch.float32)
        else:
            self._starts = [space.starts[shard] for shard in group.shards]
            self.rows = space.rows
        self._row_bounds = offsets_of(shard.shape[0] for shard in group.shards)
        self.sums = allocate(4 * self._row_bounds[-1]).view(torch.float32)
        rows = [1 if shard is None else group.shards[shard].shape[0] for shard in group.lanes]
        self._shards, before = _lanes(group, rows)
        starts = [0 if shard is None else self._starts[shard] for shard in group.lanes]
        widths = group.lane_widths
        first = group.gradient.first
        self._slots = SlotRows(self.rows, starts, before, widths, self.workers, first)
        self._widest = max(widths)
        self._sum_offsets = torch.tensor(
            [0 if shard is None else self._row_bounds[shard] for shard in group.lanes]
        )
        bands = [MOST_VALUES // width for width in widths]
        self._has_bands = any(own > band for own, band in zip(rows, bands, strict=True))
        self._band_rows = torch.tensor(bands)
        _, before = _lanes(group, list(map(min, rows, bands)))
        self._sizes, self._bits = torch.tensor(before), max(1, before[-1].bit_length())
        self._places = torch.zeros(len(widths), dtype=torch.int32)
        self.learning_rate = optimizer.lr
        self.base_rate: float | None = None
        self._lr = torch.tensor(optimizer.lr)
        self._anchor = torch.zeros(0, requires_grad=True)

    def __call__(self, routed: GroupIds) -> Tensor:
        """Return (bags, D) float32: the pooled rows; the backward pass updates the rows."""
        return _LookUp.apply(self, self._anchor, routed.ids, routed.offsets, routed.weights)

    def look_up(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Return (bags, D) float32, the sum of every bag's rows.

        Args:
            ids: (N,) int64, local to the shards.
            offsets: (S * bags + 1,) int64, slot by slot.
            weights: (N,) float32, or None.
        """
        # a gather can write in place, FBGEMM's kernel is quicker alone; ids of a dynamic table that
        # have no row leave empty bags
        each_has_a_row = ids.numel() == offsets.numel() - 1
        if self.group.key.sequence and self.workers.threads > 1 and each_has_a_row:
            return take_rows(self.rows.view(-1, self.group.width), ids, self.workers)
        return self._slots.look_up(ids, offsets, weights)

    def update_in_place(self, grad: Tensor, routed: GroupIds) -> None:
        """Update rows that all ranks read; `grad` has the group's columns alone where they are
        gathered.
        """
        with self.workers.alone():
            self.update(self._clipped(grad), routed.ids, routed.offsets, routed.weights)

    def update(self, grad: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> None:
        """Update every row that has ids, once, by the sum of its gradients in `grad`, (bags, D)."""
        slots = len(self._shards)
        bags = (offsets.numel() - 1) // slots
        if self.workers.threads == 1:
            return self._update(grad, ids, offsets, weights, bags, RowShare(range(slots)))
        # No two shares touch one row, so their tasks need no lock.
        shares = cut_rows(
            ids_per_slot(offsets, slots), self._slots.widths, self._shards, self.workers.threads
        )
        self.workers.run(
            [partial(self._update, grad, ids, offsets, weights, bags, share) for share in shares]
        )

    def _update(
        self,
        grad: Tensor,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        bags: int,
        share: RowShare,
    ) -> None:
        if len(share.slots) < len(self._shards) or share.parts > 1:
            ids, offsets, weights = take_share(ids, offsets, weights, bags, share)
        if not self._has_bands:
            self._update_band(grad, ids, offsets, weights, share.slots, 0)
        elif ids.numel():
            of_lanes = self._band_rows[share.slots.start : share.slots.stop]
            rows = of_lanes.repeat_interleave(offsets[::bags].diff())
            bands, local = ids // rows, ids % rows
            for band in bands.unique().tolist():
                own = take_where(bands == band, local, offsets, weights)
                self._update_band(grad, *own, share.slots, band)

    def _update_band(
        self,
        grad: Tensor,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        slots: range,
        band: int,
    ) -> None:
        """Update rows of a band of every shard; `ids` count from its first row."""
        # The kernel reads each lane's gradient at its column of `grad`, and steps over gaps.
        of, a, b = self._slots, slots.start, slots.stop
        starts, sums = of.starts_S[a:b], self._sum_offsets[a:b]
        if band:
            rows = band * self._band_rows[a:b]
            starts, sums = starts + rows * of.columns_S[a : b + 1].diff(), sums + rows
        torch.ops.fbgemm.split_embedding_backward_codegen_rowwise_adagrad_cpu(
            grad, self.rows, self._places[a:b], starts, of.columns_S[a : b + 1],
            self._widest, self._sizes[a : b + 1], self._bits, ids, offsets, _SUM, weights, False,
            self.sums, self._places[a:b], sums, self._lr, self.optimizer.eps,
        )  # fmt: skip

    def _clipped(self, grad: Tensor) -> Tensor:
        limit = self.optimizer.max_gradient
        return grad.contiguous() if limit is None else grad.clamp(-limit, limit)

    def weight_grad(self, grad: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        """Return (N,): per id, its row times the gradient of its bag; `grad` has (bags, D)."""
        return self._slots.weight_grad(grad, ids, offsets)

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the updates to come."""
        self.learning_rate = lr
        self._lr.fill_(lr)

    def shard_states(self) -> list[ShardState]:
        """Return live views of the rows and optimizer state of every shard."""
        (name,) = self.optimizer.state_widths
        found = []
        parts = zip(self.group.shards, self._starts, pairwise(self._row_bounds), strict=True)
        for shard, start, (first, stop) in parts:
            rows = self.rows[start : start + prod(shard.shape)].view(shard.shape)
            found.append(ShardState(shard, rows, {name: self.sums[first:stop]}))
        return found


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        lookup: RowWiseAdagradLookup,
        anchor: Tensor,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        ctx.lookup = lookup
        ctx.routed = ids, offsets, None if weights is None else weights.detach()
        with lookup.workers.alone():
            return lookup.look_up(*ctx.routed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lookup: RowWiseAdagradLookup = ctx.lookup
        ids, offsets, weights = ctx.routed
        with lookup.workers.alone():
            grad = lookup._clipped(grad)
            # It reads the rows, so it must come before their update.
            weight_grad = (
                lookup.weight_grad(grad, ids, offsets) if ctx.needs_input_grad[4] else None
            )
            lookup.update(grad, ids, offsets, weights)
        return None, None, None, None, weight_grad
