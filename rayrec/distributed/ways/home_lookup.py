"""Collections that are read in place, as a rank reads them for its own batch.

Every rank maps the rows of all shards (`TableSpace`). So the forward pass is a local lookup of the
ids of this rank's KJT, and no row travels. For the backward pass `joined` says where the gradients
of this rank's outputs belong in a matrix that the owners of the rows read (`in_place`).
"""

# B rows of the home batch, D columns of a collection, N ids

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rayrec.distributed.kernels.ids import GroupIds, bag_offsets
from rayrec.distributed.kernels.slot_rows import SlotRows, take_rows
from rayrec.distributed.kernels.table_space import TableSpace
from rayrec.distributed.kernels.workers import Workers
from rayrec.distributed.program.groups import CollectionSpec, Use
from rayrec.distributed.steps.source_rows import SourceRows
from rayrec.sparse.ops import gather_segments, offsets_of

Keys = tuple[str, ...]


class Wanted(NamedTuple):
    """What is to be looked up.

    Attributes:
        ids: the bags of every slot of a pooled collection; one bag per id of a sequence.
        counts: how many ids each use of a sequence has; empty for a pooled collection.
    """

    ids: GroupIds
    counts: list[int]


class Home(Protocol):
    """One collection, for all its uses.

    Attributes:
        uses: the uses of the collection, in output order.
        width: D, the columns of the matrix that its gradients make.
        weighted: whether ids have weights.
    """

    uses: tuple[Use, ...]
    width: int
    weighted: bool

    def wanted(self, rows: SourceRows, keys: Keys) -> Wanted:
        """Return what is to be looked up of a batch with these keys."""
        ...

    def look_up(self, wanted: Wanted, bags: Mapping[str, int]) -> list[Tensor]:
        """Return the outputs; `bags` has the bags of every feature, if they differ."""
        ...

    def joined(self, grads: Sequence[Tensor], most_bags: int) -> list[tuple[int, int, Tensor]]:
        """Return the gradients of the outputs as parts of one matrix of D columns.

        Args:
            grads: per output, (bags or ids, its columns).
            most_bags: the rows of the matrix of a pooled collection.
        Returns:
            (first row, first column, values) of each part; the parts cover the matrix.
        """
        ...

    def grad_of_weights(
        self, grads: Sequence[Tensor], wanted: Wanted, rows: SourceRows, keys: Keys, total: Tensor
    ) -> None:
        """Add the gradient of the KJT's weights to `total`, (N,) in the order of the KJT."""
        ...


class _Features:
    """Which key each slot reads."""

    def __init__(self, features: Sequence[str]) -> None:
        self._features = features
        self._orders: dict[Keys, tuple[int, ...]] = {}

    def order(self, keys: Keys) -> tuple[int, ...]:
        if keys not in self._orders:
            where = {key: i for i, key in enumerate(keys)}
            self._orders[keys] = tuple(where[feature] for feature in self._features)
        return self._orders[keys]


class HomeLookup:
    """A pooled collection: one kernel over all its tables writes the output.

    Args:
        spec: the collection.
        uses: its uses, in output order.
        space: where its tables lie.
        rank: whose copies of replicated tables are read.
        workers: share the work.
    """

    def __init__(
        self,
        spec: CollectionSpec,
        uses: Sequence[Use],
        space: TableSpace,
        rank: int,
        workers: Workers,
    ) -> None:
        self.weighted, self.uses, self.width = (
            spec.weighted,
            tuple(uses),
            sum(use.width for use in uses),
        )
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
        self._features = _Features([use.feature for use, _, _ in blocks])

    def wanted(self, rows: SourceRows, keys: Keys) -> Wanted:
        """Return the bags of every slot, slot by slot: as many of each, ids local to its table.

        Keys with fewer bags than others are padded by empty ones.
        """
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
                    rows.bag_offsets.to(torch.int64),
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
        """See `Home`: one (B, D) gradient, or one per use where keys have different bags."""
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
        """See `Home`: ids come slot by slot, and a key that several slots read sums their parts."""
        grad, bounds = (
            total.new_empty(rows.most_bags, self.width, dtype=torch.float32),
            rows.kjt_offsets,
        )
        fill(grad, self.joined(grads, rows.most_bags), 1.0)
        part, at = self._slots.weight_grad(grad, wanted.ids.ids, wanted.ids.offsets), 0
        for key in self._features.order(keys):
            count = bounds[key + 1] - bounds[key]
            total[bounds[key] : bounds[key + 1]] += part[at : at + count]
            at += count


class HomeSequence:
    """A sequence collection: every id is a bag of its own. Arguments as of `HomeLookup`."""

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
        self._features = _Features([use.feature for use in uses])
        self._blocks = [space.column_blocks(use.table, rank) for use in uses]
        self._uncut = all(len(blocks) == 1 for blocks in self._blocks)
        # the row at which each table begins, if all memory is seen as one table of this width
        self._firsts = torch.tensor([blocks[0][0] // blocks[0][1] for blocks in self._blocks])
        self._space = space
        table = space.as_table(self.width)
        self._whole = SlotRows(table.view(-1), [0], [0, table.shape[0]], [self.width], workers)

    def wanted(self, rows: SourceRows, keys: Keys) -> Wanted:
        """Return the ids of every use, use by use, and how many each has.

        Where no table is cut by columns, an id is a row of all memory seen as one table of this
        width, so that one gather reads all tables. Elsewhere ids stay rows of their tables.
        """
        order, part = self._features.order(keys), rows.parts[0]
        ids, counts = (
            gather_segments(part.ids, rows.kjt_offsets, order),
            [part.counts[key] for key in order],
        )
        if self._uncut:
            ids = ids + self._firsts.repeat_interleave(
                torch.tensor(counts), output_size=ids.numel()
            )
        return Wanted(GroupIds(ids, torch.arange(ids.numel() + 1), None), counts)

    def look_up(self, wanted: Wanted, bags: Mapping[str, int]) -> list[Tensor]:
        """Return per use (ids, D)."""
        ids, counts = wanted.ids, wanted.counts
        with self._workers.alone():
            if not self._uncut:
                return [
                    self._columns(blocks, part)
                    for blocks, part in zip(self._blocks, ids.ids.split(counts), strict=True)
                ]
            # a gather can write in place, FBGEMM's kernel is quicker alone
            if self._workers.threads > 1:
                found = take_rows(self._space.as_table(self.width), ids.ids, self._workers)
            else:
                found = self._whole.look_up(ids.ids, ids.offsets, None)
        return list(found.split(counts))

    def _columns(self, blocks: Sequence[tuple[int, int]], ids: Tensor) -> Tensor:
        tables = [(self._space.as_table(width), start // width) for start, width in blocks]
        return torch.cat(
            [take_rows(table, ids + first, self._workers) for table, first in tables], 1
        )

    def joined(self, grads: Sequence[Tensor], most_bags: int) -> list[tuple[int, int, Tensor]]:
        """See `Home.joined`: below each other."""
        firsts = offsets_of(grad.shape[0] for grad in grads)
        return [(first, 0, grad) for first, grad in zip(firsts, grads, strict=False)]

    def grad_of_weights(
        self, grads: Sequence[Tensor], wanted: Wanted, rows: SourceRows, keys: Keys, total: Tensor
    ) -> None:
        """There are none."""


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
