"""A pooled collection that is read in place: one kernel over all its tables writes the output."""

# B rows of the home batch, D columns of a collection, N ids

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rayrec.distributed.kernels.dynamic_ids import without_absent
from rayrec.distributed.kernels.ids import GroupIds, bag_offsets
from rayrec.distributed.kernels.slot_rows import SlotRows
from rayrec.distributed.kernels.table_space import TableSpace
from rayrec.distributed.kernels.workers import Workers
from rayrec.distributed.program.groups import CollectionSpec, Use
from rayrec.distributed.steps.source_rows import SourceRows
from rayrec.distributed.ways.home import Features, Keys, Wanted, fill
from rayrec.sparse.ops import gather_segments, offsets_of


class HomeLookup:
    """A pooled collection; see the module.

    Args:
        spec: the collection.
        uses: its uses, in output order.
        space: memory of its tables.
        rank: rank whose copies of replicated tables are read.
        workers: threads that share the work.
    """

    def __init__(
        self,
        spec: CollectionSpec,
        uses: Sequence[Use],
        space: TableSpace,
        rank: int,
        workers: Workers,
    ) -> None:
        self.weighted, self.uses = spec.weighted, tuple(uses)
        self.width = sum(use.width for use in uses)
        blocks = [(use, *block) for use in uses for block in space.column_blocks(use.table, rank)]
        rows = {table.name: table.num_embeddings for table in spec.tables}
        bounds = offsets_of(rows[use.table] for use, _, _ in blocks)
        self._slots = SlotRows(
            space.rows,
            [start for _, start, _ in blocks],
            bounds,
            [width for _, _, width in blocks],
            workers,
        )
        self._slot_uses = [use for use, _, _ in blocks]
        self._features = Features([use.feature for use in self._slot_uses])

    def wanted(self, rows: SourceRows, keys: Keys, of_uses: Sequence[Tensor] = ()) -> Wanted:
        """Return the bags of every slot, slot by slot: as many of each, ids local to its table.

        Keys with fewer bags than others are padded by empty ones.
        """
        wanted = self._wanted(rows, keys)
        if not of_uses:
            return wanted
        ids = torch.cat([of_uses[use.index] for use in self._slot_uses])
        bags = wanted.ids
        return Wanted(without_absent(GroupIds(ids, bags.offsets, bags.weights)), [])

    def _wanted(self, rows: SourceRows, keys: Keys) -> Wanted:
        order, part, most = self._features.order(keys), rows.parts[0], rows.most_bags
        if len(set(part.bags)) > 1:
            none = part.lengths.new_zeros(most)
            bags = part.lengths.split(part.bags)
            lengths = torch.cat(
                [piece for key in order for piece in (bags[key], none[part.bags[key] :])]
            )
        elif order == tuple(range(len(keys))):
            return Wanted(
                GroupIds(
                    part.ids,
                    rows.bag_offsets().to(torch.int64),
                    part.weights if self.weighted else None,
                ),
                [],
            )
        else:
            lengths = gather_segments(part.lengths, offsets_of(part.bags), order)
        weights = None
        if self.weighted:
            assert part.weights is not None
            weights = gather_segments(part.weights, rows.kjt_offsets, order)
        return Wanted(
            GroupIds(
                gather_segments(part.ids, rows.kjt_offsets, order), bag_offsets(lengths), weights
            ),
            [],
        )

    def look_up(self, wanted: Wanted, bags: Mapping[str, int]) -> list[Tensor]:
        """Return (B, D), or per use (bags, width) where keys have different numbers of bags."""
        with self._slots.workers.alone():
            output = self._slots.look_up(wanted.ids.ids, wanted.ids.offsets, wanted.ids.weights)
        if not bags:
            return [output]
        return [
            output[: bags[use.feature], use.column : use.column + use.width].clone()
            for use in self.uses
        ]

    def joined(self, grads: Sequence[Tensor], most_bags: int) -> list[tuple[int, int, Tensor]]:
        """Return one (B, D) gradient, or one per use where keys have different bags."""
        if len(grads) == 1 and grads[0].shape[1] == self.width:
            return [(0, 0, grads[0])]
        parts = []
        for use, grad in zip(self.uses, grads, strict=True):
            parts.append((0, use.column, grad))
            if grad.shape[0] < most_bags:
                parts.append(
                    (
                        grad.shape[0],
                        use.column,
                        grad.new_zeros(most_bags - grad.shape[0], use.width),
                    )
                )
        return parts

    def grad_of_weights(
        self, grads: Sequence[Tensor], wanted: Wanted, rows: SourceRows, keys: Keys, total: Tensor
    ) -> None:
        """Add the weights' gradients slot by slot; a key that several slots read sums theirs."""
        grad = total.new_empty(rows.most_bags, self.width, dtype=torch.float32)
        bounds = rows.kjt_offsets
        fill(grad, self.joined(grads, rows.most_bags), 1.0)
        part, at = self._slots.weight_grad(grad, wanted.ids.ids, wanted.ids.offsets), 0
        for key in self._features.order(keys):
            count = bounds[key + 1] - bounds[key]
            total[bounds[key] : bounds[key + 1]] += part[at : at + count]
            at += count
