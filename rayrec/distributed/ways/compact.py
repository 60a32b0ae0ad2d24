"""Bags that have no id in a row block stay at home.

A table cut by rows sees every bag once per block, most of them empty where bags have few ids: with
one id a bag and W blocks, W - 1 of W. Their home, which cut the ids, sends the others alone. An
owner pools what it is sent, as it does with keys of different batch sizes, and its rows come back
in that order; the home knows which bags they are. So rows and gradients travel only where there is
something to say. Every home decides by itself in every step: where most bags have ids it sends all,
which needs no index.

Rows are put in place by blocks of equal width, of which all columns concerned consist. Sums are
taken in block order, so they are those of full matrices bit for bit.
"""

# B bags of the home batch, D columns of a collection, n rows of an owner's matrix, C blocks of g
# columns side by side in it

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec.distributed.kernels.bands import put_rows
from rayrec.distributed.program.groups import Slot
from rayrec.distributed.program.slots import SlotTable
from rayrec.distributed.steps.route import RoutedIds, SendPlan
from rayrec.distributed.steps.source_rows import FilledBags, SourceRows
from rayrec.distributed.ways.matrices import Matrix
from rayrec.distributed.ways.spans import Buffers, JoinPlan
from rayrec.sparse.ops import offsets_of

_CACHED_VALUES = 1 << 17  # gathered and scaled on CPU before they leave the core's cache


@dataclass(frozen=True, eq=False)
class _Columns:
    """An owner's matrix as blocks of g columns."""

    collection: int
    granule: int
    rows_C: Tensor  # row of the filled bags of each block
    column_C: Tensor  # where each block belongs, in blocks
    blocks: dict[int, slice | Tensor]  # row block -> its blocks of columns


