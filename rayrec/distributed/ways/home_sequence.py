"""A sequence collection that is read in place: one gather reads the rows of all its ids."""

# D columns of a collection, N ids

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.kernels.slot_rows import SlotRows, take_rows
from rayrec.distributed.kernels.table_space import TableSpace
from rayrec.distributed.kernels.workers import Workers
from rayrec.distributed.program.groups import CollectionSpec, Use
from rayrec.distributed.steps.source_rows import SourceRows
from rayrec.distributed.ways.home import Features, Keys, Wanted
from rayrec.dynamic.id_map import ABSENT
from rayrec.sparse.ops import gather_segments, offsets_of


class HomeSequence:
    """A sequence collection: every id is a bag of its own. `HomeLookup` has the same arguments."""

    weighted = False

    def __init__(
        self,
        spec: CollectionSpec,
        uses: Sequence[Use],
        space: TableSpace,
        rank: int,
        workers: Workers,
    ) -> None:
        self.uses, self.width, self._workers = tuple(uses), uses[0].width, workers
        self._features = Features([use.feature for use in uses])
        self._blocks = [space.column_blocks(use.table, rank) for use in uses]
        self._uncut = all(len(blocks) == 1 for blocks in self._blocks)
        # the row at which each table begins, if all memory is seen as one table of this width
        self._firsts = torch.tensor([blocks[0][0] // blocks[0][1] for blocks in self._blocks])
        self._space = space
        table = space.as_table(self.width)
        self._whole = SlotRows(table.view(-1), [0], [0, table.shape[0]], [self.width], workers)

    def wanted(self, rows: SourceRows, keys: Keys, of_uses: Sequence[Tensor] = ()) -> Wanted:
        """Return the ids of every use, use by use, and how many each has.

        Where no table is cut by columns, an id is a row of all memory seen as one table of this
        width, so that one gather reads all tables. Elsewhere ids stay rows of their tables.
        """
        order, part = self._features.order(keys), rows.parts[0]
        ids = gather_segments(part.ids, rows.kjt_offsets, order)
        counts = [part.counts[key] for key in order]
        absent = None
        if of_uses:
            ids = torch.cat(list(of_uses))
            absent = ids == ABSENT
            ids = ids.clamp_(min=0)  # any row, whose values are then left out
        if self._uncut:
            ids = ids + self._firsts.repeat_interleave(
                torch.tensor(counts), output_size=ids.numel()
            )
        return Wanted(GroupIds(ids, torch.arange(ids.numel() + 1), None), counts, absent)

    def look_up(self, wanted: Wanted, bags: Mapping[str, int]) -> list[Tensor]:
        """Return per use (ids, D)."""
        ids, counts = wanted.ids, wanted.counts
        with self._workers.alone():
            if not self._uncut:
                found = [
                    self._columns(blocks, part)
                    for blocks, part in zip(self._blocks, ids.ids.split(counts), strict=True)
                ]
            # a gather can write in place, FBGEMM's kernel is quicker alone
            elif self._workers.threads > 1:
                gathered = take_rows(self._space.as_table(self.width), ids.ids, self._workers)
                found = list(gathered.split(counts))
            else:
                found = list(self._whole.look_up(ids.ids, ids.offsets, None).split(counts))
        if wanted.absent is not None and bool(wanted.absent.any()):
            for rows, absent in zip(found, wanted.absent.split(counts), strict=True):
                rows[absent] = 0.0
        return found

    def _columns(self, blocks: Sequence[tuple[int, int]], ids: Tensor) -> Tensor:
        tables = [(self._space.as_table(width), start // width) for start, width in blocks]
        return torch.cat(
            [take_rows(table, ids + first, self._workers) for table, first in tables], 1
        )

    def joined(self, grads: Sequence[Tensor], most_bags: int) -> list[tuple[int, int, Tensor]]:
        """Return the gradients of all uses below each other."""
        firsts = offsets_of(grad.shape[0] for grad in grads)
        return [(first, 0, grad) for first, grad in zip(firsts, grads, strict=False)]

    def grad_of_weights(
        self, grads: Sequence[Tensor], wanted: Wanted, rows: SourceRows, keys: Keys, total: Tensor
    ) -> None:
        """Do nothing: ids of a sequence have no weights."""
