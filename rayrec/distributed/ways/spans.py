"""Source and destination of every pooled column, worked out once for one home rank.

A span is a run of columns that are neighbours both in a buffer that came home and in a collection's
output, so that it moves as one copy. Row block 0 is written and later blocks are added, in block
order; the partial sums of hosts come in host order. In the backward pass each owner gets the
gradient of the columns that it looked up, span by span, in the order in which its rows came.
"""

# B rows of the home batch, D columns of a collection

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rayrec.distributed.program.groups import LookupGroup, Use
from rayrec.distributed.program.slots import SlotTable
from rayrec.distributed.ways.matrices import OwnerMatrices

# The buffers that came home in one step: per owner and matrix (rows, width), as spans count them.
Buffers = Sequence[Sequence[Tensor]]

_WIDE = 256  # columns; from here on a copy and a product take one pass, span by span


@dataclass(frozen=True)
class Span:
    """Columns that are neighbours in a buffer that came home and in one collection's output.

    Attributes:
        owner: a rank; behind all ranks, a host that summed rows.
        source: the first column in the owner's matrix.
        column: the first output column.
        matrix: which of the owner's; behind those that travel, that of its replicated tables.
    """

    owner: int
    source: int
    collection: int
    column: int
    width: int
    matrix: int = 0

    def of(self, buffers: Buffers) -> Tensor:
        """Return (rows, width): the columns of the span as they came."""
        return buffers[self.owner][self.matrix][:, self.source : self.source + self.width]


@dataclass(frozen=True)
class JoinPlan:
    """Destination of every pooled column, for one home rank.

    Attributes:
        owners: matrices that each rank looks up.
        widths: pooled collection -> columns of its output.
        writes: per collection, spans that tile its output columns in order: those of row block 0,
            of replicated tables, and of the first host.
        adds: spans of later row blocks and hosts, in order.
        sends_back: per owner and matrix, the spans of its gradient in column order; those of
            replicated tables come last.
        hops_back: the same per host, for the two-hop route.
    """

    rank: int
    owners: tuple[OwnerMatrices, ...]
    widths: dict[int, int]
    writes: dict[int, tuple[Span, ...]]
    adds: tuple[Span, ...]
    sends_back: tuple[tuple[tuple[Span, ...], ...], ...]
    hops_back: tuple[tuple[Span, ...], ...]


def plan_join(slots: SlotTable, rank: int, widths: dict[int, int]) -> JoinPlan:
    """Work out the join of `rank`.

    A column is written by its row block 0, or by the first host that has it in two hops; all others
    add to it. Additions come by the number of their row block or host, so that sums repeat.

    Args:
        widths: the pooled collections, with the columns of their outputs.
    """
    owners = tuple(OwnerMatrices.of(of_rank, list(widths)) for of_rank in slots.ranks)
    writes: dict[int, list[Span]] = {c: [] for c in widths}
    adds: dict[int, list[Span]] = {}
    back: list[tuple[tuple[Span, ...], ...]] = []
    for number, owner in enumerate(owners):
        parts = [_spans(number, matrix.groups, i) for i, matrix in enumerate(owner.flat)]
        back.append(tuple(_merge([span for _, span in part]) for part in parts))
        # All replicas get the gradient, but only the copy on this rank is read.
        for part in parts if number == rank else parts[:-1]:
            for block, span in part:
                (writes[span.collection] if block == 0 else adds.setdefault(block, [])).append(span)
    hops_back: list[tuple[Span, ...]] = []
    tiled = {(s.collection, s.column) for spans in writes.values() for s in spans}
    for host, ranks in enumerate(slots.hosts):  # all ranks of a host have the same two-hop columns
        of_host = _spans(len(owners) + host, owners[ranks[0]].hop.groups, 0)
        spans = [span for _, span in of_host]
        hops_back.append(_merge(spans))
        for span in spans:
            first = (span.collection, span.column) not in tiled
            tiled.add((span.collection, span.column))
            (writes[span.collection] if first else adds.setdefault(host, [])).append(span)
    ordered = {c: _merge(sorted(spans, key=lambda s: s.column)) for c, spans in writes.items()}
    covered = {c: sum(span.width for span in spans) for c, spans in ordered.items()}
    assert covered == widths, "row blocks 0 must tile the output"
    added = [span for block in sorted(adds) for span in _merge(adds[block])]
    return JoinPlan(rank, owners, widths, ordered, tuple(added), tuple(back), tuple(hops_back))


def _spans(owner: int, groups: Sequence[LookupGroup], matrix: int) -> list[tuple[int, Span]]:
    """Return every slot of a matrix as a span, with its row block."""
    spans = []
    at = 0
    for group in groups:
        for slot in group.slots:
            collection, column = slot.use.collection, slot.column
            span = Span(owner, at, collection, column, slot.width, matrix)
            spans.append((slot.block, span))
            at += slot.width
    return spans


def _merge(spans: Sequence[Span]) -> tuple[Span, ...]:
    # Neighbours in the buffer and in the output become one span, which moves as one copy. Replicas
    # have a matrix number of their own, so they are never joined with rows that travel.
    merged: list[Span] = []
    for s in spans:
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.owner, last.matrix, last.collection) == (s.owner, s.matrix, s.collection)
            and last.source + last.width == s.source
            and last.column + last.width == s.column
        ):
            merged[-1] = replace(last, width=last.width + s.width)
        else:
            merged.append(s)
    return tuple(merged)


def cut_spans(spans: Sequence[Span], use: Use) -> list[Span]:
    """Return the parts of spans that lie in the columns of one use."""
    cuts = []
    for s in spans:
        start, stop = max(s.column, use.column), min(s.column + s.width, use.column + use.width)
        if start < stop:
            source = s.source + start - s.column
            cuts.append(replace(s, source=source, column=start, width=stop - start))
    return cuts


@dataclass(frozen=True)
class HomeGrads:
    """The gradients of the outputs of one step.

    Attributes:
        whole: collection -> (B, D); empty where keys have different numbers of bags.
        by_use: collection -> per use (bags, width), there.
        uses: collection -> its uses, in the order of `by_use`.
    """

    whole: Mapping[int, Tensor]
    by_use: Mapping[int, Sequence[Tensor]]
    uses: Mapping[int, Sequence[Use]]

    def write(self, spans: Sequence[Span], matrix: Tensor, scale: float) -> None:
        """Fill (rows, columns of all spans) with the gradient of these columns, times `scale`.

        Wide spans are multiplied into place one by one, in one pass. Narrow ones are first put side
        by side, and then scaled as one matrix.
        """
        if self.by_use:
            self._write_by_use(spans, matrix, scale)
            return
        parts = [self.whole[s.collection][:, s.column : s.column + s.width] for s in spans]
        if scale != 1.0 and matrix.shape[1] >= _WIDE * len(spans):
            for span, part in zip(spans, parts, strict=True):
                torch.mul(part, scale, out=matrix[:, span.source : span.source + span.width])
            return
        torch.cat(parts, 1, out=matrix)
        if scale != 1.0:
            matrix.mul_(scale)

    def _write_by_use(self, spans: Sequence[Span], matrix: Tensor, scale: float) -> None:
        matrix.zero_()  # padded bags have no gradient
        for span in spans:
            for use in self.uses[span.collection]:
                grad = self.by_use[span.collection][use.index]
                for cut in cut_spans([span], use):
                    first = cut.column - use.column
                    into = matrix[: grad.shape[0], cut.source : cut.source + cut.width]
                    torch.mul(grad[:, first : first + cut.width], scale, out=into)
