"""The output step as pure functions: the packing and joining around each collective, along the
compiled spans.

Pooled. Every rank sends each other rank the rows of that rank's bags, all its slots side by side.
At home, a slot of row block 0 is written to its output columns and later blocks are added, in block
order, so the sum repeats bit for bit. Neighbouring columns are one copy. Sequence. Rows return slot
by slot in the order their ids were sent and are scattered to the home positions of those ids.

A replicated table's rows are taken from this rank's own lookup and cross no wire; its gradient goes
to every replica, in the same order everywhere, so that all make the same update. Costs one copy on
either side. Where a rank's message to itself is kept apart, it crosses no wire either.
"""

# B rows of the home batch, D columns of a collection

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec.comm.exchange import Exchange
from rayrec.distributed.program.groups import LookupGroup, Slot
from rayrec.distributed.program.slots import RankSlots, Sizes
from rayrec.distributed.program.spans import CombinePlan, Span, cut_spans
from rayrec.distributed.steps.route import RoutedIds, SendPlan


def pack_rows(
    mine: RankSlots,
    rows: Sequence[Tensor],
    got: Sequence[Sizes],
    exchange: Exchange,
    own: int | None,
    device: torch.device,
) -> tuple[Tensor, Tensor | None]:
    """What leaves in the forward pass, flat, per destination: its pooled rows, then the rows of its
    sequence ids.

    Args:
        rows: per group of this rank, the kernel's output: (bags of all ranks, width), sequences
            (ids of all ranks, width).
        own: this rank, where its message to itself is kept apart.
        device: where the messages lie, also those of a rank that has no rows.
    Returns:
        The messages one after the other, and the one kept apart.
    """
    found = {group.key: r for group, r in zip(mine.exchanged, rows, strict=True)}
    sequences = [(group, found[group.key]) for group in mine.sequences if not group.key.replicated]
    matrices = [
        _side_by_side([found[group.key] for group in matrix.groups]) for matrix in mine.matrices
    ]
    if own is None and not sequences and len(matrices) == 1:
        return matrices[0].view(-1), None
    messages: list[list[Tensor]] = []
    at, ats = [0] * len(matrices), [0] * len(sequences)
    for sizes in got:
        views = []
        for i, matrix in enumerate(mine.matrices):
            count = matrix.rows(sizes)
            views.append(matrices[i][at[i] : at[i] + count].view(-1))
            at[i] += count
        for i, (group, r) in enumerate(sequences):
            count = sum(sizes.ids[slot.piece] for slot in group.slots)
            views.append(r[ats[i] : ats[i] + count].reshape(-1))
            ats[i] += count
        messages.append(views)
    kept = None if own is None else messages.pop(own)
    flat = [view for views in messages for view in views]
    like = matrices[0] if matrices else rows[0] if rows else torch.empty(0, device=device)
    send = exchange.buffer(sum(v.numel() for v in flat), like)
    if flat:
        torch.cat(flat, out=send)
    return send, None if kept is None else kept[0] if len(kept) == 1 else torch.cat(
        kept
    ) if kept else like.new_empty(0)


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts), 1)


@dataclass(frozen=True)
class Arrived:
    """What came home, sorted by owner.

    Attributes:
        pooled: per owner and matrix (rows, width), a view.
        replicated: (rows, width of the replicated groups) of this rank's own lookup.
        sequences: per collection and use index, its slots with their (ids, width) rows.
        hops: per host (rows, two-hop width).
    """

    pooled: list[list[Tensor]]
    replicated: Tensor
    sequences: dict[tuple[int, int], list[tuple[Slot, int, Tensor]]]
    hops: list[Tensor]