@dataclass(frozen=True, eq=False)
class Places:
    """Places in the output at home of the rows of one owner's matrix.

    Attributes:
        index: (n, C) block of the output, (bag, column) flat; bag B, which does not exist, for
            padding.
    """

    columns: _Columns
    index: Tensor

    def put(self, matrix: Tensor, output: Tensor) -> None:
        """Write the rows into (B + 1, D), where no other owner has a row for the same bag and
        columns.
        """
        put_rows(
            output.view(-1, self.columns.granule),
            self.index.view(-1),
            matrix.reshape(-1, self.columns.granule),
        )

    def add(self, matrix: Tensor, output: Tensor, block: int) -> None:
        """Add the rows of one row block to (B + 1, D)."""
        g, cut = self.columns.granule, self.columns.blocks.get(block)
        if cut is None:
            return
        # In one row block only the index of the padding repeats, so a read and a write add up.
        index = self.index[:, cut].reshape(-1)
        rows = matrix.view(*self.index.shape, g)[:, cut].reshape(-1, g)
        blocks = output.view(-1, g)
        put_rows(blocks, index, blocks.index_select(0, index).add_(rows))

    def take(self, grad: Tensor, out: Tensor, scale: float) -> None:
        """Fill (n, columns) with the gradient of the rows, from (B, D), times `scale`; padding gets
        that of any bag, which nobody reads.
        """
        g = self.columns.granule
        blocks, index, into = grad.view(-1, g), self.index.view(-1), out.view(-1, g)
        index = index.clamp(max=blocks.shape[0] - 1)
        step = max(1, _CACHED_VALUES // g if grad.device.type == "cpu" else index.numel())
        for first in range(0, index.numel(), step):
            part = torch.index_select(
                blocks, 0, index[first : first + step], out=into[first : first + step]
            )
            if scale != 1.0:
                part.mul_(scale)


@dataclass(frozen=True)
class BlockPlan:
    """The matrices of all owners that may come without some bags, worked out once per key list."""

    matrices: dict[tuple[int, int], tuple[Matrix, _Columns]]  # (owner, number)
    widths: dict[int, int]  # collection -> D

    @staticmethod
    def of(slots: SlotTable, plan: JoinPlan, send: SendPlan, device: torch.device) -> BlockPlan:
        """Make the plan for batches that are sent as `send` says."""
        sizes = [len(send.keys), *(cut.blocks * len(cut.features) for cut in send.bucketings)]
        firsts = offsets_of(sizes)[1:]
        # source row -> row of `FilledBags.bags`, which holds the rows of some bucketings only
        row_of: dict[int, int] = {}
        for first, end, cut in zip(firsts, firsts[1:], send.bucketings, strict=False):
            if cut.leaves_out:
                before = len(row_of)
                row_of.update((row, before + i) for i, row in enumerate(range(first, end)))
        matrices = {}
        for owner, of_owner in enumerate(plan.owners):
            for number, matrix in enumerate(of_owner.matrices):
                if matrix.leaves_out:
                    here = [slot for group in matrix.groups for slot in group.slots]
                    rows = [row_of[send.messages[owner].rows[slot.piece]] for slot in here]
                    granule = slots.granules[here[0].use.collection]
                    matrices[owner, number] = matrix, _columns(here, rows, granule, device)
        return BlockPlan(matrices, plan.widths)

    def places(self, routed: RoutedIds) -> dict[tuple[int, int], Places]:
        """Return where the rows of each matrix belong now; empty when all bags were sent."""
        filled = routed.source.filled
        if filled is None:
            return {}
        places = {}
        for (owner, number), (matrix, columns) in self.matrices.items():
            rows = matrix.rows(routed.sent[owner])
            index = _index(columns, filled, rows, self.widths[columns.collection])
            places[owner, number] = Places(columns, index)
        return places


def _columns(
    slots: Sequence[Slot], rows: Sequence[int], granule: int, device: torch.device
) -> _Columns:
    slot_of = [i for i, slot in enumerate(slots) for _ in range(slot.width // granule)]
    columns = [slot.column // granule + j for slot in slots for j in range(slot.width // granule)]
    blocks: dict[int, list[int]] = {}
    for c, i in enumerate(slot_of):
        blocks.setdefault(slots[i].block, []).append(c)
    return _Columns(
        collection=slots[0].use.collection,
        granule=granule,
        rows_C=torch.tensor([rows[i] for i in slot_of], device=device),
        column_C=torch.tensor(columns, device=device),
        blocks={
            block: slice(None) if len(blocks) == 1 else torch.tensor(cs, device=device)
            for block, cs in blocks.items()
        },
    )


def _index(columns: _Columns, filled: FilledBags, rows: int, width: int) -> Tensor:
    """Return (n, C): the block of the output for each block of the matrix; see `Places`."""
    # The output has D / g blocks per bag, so block (bag, column) is number bag * D / g + column.
    bag_Cn = filled.bags.index_select(0, columns.rows_C)[:, :rows]
    return torch.add(columns.column_C, bag_Cn.t(), alpha=width // columns.granule).contiguous()


def join_blocks(
    plan: JoinPlan,
    received: Buffers,
    collection: int,
    places: Mapping[tuple[int, int], Places],
    source: SourceRows,
) -> Tensor:
    """Return (B, D): the join of a collection some of whose bags stayed at home."""
    filled = source.filled
    assert filled is not None
    here = {key: one for key, one in places.items() if one.columns.collection == collection}
    bags, width = source.batch, plan.widths[collection]
    like = next(received[owner][number] for owner, number in here)
    # one row more than there are bags: the rows of the padding go there
    # If every bag has ids in exactly one block, the rows below write all of the output.
    tiled = filled.once and filled.every
    output = like.new_empty(bags + 1, width) if tiled else like.new_zeros(bags + 1, width)
    for span in plan.writes[collection]:
        if (span.owner, span.matrix) not in here:
            columns = slice(span.column, span.column + span.width)
            output[:bags, columns] = span.of(received)
    if filled.once:
        for (owner, number), place in here.items():
            place.put(received[owner][number], output)
    else:
        blocks = 1 + max(max(place.columns.blocks) for place in here.values())
        for block in range(blocks):
            for (owner, number), place in here.items():
                place.add(received[owner][number], output, block)
    for span in plan.adds:
        if span.collection == collection and (span.owner, span.matrix) not in here:
            columns = slice(span.column, span.column + span.width)
            output[:bags, columns].add_(span.of(received))
    return output[:bags]
