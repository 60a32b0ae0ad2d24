"""The output step: pooled rows go home, where row blocks are summed and column blocks joined; gradients take the way back.

Forward: every rank sends each other rank the rows of that rank's bags, all its slots side by side. At home, a slot of row block 0 is
written to its output columns and later blocks are added, in block order, so the sum repeats bit for bit. Neighbouring columns are one
copy. A replicated table's rows are taken from this rank's own lookup and cross no wire.

Backward: each owner is sent the gradient of the columns it looked up, replicas included: every replica sees the gradient of every rank,
in the same order, and makes the same update. Gradients arrive summed over ranks, while dense gradients are averaged: the one division
by the number of ranks happens here (`_scale`).

Costs one copy on either side and one collective per direction. With a single sharded group the kernel's output is sent as it is.
"""

# B local batch, W ranks, D output columns

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rayrec.comm.exchange import Exchange
from rayrec.distributed.slots import RankSlots, SlotTable
from rayrec.errors import ShapeError


@dataclass(frozen=True)
class Span:
    """`width` columns of one owner's buffer that are neighbours in one collection's output, too."""

    owner: int
    source: int  # first column in the owner's buffer
    collection: int
    column: int  # first output column
    width: int
    replicated: bool  # behind the exchanged columns: read from this rank's own lookup, sent back to every owner


@dataclass(frozen=True)
class CombinePlan:
    """Where every column goes, compiled once from the slot table for one home rank.

    Attributes:
        writes: per collection, spans that tile its output columns in order (row block 0 and replicated tables).
        adds: spans of later row blocks, in block order.
        sends_back: per owner, the spans of its gradient buffer in column order; of replicated tables every owner's.
    """

    slots: SlotTable
    rank: int
    writes: dict[int, tuple[Span, ...]]
    adds: tuple[Span, ...]
    sends_back: tuple[tuple[Span, ...], ...]


def plan_combine(slots: SlotTable, rank: int) -> CombinePlan:
    """Compile the output step of `rank`."""
    writes: dict[int, list[Span]] = {c: [] for c in slots.collections}
    adds: dict[int, list[Span]] = {}
    back: list[tuple[Span, ...]] = []
    for owner, mine in enumerate(slots.ranks):
        spans = _spans(owner, mine)
        back.append(_merge([span for _, span in spans]))
        for block, span in spans:
            if span.replicated and owner != rank:
                continue
            (writes[span.collection] if block == 0 else adds.setdefault(block, [])).append(span)
    ordered = {c: _merge(sorted(spans, key=lambda s: s.column)) for c, spans in writes.items()}
    assert {c: sum(s.width for s in spans) for c, spans in ordered.items()} == slots.widths, "row blocks 0 must tile the output"
    added = [span for block in sorted(adds) for span in _merge(adds[block])]
    return CombinePlan(slots, rank, ordered, tuple(added), tuple(back))


def _spans(owner: int, mine: RankSlots) -> list[tuple[int, Span]]:
    found = []
    at = 0
    for group in mine.groups:
        for slot in group.slots:
            found.append((slot.block, Span(owner, at, slot.use.collection, slot.column, slot.width, group.key.replicated)))
            at += slot.width
    return found


def _merge(spans: Sequence[Span]) -> tuple[Span, ...]:
    merged: list[Span] = []
    for s in spans:
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.owner, last.collection, last.replicated) == (s.owner, s.collection, s.replicated)
            and last.source + last.width == s.source
            and last.column + last.width == s.column
        ):
            merged[-1] = replace(last, width=last.width + s.width)
        else:
            merged.append(s)
    return tuple(merged)


def pack_rows(mine: RankSlots, rows: Sequence[Tensor]) -> Tensor:
    """(bags of all ranks * exchanged width,): the sharded groups side by side, bags in rank order; a view when there is one group."""
    sharded = [r for group, r in zip(mine.groups, rows, strict=True) if not group.key.replicated]
    if not sharded:
        return rows[0].new_empty(0) if rows else torch.empty(0)
    return (sharded[0] if len(sharded) == 1 else torch.cat(sharded, 1)).contiguous().view(-1)


