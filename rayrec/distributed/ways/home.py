"""Collections that are read in place, as a rank reads them for its batch.

Every rank maps the rows of all shards (`TableSpace`). So the forward pass is a local lookup of the
ids of this rank's KJT, and no row travels: one kernel over all tables of a pooled collection writes
its output, and one gather reads the rows of all ids of sequences. For the backward pass `joined`
says where the gradients of this rank's outputs belong in a matrix that the owners of the rows read
(`in_place`).
"""

# B rows of the home batch, D columns of a collection, N ids

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rayrec.distributed.kernels.dynamic_ids import without_absent
from rayrec.distributed.kernels.ids import GroupIds, bag_offsets
from rayrec.distributed.kernels.slot_rows import SlotRows, take_rows
from rayrec.distributed.kernels.table_space import TableSpace
from rayrec.distributed.kernels.workers import Workers
from rayrec.distributed.program.groups import CollectionSpec, Use
from rayrec.distributed.steps.source_rows import SourceRows
from rayrec.dynamic.id_map import ABSENT
from rayrec.sparse.ops import gather_segments, offsets_of

Keys = tuple[str, ...]


class Wanted(NamedTuple):
    """Ids of a batch that its home rank looks up.

    Attributes:
        ids: the bags of every slot of a pooled collection; one bag per id of a sequence.
        counts: number of ids of each use of a sequence; empty for a pooled collection.
        absent: of a sequence of dynamic tables, (N,) ids without a row; else None.
    """

    ids: GroupIds
    counts: Sequence[int] = ()
    absent: Tensor | None = None


class Home(ABC):
    """One collection, for all its uses.

    Args:
        uses: the uses of the collection, in output order.
        features: features whose ids are looked up, one after the other.
    Attributes:
        width: D, the columns of the matrix that its gradients make.
    """

    width: int

    def __init__(self, uses: Sequence[Use], features: Sequence[str]) -> None:
        self.uses, self._features = tuple(uses), features
        self._orders: dict[Keys, tuple[int, ...]] = {}

    def _order(self, keys: Keys) -> tuple[int, ...]:
        """Return the positions of the features among a batch's keys."""
        if keys not in self._orders:
            where = {key: i for i, key in enumerate(keys)}
            self._orders[keys] = tuple(where[feature] for feature in self._features)
        return self._orders[keys]

    @abstractmethod
    def wanted(self, rows: SourceRows, keys: Keys, of_uses: Sequence[Tensor] = ()) -> Wanted:
        """Return what is to be looked up of a batch with these keys.

        Args:
            of_uses: per use, the rows of its ids, `ABSENT` where one has none; empty where ids are
                rows.
        """

    @abstractmethod
    def look_up(self, wanted: Wanted, bags: Mapping[str, int]) -> list[Tensor]:
        """Return the outputs; `bags` has the bags of every feature, if they differ."""

    @abstractmethod
    def joined(self, grads: Sequence[Tensor], most_bags: int) -> list[tuple[int, int, Tensor]]:
        """Return the gradients of the outputs as parts of one matrix of D columns.

        Args:
            grads: per output, (bags or ids, its columns).
            most_bags: the rows of the matrix of a pooled collection.
        Returns:
            (first row, first column, values) of each part; the parts cover the matrix.
        """


