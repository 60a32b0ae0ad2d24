"""Row-wise Adagrad on CPU by FBGEMM's operators alone, without the module around them.

The module costs about as much time per step as a small lookup itself, and allocates its rows where it likes. Here they lie on huge pages
where the kernel allows them, since looking up random rows is bound by the translation of addresses. float32 rows and no weight decay:
this is the one update that FBGEMM's CPU kernels vectorize, for tables that one feature looks up.
"""

# S slots, T shards, N ids, D columns of all slots

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rayrec.checkpoint import ShardState
from rayrec.distributed.parts import Block, Share, cut_bags, cut_rows, ids_per_slot, take_share
from rayrec.distributed.route import GroupIds
from rayrec.distributed.slots import LookupGroup
from rayrec.distributed.workers import Workers
from rayrec.layout import DataType
from rayrec.optim import RowWiseAdagrad, SparseOptimizer
from rayrec.sparse.ops import offsets_of

_HUGE_PAGE = 2 << 20
_SUM, _FLOAT32 = 0, 0  # FBGEMM's pooling mode and element type


def table_memory(values: int) -> Tensor:
    """(values,) float32 zeros, on huge pages where the kernel allows them."""
    if values * 4 < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(values)
    memory = mmap.mmap(-1, values * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32)


def take_rows(table: Tensor, rows_N: Tensor, workers: Workers) -> Tensor:
    """(N, D) float32 rows of a table: equal to sums over bags of one id, but that a negative zero keeps its sign."""
    found = torch.empty(rows_N.numel(), table.shape[1])
    blocks = cut_bags([rows_N.numel()], [table.shape[1]], rows_N.numel(), workers.threads)

    def fill(block: Block) -> None:
        rows, out = rows_N[block.bags.start : block.bags.stop], found[block.bags.start : block.bags.stop]
        if table.dtype == found.dtype:
            torch.index_select(table, 0, rows, out=out)
        else:
            out.copy_(table.index_select(0, rows))

    workers.run([partial(fill, block) for block in blocks])
    return found