def arrive(
    plan: CombinePlan,
    routed: RoutedIds,
    received: Sequence[Tensor],
    rows: Sequence[Tensor],
    hops: list[Tensor],
) -> Arrived:
    """Sort what arrived in the forward pass, with this rank's own replicated rows.

    Args:
        received: from every owner its message for this rank, flat.
        rows: per group of this rank, the kernel's output.
        hops: what arrived by the two-hop route, per host.
    """
    pooled: list[list[Tensor]] = []
    sequences: dict[tuple[int, int], list[tuple[Slot, int, Tensor]]] = {}

    def keep(
        owner: int, groups: Sequence[LookupGroup], sizes: Sizes, values: Tensor, at: int
    ) -> None:
        for group in groups:
            for slot in group.slots:
                count = sizes.ids[slot.piece] * slot.width
                part = values[at : at + count].view(-1, slot.width)
                sequences.setdefault((slot.use.collection, slot.use.index), []).append(
                    (slot, owner, part)
                )
                at += count

    for owner, (theirs, sizes, part) in enumerate(
        zip(plan.slots.ranks, routed.sent, received, strict=True)
    ):
        counts = [matrix.values(sizes) for matrix in theirs.matrices]
        head = sum(counts)
        parts = zip(part[:head].split(counts), theirs.matrices, strict=True) if counts else ()
        pooled.append([values.view(matrix.rows(sizes), matrix.width) for values, matrix in parts])
        keep(owner, [g for g in theirs.sequences if not g.key.replicated], sizes, part, head)
    mine, own = plan.slots.ranks[plan.rank], routed.sent[plan.rank]
    replicas = [
        r
        for group, r in zip(mine.exchanged, rows, strict=True)
        if group.key.replicated and not group.key.sequence
    ]
    first, bags = (
        sum(mine.replicas.rows(sizes) for sizes in routed.got[: plan.rank]),
        mine.replicas.rows(own),
    )
    replicas = [r[first : first + bags] for r in replicas]
    for group, r in zip(mine.exchanged, rows, strict=True):
        if group.key.replicated and group.key.sequence:
            before = sum(
                sizes.ids[slot.piece] for sizes in routed.got[: plan.rank] for slot in group.slots
            )
            keep(plan.rank, [group], own, r.reshape(-1), before * group.key.width)
    replicated = torch.cat(replicas, 1) if replicas else received[0].new_empty(bags, 0)
    return Arrived(pooled, replicated, sequences, hops)


def view_of(arrived: Arrived, span: Span) -> Tensor:
    """The columns of a span as they came."""
    if span.hop:
        return arrived.hops[span.owner][:, span.source : span.source + span.width]
    found = arrived.replicated if span.replicated else arrived.pooled[span.owner][span.matrix]
    return found[:, span.source : span.source + span.width]


def join_pooled(plan: CombinePlan, arrived: Arrived, collection: int) -> Tensor:
    """(B, D): sum row blocks and join column blocks of a batch whose keys all have B bags, of which
    all came.
    """
    if collection in plan.joins:
        of_owners = zip(plan.slots.ranks, arrived.pooled, strict=True)
        return plan.joins[collection](
            torch.cat(
                [parts[0] for mine, parts in of_owners if parts and not mine.matrices[0].compact], 1
            )
        )
    output = torch.cat([view_of(arrived, span) for span in plan.writes[collection]], 1)
    for span in plan.adds:
        if span.collection == collection:
            output[:, span.column : span.column + span.width].add_(view_of(arrived, span))
    return output


def join_varying(
    plan: CombinePlan, arrived: Arrived, collection: int, bags: Mapping[str, int]
) -> list[Tensor]:
    """Per use (bags of its feature, width): the same where keys have different numbers of bags."""
    outputs = []
    for use in plan.slots.uses[collection]:
        count = bags[use.feature]
        parts = [view_of(arrived, cut)[:count] for cut in cut_spans(plan.writes[collection], use)]
        output = torch.cat(parts, 1)
        for cut in cut_spans([s for s in plan.adds if s.collection == collection], use):
            at = cut.column - use.column
            output[:, at : at + cut.width].add_(view_of(arrived, cut)[:count])
        outputs.append(output)
    return outputs


def join_sequence(
    plan: CombinePlan, routed: RoutedIds, send: SendPlan, arrived: Arrived, collection: int
) -> list[Tensor]:
    """Per use (ids of its feature, width): rows at the home positions of their ids, column blocks
    joined.
    """
    outputs = []
    bounds = routed.source.kjt_offsets
    for use in plan.slots.uses[collection]:
        key = send.keys.index(use.feature)
        output = None
        for slot, owner, rows in arrived.sequences[collection, use.index]:
            home = sequence_home(routed, send, owner, slot)
            if home is None and slot.width == use.width:
                # the exchange only lends what it brings
                output = rows if owner == plan.rank else rows.clone()
                break
            if output is None:
                output = rows.new_empty(bounds[key + 1] - bounds[key], use.width)
            columns = output[:, slot.shard.cols.start : slot.shard.cols.stop]
            if home is None:
                columns.copy_(rows)
            else:
                columns[home - bounds[key]] = rows
        assert output is not None
        outputs.append(output)
    return outputs


def sequence_home(routed: RoutedIds, send: SendPlan, owner: int, slot: Slot) -> Tensor | None:
    """Positions in the KJT of the ids that were sent for a slot, or None when they are all of their
    feature's, in order.
    """
    row = send.messages[owner].rows[slot.piece]
    for part in routed.source.parts:
        if row < len(part.counts):
            start = sum(part.counts[:row])
            return None if part.origin is None else part.origin[start : start + part.counts[row]]
        row -= len(part.counts)
    raise AssertionError(f"source row {row} does not exist")
