"""The output step backwards as pure functions: gradients of outputs sorted by the owners of their
columns, and what arrived by kernel.

The reverse of `combine`, along the same compiled spans. Gradients are scaled in the pass that moves
them.
"""

# B rows of the home batch, D columns of a collection

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec.comm.exchange import Exchange
from rayrec.distributed.program.gather import BlockGather
from rayrec.distributed.program.slots import RankSlots, Sizes
from rayrec.distributed.program.spans import CombinePlan, Span, cut_spans
from rayrec.distributed.steps.combine import sequence_home
from rayrec.distributed.steps.compact import Places
from rayrec.distributed.steps.route import RoutedIds, SendPlan

_WIDE = 256  # columns


@dataclass(frozen=True)
class HomeGrads:
    """Gradients of the outputs of one step at home.

    Attributes:
        pooled: collection -> (B, D).
        uses: (collection, use index) -> (bags or ids of its feature, width), of varying and
            sequence collections.
        bags: feature -> bags, where keys vary.
    """

    pooled: dict[int, Tensor]
    uses: dict[tuple[int, int], Tensor]
    bags: Mapping[str, int]


@dataclass(frozen=True)
class SentGrads:
    """What leaves in the backward pass.

    Attributes:
        flat: per owner one message: the gradient of all columns it pooled, then of its sequence
            rows.
        kept: this rank's message to itself, where that is kept apart.
        matrix: (bags or ids of all ranks, width), where all messages are rows of it; `kept` is
            already in its place.
    """

    flat: Tensor
    kept: Tensor | None
    matrix: Tensor | None


def pack_grads(
    plan: CombinePlan,
    routed: RoutedIds,
    send: SendPlan,
    grads: HomeGrads,
    like: Tensor,
    exchange: Exchange,
    own: int | None,
    scale: float,
    places: Mapping[tuple[int, int], Places],
) -> SentGrads:
    """Sort the gradients of this rank's outputs by owner, times `scale`.

    Args:
        places: owner and matrix -> where its rows belong, where bags without ids stayed at home.
        own: this rank, where its message to itself is kept apart.
    """
    ranks = plan.slots.ranks
    sizes = [mine.grads_in(s) for mine, s in zip(ranks, routed.sent, strict=True)]
    counts = [0 if owner == own else sum(size) for owner, size in enumerate(sizes)]
    flat = exchange.buffer(sum(counts), like)
    buffers = list(flat.split(counts))
    kept = matrix = None
    if own is not None:
        mine = ranks[own]
        rows = _rows_of_one_group(mine, routed.got)
        if rows is not None:
            matrix = like.new_empty(
                sum(rows), mine.matrices[0].width if mine.matrices else mine.sequences[0].key.width
            )
            before = sum(rows[:own])
            kept = matrix[before : before + rows[own]].view(-1)
        else:
            kept = like.new_empty(sum(sizes[own]))
        buffers[own] = kept
    for owner, (mine, sent, buffer) in enumerate(zip(ranks, routed.sent, buffers, strict=True)):
        at = 0
        gathers = (*plan.cuts[owner], None)
        for i, of in enumerate((*mine.matrices, mine.replicas)):
            count = of.values(sent)
            if count:
                into, place = buffer[at : at + count].view(-1, of.width), places.get((owner, i))
                if place is not None:
                    place.take(grads.pooled[plan.sends_back[owner][i][0].collection], into, scale)
                else:
                    _write_grads(plan, plan.sends_back[owner][i], grads, into, scale, gathers[i])
            at += count
        for group in mine.sequences:
            for slot in group.slots:
                count = sent.ids[slot.piece] * slot.width
                grad = grads.uses[slot.use.collection, slot.use.index][
                    :, slot.shard.cols.start : slot.shard.cols.stop
                ]
                home = sequence_home(routed, send, owner, slot)
                if home is not None:
                    grad = grad[home - routed.source.kjt_offsets[send.keys.index(slot.use.feature)]]
                torch.mul(grad, scale, out=buffer[at : at + count].view(-1, slot.width))
                at += count
    return SentGrads(flat, kept, matrix)