class SlotRows:
    """Where the rows of each slot lie in one flat buffer, and the kernels that only read them.

    Args:
        rows: of all shards, flat.
        starts: of each slot, where its shard begins in `rows`.
        sizes: rows of the shards before each slot's, and of all shards.
        widths: of each slot.
        workers: share the work.
    """

    def __init__(self, rows: Tensor, starts: Sequence[int], sizes: Sequence[int], widths: Sequence[int], workers: Workers) -> None:
        self.rows, self.widths, self.workers = rows, tuple(widths), workers
        self.columns = offsets_of(widths)
        self.starts_S = torch.tensor(starts)
        self.columns_S = torch.tensor(self.columns, dtype=torch.int32)
        self.sizes_S = torch.tensor(sizes)
        self._all_S = torch.ones(len(self.widths), dtype=torch.int32)

    def look_up(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """(bags, D) float32: the sum of every bag's rows, slots side by side."""
        slots = len(self.widths)
        bags = (offsets.numel() - 1) // slots
        whole = Block(range(slots), range(bags))
        if self.workers.threads == 1:
            return self._sums(whole, ids, offsets, weights)
        blocks = cut_bags(ids_per_slot(offsets, slots), self.widths, bags, self.workers.threads)
        if len(blocks) == 1:
            return self._sums(whole, ids, offsets, weights)
        pooled = torch.empty(bags, self.columns[-1])

        def fill(block: Block) -> None:
            first, last = block.slots.start * bags + block.bags.start, (block.slots.stop - 1) * bags + block.bags.stop
            columns = slice(self.columns[block.slots.start], self.columns[block.slots.stop])
            pooled[block.bags.start : block.bags.stop, columns] = self._sums(block, ids, offsets[first : last + 1], weights)

        self.workers.run([partial(fill, block) for block in blocks])
        return pooled

    def _sums(self, block: Block, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """(bags, width of the slots); `offsets` are those of the block, into all ids."""
        a, b = block.slots.start, block.slots.stop
        columns, width = self.columns_S[a : b + 1], self.columns[b] - self.columns[a]
        columns = columns - columns[0] if a else columns
        return torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
            self.rows, self.starts_S[a:b], columns, width, self.sizes_S[a : b + 1], ids, offsets, _SUM, weights, _FLOAT32
        )

    def weight_grad(self, grad: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        """(N,) gradient of the per-id weights."""
        slots = len(self.widths)
        found = torch.empty(ids.numel())
        bags = (offsets.numel() - 1) // slots
        shares = cut_rows(ids_per_slot(offsets, slots), self.widths, range(slots), self.workers.threads)

        def fill(slots: range) -> None:
            a, b = slots.start, slots.stop
            cut = offsets[a * bags : b * bags + 1]
            mine = slice(int(cut[0]), int(cut[-1]))
            found[mine] = torch.ops.fbgemm.split_embedding_codegen_grad_indice_weights_cpu(
                grad, self.rows, self.starts_S[a:b], self.columns_S[a : b + 1], ids[mine], cut - cut[0], self._all_S[a:b]
            )

        self.workers.run([partial(fill, slots) for slots in dict.fromkeys(share.slots for share in shares)])
        return found


class RowWiseAdagradLookup:
    """A `Lookup` of one group on CPU; see the module.

    Args:
        group: what to look up.
        optimizer: a row-wise Adagrad.
        workers: share the work; see `parts`.
    """

    iteration = 0  # row-wise Adagrad corrects no bias

    def __init__(self, group: LookupGroup, optimizer: RowWiseAdagrad, workers: Workers | None = None) -> None:
        self.group, self.optimizer, self.workers = group, optimizer, workers or Workers()
        rows = [shard.shape[0] for shard in group.shards]
        self._bounds = offsets_of(shard.shape[0] * shard.shape[1] for shard in group.shards)
        self._row_bounds = offsets_of(rows)
        self.sums = torch.zeros(self._row_bounds[-1])
        slots = group.slot_shards
        self.rows = table_memory(self._bounds[-1])
        sizes = [*(self._row_bounds[s] for s in slots), self._row_bounds[-1]]
        self._slots = SlotRows(self.rows, [self._bounds[s] for s in slots], sizes, [s.width for s in group.slots], self.workers)
        self._widest = max(shard.shape[1] for shard in group.shards)
        self._sum_offsets = torch.tensor(sizes[:-1])
        self._bits = max(1, (self._row_bounds[-1]).bit_length())
        self._places = torch.zeros(len(slots), dtype=torch.int32)
        self._lr = torch.tensor(optimizer.lr)
        self._anchor = torch.zeros(0, requires_grad=True)

    @staticmethod
    def trains(optimizer: SparseOptimizer, data_type: DataType) -> bool:
        """Whether this lookup applies exactly the optimizer's update."""
        plain = isinstance(optimizer, RowWiseAdagrad) and not optimizer.weight_decay
        return plain and data_type is DataType.FP32 and optimizer.max_row_norm is None

    def __call__(self, routed: GroupIds) -> Tensor:
        """(bags, D) float32: the pooled rows of every slot's bags; its backward updates the rows."""
        return _LookUp.apply(self, self._anchor, routed.ids, routed.offsets, routed.weights)

    def look_up(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """The kernel's forward pass."""
        if self.group.key.sequence and self.workers.threads > 1:  # a gather can write in place, FBGEMM's kernel is quicker alone
            return take_rows(self.rows.view(-1, self.group.width), ids, self.workers)
        return self._slots.look_up(ids, offsets, weights)

    def update(self, grad: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> None:
        """The kernel's backward pass, which updates the rows."""
        slots = len(self.group.slots)
        bags = (offsets.numel() - 1) // slots
        if self.workers.threads == 1:
            return self._update(grad, ids, offsets, weights, bags, Share(range(slots)))
        shares = cut_rows(ids_per_slot(offsets, slots), self._slots.widths, self.group.slot_shards, self.workers.threads)
        self.workers.run([partial(self._update, grad, ids, offsets, weights, bags, share) for share in shares])

    def _update(self, grad: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, bags: int, share: Share) -> None:
        if len(share.slots) < len(self.group.slots) or share.parts > 1:
            ids, offsets, weights = take_share(ids, offsets, weights, bags, share)
        of, a, b = self._slots, share.slots.start, share.slots.stop
        torch.ops.fbgemm.split_embedding_backward_codegen_rowwise_adagrad_cpu(
            grad, self.rows, self._places[a:b], of.starts_S[a:b], of.columns_S[a : b + 1], self._widest, of.sizes_S[a : b + 1], self._bits,
            ids, offsets, _SUM, weights, False, self.sums, self._places[a:b], self._sum_offsets[a:b], self._lr, self.optimizer.eps,
        )  # fmt: skip

    def weight_grad(self, grad: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        """(N,) gradient of the per-id weights."""
        return self._slots.weight_grad(grad, ids, offsets)

    def set_learning_rate(self, lr: float) -> None:
        """Learning rate of the updates to come."""
        self._lr.fill_(lr)

    def shard_states(self) -> list[ShardState]:
        """Live views of the rows and optimizer state of every shard."""
        (name,) = self.optimizer.state_widths
        found = []
        for i, shard in enumerate(self.group.shards):
            rows = self.rows[self._bounds[i] : self._bounds[i + 1]].view(shard.shape)
            found.append(ShardState(shard=shard, weight=rows, optimizer={name: self.sums[self._row_bounds[i] : self._row_bounds[i + 1]]}))
        return found


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lookup: RowWiseAdagradLookup, anchor: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        ctx.lookup, ctx.routed = lookup, (ids, offsets, None if weights is None else weights.detach())
        with lookup.workers.alone():
            return lookup.look_up(*ctx.routed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lookup: RowWiseAdagradLookup = ctx.lookup
        ids, offsets, weights = ctx.routed
        limit = lookup.optimizer.max_gradient
        with lookup.workers.alone():
            grad = grad.contiguous() if limit is None else grad.clamp(-limit, limit)
            weight_grad = lookup.weight_grad(grad, ids, offsets) if ctx.needs_input_grad[4] else None
            lookup.update(grad, ids, offsets, weights)
        return None, None, None, None, weight_grad