def join_rows(plan: CombinePlan, received: Tensor, own: Sequence[Tensor], batch_size: int) -> list[Tensor]:
    """Sum row blocks and join column blocks.

    Args:
        received: flat, from every owner its (B, exchanged width) rows of this rank's bags, in rank order.
        own: this rank's groups' rows of its own bags, (B, group width) each, replicated ones included.
        batch_size: B.
    Returns:
        Per collection (B, D), in the slot table's order.
    Raises:
        ShapeError: the sizes do not fit the slot table: the ranks compiled different plans.
    """
    widths = [r.exchanged_width for r in plan.slots.ranks]
    if received.numel() != batch_size * sum(widths):
        raise ShapeError(
            f"rank {plan.rank} received {received.numel()} values for {batch_size} bags of {sum(widths)} columns: "
            "the ranks do not share one plan."
        )
    buffers = [part.view(batch_size, width) for part, width in zip(received.split([batch_size * w for w in widths]), widths, strict=True)]

    def view(span: Span) -> Tensor:
        if span.replicated:
            first = span.source - widths[span.owner]
            return replicated[:, first : first + span.width]
        return buffers[span.owner][:, span.source : span.source + span.width]

    replicas = [r for group, r in zip(plan.slots.ranks[plan.rank].groups, own, strict=True) if group.key.replicated]
    replicated = replicas[0] if len(replicas) == 1 else torch.cat(replicas, 1) if replicas else received.new_empty(batch_size, 0)
    outputs = {}
    for collection, spans in plan.writes.items():
        outputs[collection] = torch.cat([view(span) for span in spans], 1)
    for span in plan.adds:
        outputs[span.collection][:, span.column : span.column + span.width].add_(view(span))
    return [outputs[c] for c in plan.slots.collections]


def pack_grads(plan: CombinePlan, grads: dict[int, Tensor], batch_size: int) -> Tensor:
    """Flat: to every owner the (B, width) gradient of all columns it looked up, in rank order."""
    like = next(iter(grads.values()))
    flat = like.new_empty(batch_size * sum(r.width for r in plan.slots.ranks))
    at = 0
    for mine, spans in zip(plan.slots.ranks, plan.sends_back, strict=True):
        size = batch_size * mine.width
        if size:
            views = [grads[s.collection][:, s.column : s.column + s.width] for s in spans]
            torch.cat(views, 1, out=flat[at : at + size].view(batch_size, mine.width))
        at += size
    return flat


def _scale(grads: Tensor, world_size: int) -> Tensor:
    """The one division by the number of ranks: with it, summed sparse gradients match DDP's averaged dense ones."""
    return grads.mul_(1.0 / world_size) if world_size > 1 else grads


class Combine(torch.autograd.Function):
    """The output exchange of one step as a differentiable function.

    Every rank calls it in every step, also one without slots: `anchor` keeps it in the graph there, since all ranks must enter the
    backward's collective.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: CombinePlan, exchange: Exchange, batch_sizes: tuple[int, ...], anchor: Tensor, *rows: Tensor
    ) -> tuple[Tensor, ...]:
        """Exchange the rows; see `join_rows`."""
        mine, rank = plan.slots.ranks[plan.rank], plan.rank
        ctx.plan, ctx.exchange, ctx.batch_sizes = plan, exchange, batch_sizes
        batch, first = batch_sizes[rank], sum(batch_sizes[:rank])
        send = pack_rows(mine, rows) if rows else anchor.new_empty(0)
        width_out, widths_in = mine.exchanged_width, [r.exchanged_width for r in plan.slots.ranks]
        received = exchange.all_to_all(send, [b * width_out for b in batch_sizes], [batch * w for w in widths_in]).wait()
        return tuple(join_rows(plan, received, [r[first : first + batch] for r in rows], batch))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Send the gradients to the owners; see `pack_grads`."""
        plan: CombinePlan = ctx.plan
        sizes: tuple[int, ...] = ctx.batch_sizes
        batch, mine = sizes[plan.rank], plan.slots.ranks[plan.rank]
        send = pack_grads(plan, dict(zip(plan.slots.collections, grads, strict=True)), batch)
        received = ctx.exchange.all_to_all(send, [batch * r.width for r in plan.slots.ranks], [b * mine.width for b in sizes]).wait()
        columns = _scale(received, len(sizes)).view(sum(sizes), mine.width)
        return None, None, None, None, *columns.split([group.width for group in mine.groups], 1)
