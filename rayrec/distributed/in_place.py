"""Tables in memory that all ranks share are read in place: rows do not travel, gradients travel once.

Every rank looks up its own bags in all tables of a collection by one kernel, whoever owns them, straight into the output. In the backward
pass it writes the gradient of that output, scaled, into memory that all ranks read, once; after one wait every owner updates its rows from
there, with the ids that it was sent in the input exchange. So all plans cost the same at home, a bag's sum is that of the unsharded
table whatever cuts its rows, and a step waits twice: for ids, when all have updated the rows of the step before, and for gradients, when
all have read those of this one.

For CPU ranks of one host and for pooled float32 tables with row-wise Adagrad; see `EngineOptions.share_tables`.
"""

# B rows of the home batch, D columns of a collection, N ids, R rows of all ranks' batches

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayrec.comm.exchange import Exchange
from rayrec.comm.pages import make_huge
from rayrec.distributed.bucketize import SourceRows
from rayrec.distributed.cpu_lookup import SlotRows
from rayrec.distributed.group_lookup import GroupLookup
from rayrec.distributed.route import GroupIds, RoutedIds, bag_offsets
from rayrec.distributed.slots import CollectionSpec, Use
from rayrec.distributed.table_space import TableSpace
from rayrec.distributed.timing import StepTimer, span
from rayrec.distributed.workers import Workers
from rayrec.sparse.ops import gather_segments, offsets_of

_LEAST_BYTES = 1 << 20


class HomeLookup:
    """One collection as a rank reads it for its own bags.

    Args:
        spec: of the collection.
        uses: of the collection.
        space: where its tables lie.
        rank: whose copies of replicated tables are read.
        workers: share the work.
    """

    def __init__(self, spec: CollectionSpec, uses: Sequence[Use], space: TableSpace, rank: int, workers: Workers) -> None:
        self.weighted, self.uses, self.width = spec.weighted, tuple(uses), sum(use.width for use in uses)
        blocks = [(use, *block) for use in uses for block in space.column_blocks(use.table, rank)]
        rows = {table.name: table.num_embeddings for table in spec.tables}
        bounds = offsets_of(rows[use.table] for use, _, _ in blocks)
        self.slots = SlotRows(space.rows, [start for _, start, _ in blocks], bounds, [width for _, _, width in blocks], workers)
        self._features = [use.feature for use, _, _ in blocks]
        self._orders: dict[tuple[str, ...], tuple[int, ...]] = {}

    def order(self, keys: tuple[str, ...]) -> tuple[int, ...]:
        """Per slot the key that it reads."""
        if keys not in self._orders:
            where = {key: i for i, key in enumerate(keys)}
            self._orders[keys] = tuple(where[feature] for feature in self._features)
        return self._orders[keys]

    def bags(self, rows: SourceRows, keys: tuple[str, ...]) -> GroupIds:
        """The bags of every slot one after the other, those of keys with fewer bags than others padded by empty ones."""
        order, part, most = self.order(keys), rows.parts[0], rows.most_bags
        if len(set(part.bags)) > 1:
            none = part.lengths.new_zeros(most)
            bags = part.lengths.split(part.bags)
            lengths = torch.cat([piece for key in order for piece in (bags[key], none[part.bags[key] :])])
        elif order == tuple(range(len(keys))):
            return GroupIds(part.ids, bag_offsets(part.lengths), part.weights if self.weighted else None)
        else:
            lengths = gather_segments(part.lengths, offsets_of(part.bags), order)
        weights = None
        if self.weighted:
            assert part.weights is not None
            weights = gather_segments(part.weights, rows.kjt_offsets, order)
        return GroupIds(gather_segments(part.ids, rows.kjt_offsets, order), bag_offsets(lengths), weights)


@dataclass(frozen=True)
class InPlaceStep:
    """What both directions of one step need.

    Attributes:
        homes: the collections that are read in place.
        updates: this rank's shards of each collection.
        bags: feature -> bags, when they differ by feature; empty when all have the same.
        gradients: where they are handed over.
    """

    homes: Mapping[int, HomeLookup]
    updates: Sequence[GroupLookup]
    keys: tuple[str, ...]
    routed: RoutedIds
    bags: Mapping[str, int]
    exchange: Exchange
    gradients: SharedGradients
    timer: StepTimer | None

    def by_collection(self, outputs: Sequence[Tensor]) -> dict[int, tuple[Tensor, ...]]:
        """The outputs of `ReadInPlace`, collection by collection."""
        flow = iter(outputs)
        return {c: tuple(next(flow) for _ in range(len(home.uses) if self.bags else 1)) for c, home in self.homes.items()}


