"""Rows of slots in one flat buffer, and the kernels that only read them on CPU.

FBGEMM's CPU operators do so, but they know no bfloat16. There the rows of some bags, a cacheful,
are widened to float32 and summed by torch, which reads and writes them once more.
"""

# S slots, N ids, D columns of all slots

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from rayrec.distributed.kernels.parts import Block, cut_bags, cut_rows, ids_per_slot
from rayrec.distributed.kernels.workers import Workers
from rayrec.sparse.ops import offsets_of

_SUM, _FLOAT32 = 0, 0  # FBGEMM's pooling mode and element type
_WIDENED = 1 << 17  # values that are widened at a time


def take_rows(table: Tensor, rows_N: Tensor, workers: Workers) -> Tensor:
    """Return (N, D) float32 rows of a table, (rows, D).

    They equal sums over bags of one id, but that a negative zero keeps its sign.
    """
    found = torch.empty(rows_N.numel(), table.shape[1])
    blocks = cut_bags([rows_N.numel()], [table.shape[1]], rows_N.numel(), workers.threads)

    def fill(block: Block) -> None:
        rows = rows_N[block.bags.start : block.bags.stop]
        out = found[block.bags.start : block.bags.stop]
        if table.dtype == found.dtype:
            torch.index_select(table, 0, rows, out=out)
        else:
            out.copy_(table.index_select(0, rows))

    workers.run([partial(fill, block) for block in blocks])
    return found


def pool_widened(
    table: Tensor, ids_N: Tensor, offsets: Tensor, weights_N: Tensor | None, out: Tensor
) -> None:
    """Sum rows of any float type over bags, in torch: a cacheful is widened to float32, then
    summed.

    Args:
        offsets: (bags + 1,) into `ids_N`.
        out: (bags, width) float32, written.
    """
    bags, bounds = offsets.numel() - 1, (int(offsets[0]), int(offsets[-1]))
    pieces = max(1, math.ceil((bounds[1] - bounds[0]) * table.shape[1] / _WIDENED))
    for piece in range(pieces):
        a, b = bags * piece // pieces, bags * (piece + 1) // pieces
        cut = offsets[a : b + 1]
        mine = slice(int(cut[0]), int(cut[-1]))
        rows = table.index_select(0, ids_N[mine]).float()
        weights = None if weights_N is None else weights_N[mine]
        if rows.shape[0] == b - a and bool((cut.diff() == 1).all()):
            out[a:b] = rows if weights is None else rows * weights.unsqueeze(1)
        elif rows.shape[0]:
            out[a:b] = functional.embedding_bag(
                torch.arange(rows.shape[0]),
                rows,
                cut - cut[0],
                mode="sum",
                per_sample_weights=weights,
                include_last_offset=True,
            )
        else:
            out[a:b] = 0.0


class SlotRows:
    """Rows of all slots in one flat buffer, and the kernels that only read them.

    Args:
        rows: rows of all shards, flat.
        starts: for each slot, the place in `rows` at which its shard begins.
        sizes: rows of the shards before each slot's, and of all shards.
        widths: columns of each slot.
        workers: threads that share the work.
        column: column of the first slot in a gradient.
    """

    def __init__(
        self,
        rows: Tensor,
        starts: Sequence[int],
        sizes: Sequence[int],
        widths: Sequence[int],
        workers: Workers,
        column: int = 0,
    ) -> None:
        self.rows, self.workers = rows, workers
        self.starts, self.widths = tuple(starts), tuple(widths)
        self.columns = [column + c for c in offsets_of(widths)]
        self.starts_S = torch.tensor(starts)
        self.columns_S = torch.tensor(self.columns, dtype=torch.int32)
        self.sizes_S = torch.tensor(sizes)
        self._all_S = torch.ones(len(self.widths), dtype=torch.int32)

    def look_up(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Return (bags, D) float32: the sum of every bag's rows, slots side by side.

        Args:
            ids: (N,) int64, local to the shards.
            offsets: (S * bags + 1,) int64, slot by slot.
            weights: (N,) float32, or None.
        """
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
            # A block of several slots has all their bags, so its offsets are one run.
            first = block.slots.start * bags + block.bags.start
            last = (block.slots.stop - 1) * bags + block.bags.stop
            columns = slice(self.columns[block.slots.start], self.columns[block.slots.stop])
            pooled[block.bags.start : block.bags.stop, columns] = self._sums(
                block, ids, offsets[first : last + 1], weights
            )

        self.workers.run([partial(fill, block) for block in blocks])
        return pooled

    def _sums(self, block: Block, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Return (bags, width of the slots) of a block; `offsets` are its own, into all `ids`."""
        a, b = block.slots.start, block.slots.stop
        if self.rows.dtype is torch.bfloat16:
            return self._widened_sums(block, ids, offsets, weights)
        columns, width = self.columns_S[a : b + 1], self.columns[b] - self.columns[a]
        columns = columns - columns[0] if a else columns
        return torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
            self.rows,
            self.starts_S[a:b],
            columns,
            width,
            self.sizes_S[a : b + 1],
            ids,
            offsets,
            _SUM,
            weights,
            _FLOAT32,
        )

    def _table(self, slot: int) -> Tensor:
        """Return (rows, width): the rows of a slot's shard, and what lies behind them, unread."""
        start, width = self.starts[slot], self.widths[slot]
        count = (self.rows.numel() - start) // width
        return self.rows[start : start + count * width].view(count, width)

    def _widened_sums(
        self, block: Block, ids: Tensor, offsets: Tensor, weights: Tensor | None
    ) -> Tensor:
        bags, first = len(block.bags), self.columns[block.slots.start]
        pooled = torch.empty(bags, self.columns[block.slots.stop] - first)
        for i, slot in enumerate(block.slots):
            column = self.columns[slot] - first
            out = pooled[:, column : column + self.widths[slot]]
            pool_widened(
                self._table(slot), ids, offsets[i * bags : (i + 1) * bags + 1], weights, out
            )
        return pooled

    def _widened_weight_grad(self, grad: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        bags = grad.shape[0]
        found = torch.empty(ids.numel())
        for slot, width in enumerate(self.widths):
            cut = offsets[slot * bags : (slot + 1) * bags + 1]
            of_slot, column = slice(int(cut[0]), int(cut[-1])), self.columns[slot]
            of_bags = grad[:, column : column + width].repeat_interleave(cut.diff(), 0)
            found[of_slot] = torch.einsum(
                "nd,nd->n", self._table(slot).index_select(0, ids[of_slot]).float(), of_bags
            )
        return found

    def weight_grad(self, grad: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        """Return (N,): per id, its row times the gradient of its bag; `grad` has (bags, D)."""
        if self.rows.dtype is torch.bfloat16:
            return self._widened_weight_grad(grad, ids, offsets)
        slots = len(self.widths)
        found = torch.empty(ids.numel())
        bags = (offsets.numel() - 1) // slots
        shares = cut_rows(
            ids_per_slot(offsets, slots), self.widths, range(slots), self.workers.threads
        )

        def fill(slots: range) -> None:
            a, b = slots.start, slots.stop
            cut = offsets[a * bags : b * bags + 1]
            mine = slice(int(cut[0]), int(cut[-1]))
            found[mine] = torch.ops.fbgemm.split_embedding_codegen_grad_indice_weights_cpu(
                grad,
                self.rows,
                self.starts_S[a:b],
                self.columns_S[a : b + 1],
                ids[mine],
                cut - cut[0],
                self._all_S[a:b],
            )

        self.workers.run(
            [partial(fill, slots) for slots in dict.fromkeys(share.slots for share in shares)]
        )
        return found