class HomeLookup(Home):
    """A pooled collection.

    Args:
        spec: the collection.
        uses: its uses, in output order.
        space: memory of its tables.
        rank: rank whose copies of replicated tables are read.
        workers: threads that share the work.
    Attributes:
        weighted: True if ids have weights.
    """

    def __init__(
        self,
        spec: CollectionSpec,
        uses: Sequence[Use],
        space: TableSpace,
        rank: int,
        workers: Workers,
    ) -> None:
        blocks = [(use, *block) for use in uses for block in space.column_blocks(use.table, rank)]
        self._slot_uses = [use for use, _, _ in blocks]
        super().__init__(uses, [use.feature for use in self._slot_uses])
        self.width, self.weighted = sum(use.width for use in uses), spec.weighted
        rows = {table.name: table.num_embeddings for table in spec.tables}
        self._slots = SlotRows(
            space.rows,
            [start for _, start, _ in blocks],
            offsets_of(rows[use.table] for use in self._slot_uses),
            [width for _, _, width in blocks],
            workers,
        )

    def wanted(self, rows: SourceRows, keys: Keys, of_uses: Sequence[Tensor] = ()) -> Wanted:
        """Return the bags of every slot, slot by slot: as many of each, ids local to its table.

        Keys with fewer bags than others are padded by empty ones.
        """
        bags = self._bags(rows, keys)
        if of_uses:
            ids = torch.cat([of_uses[use.index] for use in self._slot_uses])
            bags = without_absent(GroupIds(ids, bags.offsets, bags.weights))
        return Wanted(bags)

    def _bags(self, rows: SourceRows, keys: Keys) -> GroupIds:
        order, part, most = self._order(keys), rows.parts[0], rows.most_bags
        if len(set(part.bags)) > 1:
            none = part.lengths.new_zeros(most)
            bags = part.lengths.split(part.bags)
            lengths = torch.cat(
                [piece for key in order for piece in (bags[key], none[part.bags[key] :])]
            )
        elif order == tuple(range(len(keys))):
            offsets = rows.bag_offsets().to(torch.int64)
            return GroupIds(part.ids, offsets, part.weights if self.weighted else None)
        else:
            lengths = gather_segments(part.lengths, offsets_of(part.bags), order)
        weights = None
        if self.weighted:
            assert part.weights is not None
            weights = gather_segments(part.weights, rows.kjt_offsets, order)
        ids = gather_segments(part.ids, rows.kjt_offsets, order)
        return GroupIds(ids, bag_offsets(lengths), weights)

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
            bags = grad.shape[0]
            parts.append((0, use.column, grad))
            if bags < most_bags:
                parts.append((bags, use.column, grad.new_zeros(most_bags - bags, use.width)))
        return parts

    def grad_of_weights(
        self, grads: Sequence[Tensor], wanted: Wanted, rows: SourceRows, keys: Keys, total: Tensor
    ) -> None:
        """Add the gradient of the KJT's weights to `total`, (N,) in the order of the KJT.

        It comes slot by slot; a key that several slots read sums theirs.
        """
        grad = total.new_empty(rows.most_bags, self.width, dtype=torch.float32)
        bounds = rows.kjt_offsets
        fill(grad, self.joined(grads, rows.most_bags), 1.0)
        part, at = self._slots.weight_grad(grad, wanted.ids.ids, wanted.ids.offsets), 0
        for key in self._order(keys):
            count = bounds[key + 1] - bounds[key]
            total[bounds[key] : bounds[key + 1]] += part[at : at + count]
            at += count


class HomeSequence(Home):
    """A sequence collection: every id is a bag of its own. `HomeLookup` has the same arguments."""

    def __init__(
        self,
        spec: CollectionSpec,
        uses: Sequence[Use],
        space: TableSpace,
        rank: int,
        workers: Workers,
    ) -> None:
        super().__init__(uses, [use.feature for use in uses])
        self.width, self._workers, self._space = uses[0].width, workers, space
        self._blocks = [space.column_blocks(use.table, rank) for use in uses]
        self._uncut = all(len(blocks) == 1 for blocks in self._blocks)
        # the row at which each table begins, if all memory is seen as one table of this width
        self._firsts = torch.tensor([blocks[0][0] // blocks[0][1] for blocks in self._blocks])
        table = space.as_table(self.width)
        self._whole = SlotRows(table.view(-1), [0], [0, table.shape[0]], [self.width], workers)

    def wanted(self, rows: SourceRows, keys: Keys, of_uses: Sequence[Tensor] = ()) -> Wanted:
        """Return the ids of every use, use by use, and how many each has.

        Where no table is cut by columns, an id is a row of all memory seen as one table of this
        width, so that one gather reads all tables. Elsewhere ids stay rows of their tables.
        """
        order, part = self._order(keys), rows.parts[0]
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
        ids, counts = wanted.ids, list(wanted.counts)
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


def fill(matrix: Tensor, parts: Sequence[tuple[int, int, Any]], scale: float) -> None:
    """Put the parts of a matrix in place, times `scale`, in one pass."""
    for row, column, part in parts:
        _put_scaled(part, scale, matrix[row : row + part.shape[0], column : column + part.shape[1]])


def _put_scaled(values: Tensor, scale: float, out: Tensor) -> None:
    """Write values * scale to `out`, of the same shape.

    The gradient of a sum is one number that is expanded, with strides of 0, and torch does not
    vectorize its product. So the number itself is scaled and then copied.
    """
    if 0 in values.stride() and values.numel():
        once = values[
            tuple(slice(0, 1) if stride == 0 else slice(None) for stride in values.stride())
        ]
        out.copy_((once * scale).expand_as(out))
    else:
        torch.mul(values, scale, out=out)