class SharedGradients:
    """Memory for the gradients of one step of all ranks, which grows to the largest and is used again.

    Attributes:
        free: whether every rank has read those of the last step.
    """

    def __init__(self) -> None:
        self.free = True
        self._memory = torch.empty(0)

    def matrices(self, rows: int, widths: Sequence[int], exchange: Exchange) -> list[Tensor]:
        """(rows, width) each, of all ranks; contents are those of a former step. All ranks call it together."""
        sizes = [rows * width for width in widths]
        if self._memory.numel() < sum(sizes):
            memory = exchange.share(max(_LEAST_BYTES, 1 << (4 * sum(sizes) - 1).bit_length()))
            assert memory is not None, "tables are shared"
            make_huge(memory)
            self._memory = memory.view(torch.float32)
        parts = self._memory[: sum(sizes)].split(sizes)
        return [part.view(rows, width) for part, width in zip(parts, widths, strict=True)]


class ReadInPlace(torch.autograd.Function):
    """Rows of all collections that are read in place: per collection one (B, D) matrix, or where keys have different numbers of bags one
    (bags, width) per use. `weights` are those of the KJT, for their gradient."""

    @staticmethod
    def forward(ctx: Any, step: InPlaceStep, anchor: Tensor, weights: Tensor | None) -> tuple[Tensor, ...]:
        """Look up the bags of this rank."""
        ctx.step, ctx.found, ctx.like = step, [], weights
        outputs: list[Tensor] = []
        for home in step.homes.values():
            with span(step.timer, "input"):
                ids = home.bags(step.routed.source, step.keys)
            with span(step.timer, "lookup"), home.slots.workers.alone():
                output = home.slots.look_up(ids.ids, ids.offsets, ids.weights)
            ctx.found.append(ids)
            if step.bags:
                outputs.extend(output[: step.bags[use.feature], use.column : use.column + use.width].clone() for use in home.uses)
            else:
                outputs.append(output)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Hand over the gradients of this rank's outputs and update its rows with those of all ranks."""
        step: InPlaceStep = ctx.step
        with span(step.timer, "gradient"):
            flow, homes = iter(grads), list(step.homes.values())
            mine = [_joined(step, home, flow) for home in homes]
            of_weights = _grad_of_weights(step, ctx.found, mine, ctx.like) if ctx.needs_input_grad[2] else None
            whole = _hand_over(step, mine)
        with span(step.timer, "update"):
            found = dict(zip(step.homes, whole, strict=True))
            for lookup in step.updates:
                lookup.update_in_place(found[lookup.group.key.collection], step.routed.groups[lookup.group.key])
        step.gradients.free = step.exchange.world_size == 1
        return None, grads[0].new_empty(0), of_weights


def _joined(step: InPlaceStep, home: HomeLookup, grads: Any) -> Tensor:
    """(B, D): the gradient of one collection's output; that of padded bags is 0."""
    if not step.bags:
        grad: Tensor = next(grads)
        return grad
    parts = [next(grads) for _ in home.uses]
    joined = parts[0].new_zeros(step.routed.source.most_bags, home.width)
    for use, part in zip(home.uses, parts, strict=True):
        joined[: part.shape[0], use.column : use.column + use.width] = part
    return joined


def _hand_over(step: InPlaceStep, mine: Sequence[Tensor]) -> list[Tensor]:
    """Per collection (R, D): the gradients of all ranks, divided by their number; the one wait of the backward pass."""
    exchange = step.exchange
    if exchange.world_size == 1:
        return [grad.contiguous() for grad in mine]
    if not step.gradients.free:
        exchange.meet()
    rows = [sizes.rows for sizes in step.routed.got]
    whole = step.gradients.matrices(sum(rows), [home.width for home in step.homes.values()], exchange)
    first = sum(rows[: exchange.rank])
    for grad, matrix in zip(mine, whole, strict=True):
        _put_scaled(grad, 1.0 / exchange.world_size, matrix[first : first + rows[exchange.rank]])
    exchange.meet()
    return whole


def _put_scaled(grad: Tensor, scale: float, out: Tensor) -> None:
    """out = grad * scale, in one pass; a product that repeats one number, as the gradient of a sum does, would not be vectorized."""
    if 0 in grad.stride() and grad.numel():
        once = grad[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in grad.stride())]
        out.copy_((once * scale).expand_as(out))
    else:
        torch.mul(grad, scale, out=out)


def _grad_of_weights(step: InPlaceStep, found: Sequence[GroupIds], mine: Sequence[Tensor], like: Tensor) -> Tensor:
    """(N,): of the KJT's weights, before any row changes."""
    total, bounds = torch.zeros_like(like), step.routed.source.kjt_offsets
    for home, ids, grad in zip(step.homes.values(), found, mine, strict=True):
        if not home.weighted:
            continue
        part, at = home.slots.weight_grad(grad.contiguous(), ids.ids, ids.offsets), 0
        for key in home.order(step.keys):
            count = bounds[key + 1] - bounds[key]
            total[bounds[key] : bounds[key + 1]] += part[at : at + count]
            at += count
    return total