def _rows_of_one_group(mine: RankSlots, got: Sequence[Sizes]) -> list[int] | None:
    """From every rank the rows of its message, where all messages are rows of one matrix; else
    None.
    """
    if len(mine.matrices) == 1 and not mine.replicas.groups and not mine.sequences:
        return [mine.matrices[0].rows(sizes) for sizes in got]
    if not mine.pooled and len(mine.sequences) == 1:
        return [sum(sizes.ids[slot.piece] for slot in mine.sequences[0].slots) for sizes in got]
    return None


def pack_hop_grads(
    plan: CombinePlan, shapes: Sequence[tuple[int, int]], grads: HomeGrads, like: Tensor
) -> list[Tensor]:
    """Per host (rows, two-hop width): the gradient of the columns it summed."""
    found = [like.new_empty(shape) for shape in shapes]
    for spans, matrix in zip(plan.hops_back, found, strict=True):
        if matrix.numel():
            _write_grads(plan, spans, grads, matrix, 1.0)
    return found


def _write_grads(
    plan: CombinePlan,
    spans: Sequence[Span],
    grads: HomeGrads,
    matrix: Tensor,
    scale: float,
    gather: BlockGather | None = None,
) -> None:
    """Fill the (rows, columns of all spans) matrix with the gradient of its columns, times `scale`."""
    if len(grads.pooled) == len(plan.slots.widths):
        parts = [grads.pooled[s.collection][:, s.column : s.column + s.width] for s in spans]
        if gather is None and scale != 1.0 and matrix.shape[1] >= _WIDE * len(spans):
            # one pass, where rows are long enough for it
            for span, part in zip(spans, parts, strict=True):
                torch.mul(part, scale, out=matrix[:, span.source : span.source + span.width])
            return
        if gather is not None:
            gather(grads.pooled[spans[0].collection], matrix)
        else:
            torch.cat(parts, 1, out=matrix)
        if scale != 1.0:
            matrix.mul_(scale)
        return
    matrix.zero_()  # padded bags have no gradient
    for span in spans:
        for use in plan.slots.uses[span.collection]:
            for cut in cut_spans([span], use):
                grad = grads.uses[span.collection, use.index]
                at = cut.column - use.column
                torch.mul(
                    grad[:, at : at + cut.width],
                    scale,
                    out=matrix[: grad.shape[0], cut.source : cut.source + cut.width],
                )


def split_grads(
    mine: RankSlots,
    messages: Sequence[Tensor],
    got: Sequence[Sizes],
    scale: float,
    matrix: Tensor | None = None,
) -> list[Tensor]:
    """Per group of this rank, the gradient of its kernel's output times `scale`, from what each
    rank sent in the backward pass.

    Args:
        matrix: see `SentGrads`.
    """
    grads: list[Tensor] = []
    ats = [0] * len(got)
    for of in (*mine.matrices, mine.replicas):
        if not of.groups:
            continue
        parts = []
        for i, (message, sizes) in enumerate(zip(messages, got, strict=True)):
            parts.append(message[ats[i] : ats[i] + of.values(sizes)])
            ats[i] += of.values(sizes)
        grads.extend(
            _stack(parts, of.width, scale, matrix).split([group.width for group in of.groups], 1)
        )
    for group in mine.sequences:
        parts = []
        for i, (message, s) in enumerate(zip(messages, got, strict=True)):
            count = sum(s.ids[slot.piece] for slot in group.slots) * group.key.width
            parts.append(message[ats[i] : ats[i] + count])
            ats[i] += count
        grads.append(_stack(parts, group.key.width, scale, matrix))
    return grads


def _stack(parts: Sequence[Tensor], width: int, scale: float, into: Tensor | None = None) -> Tensor:
    """(rows of all parts, width): flat parts below each other, times `scale`, in one pass."""
    if len(parts) == 1 and scale == 1.0:
        return parts[0].view(-1, width)
    sizes = [part.numel() for part in parts]
    stacked = parts[0].new_empty(sum(sizes)) if into is None else into.view(-1)
    for part, place in zip(parts, stacked.split(sizes), strict=True):
        if scale != 1.0:
            torch.mul(part, scale, out=place)
        elif part.data_ptr() != place.data_ptr():
            place.copy_(part)
    return stacked.view(-1, width)
