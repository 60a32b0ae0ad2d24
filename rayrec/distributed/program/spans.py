"""Where every pooled column comes from and goes to, compiled once from the slot table for one home
rank.

A span is a run of columns that are neighbours both in a buffer that came home and in a collection's
output, so that it moves as one copy. Row block 0 is written and later blocks are added, in block
order; the partial sums of hosts come in host order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rayrec.distributed.program.gather import BlockGather
from rayrec.distributed.program.groups import LookupGroup, Use
from rayrec.distributed.program.slots import SlotTable
from rayrec.sparse.ops import offsets_of


@dataclass(frozen=True)
class Span:
    """`width` columns of one buffer that came home that are neighbours in one collection's output,
    too.
    """

    owner: int  # rank, or host of a two-hop buffer
    source: int  # first column in the owner's matrix
    collection: int
    column: int  # first output column
    width: int
    matrix: int = 0  # which of the owner's
    replicated: bool = False  # read from this rank's own lookup, sent back to every owner
    hop: bool = False  # in a two-hop buffer


@dataclass(frozen=True)
class CombinePlan:
    """Where every pooled column goes, compiled once from the slot table for one home rank.

    Attributes:
        writes: per pooled collection, spans that tile its output columns in order (row block 0 and
            replicated tables).
        adds: spans of later row blocks, in block order.
        sends_back: per owner, the spans of its gradient matrices in column order; those of
            replicated tables last.
        hops_back: the same per host, for the two-hop route.
        joins: pooled collection -> how its output is gathered from all that came home, side by
            side, where that is quicker.
        cuts: per owner and matrix, how its gradient is gathered from the only collection's, where
            that is quicker.
    """

    slots: SlotTable
    rank: int
    writes: dict[int, tuple[Span, ...]]
    adds: tuple[Span, ...]
    sends_back: tuple[tuple[tuple[Span, ...], ...], ...]
    hops_back: tuple[tuple[Span, ...], ...]
    joins: dict[int, BlockGather]
    cuts: tuple[tuple[BlockGather | None, ...], ...]


def plan_combine(slots: SlotTable, rank: int, device: torch.device) -> CombinePlan:
    """Compile the output step of `rank`, whose matrices lie on `device`."""
    writes: dict[int, list[Span]] = {c: [] for c in slots.widths}
    adds: dict[int, list[Span]] = {}
    back: list[tuple[tuple[Span, ...], ...]] = []
    for owner, mine in enumerate(slots.ranks):
        parts = [_spans(owner, matrix.groups, i) for i, matrix in enumerate(mine.matrices)]
        parts.append(_spans(owner, mine.replicas.groups, len(parts)))
        back.append(tuple(_merge([span for _, span in part]) for part in parts))
        for block, span in (item for part in parts for item in part):
            if span.replicated and owner != rank:
                continue
            (writes[span.collection] if block == 0 else adds.setdefault(block, [])).append(span)
    hops_back: list[tuple[Span, ...]] = []
    tiled = {(s.collection, s.column) for spans in writes.values() for s in spans}
    for host, ranks in enumerate(slots.hosts):  # all ranks of a host have the same two-hop columns
        spans = [
            (0, replace(span, hop=True))
            for _, span in _spans(host, slots.ranks[ranks[0]].hop.groups, 0)
        ]
        hops_back.append(_merge([span for _, span in spans]))
        for _, span in spans:
            first = (span.collection, span.column) not in tiled
            tiled.add((span.collection, span.column))
            (writes[span.collection] if first else adds.setdefault(host, [])).append(span)
    ordered = {c: _merge(sorted(spans, key=lambda s: s.column)) for c, spans in writes.items()}
    assert {c: sum(s.width for s in spans) for c, spans in ordered.items()} == slots.widths, (
        "row blocks 0 must tile the output"
    )
    added = [span for block in sorted(adds) for span in _merge(adds[block])]
    joins = _joins(slots, ordered, {span.collection for span in added}, device)
    columns = next(iter(slots.widths.values())) if len(slots.widths) == 1 else 0
    cuts = tuple(
        tuple(
            BlockGather.of([(s.column, s.width) for s in spans], columns, 3, device)
            if columns
            else None
            for spans in parts[:-1]
        )
        for parts in back
    )
    return CombinePlan(
        slots, rank, ordered, tuple(added), tuple(back), tuple(hops_back), joins, cuts
    )


def _joins(
    slots: SlotTable, writes: dict[int, tuple[Span, ...]], with_adds: set[int], device: torch.device
) -> dict[int, BlockGather]:
    """Where all of a collection comes from the owners' first matrices, side by side, in many
    pieces.
    """
    widths = [
        mine.matrices[0].width if mine.matrices and not mine.matrices[0].compact else 0
        for mine in slots.ranks
    ]
    firsts = offsets_of(widths)
    found = {}
    for collection, spans in writes.items():
        if collection in with_adds or any(s.replicated or s.hop for s in spans):
            continue
        pieces = [(firsts[s.owner] + s.source, s.width) for s in spans]
        least = 3 * sum(width > 0 for width in widths)
        gather = (
            BlockGather.of(pieces, firsts[-1], least, device)
            if sum(widths) == slots.widths[collection]
            else None
        )
        if gather is not None:
            found[collection] = gather
    return found


def _spans(owner: int, groups: Sequence[LookupGroup], matrix: int) -> list[tuple[int, Span]]:
    found = []
    at = 0
    for group in groups:
        for slot in group.slots:
            found.append(
                (
                    slot.block,
                    Span(
                        owner,
                        at,
                        slot.use.collection,
                        slot.column,
                        slot.width,
                        matrix,
                        group.key.replicated,
                    ),
                )
            )
            at += slot.width
    return found


def _merge(spans: Sequence[Span]) -> tuple[Span, ...]:
    merged: list[Span] = []
    for s in spans:
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.owner, last.matrix, last.collection, last.hop)
            == (s.owner, s.matrix, s.collection, s.hop)
            and last.source + last.width == s.source
            and last.column + last.width == s.column
        ):
            merged[-1] = replace(last, width=last.width + s.width)
        else:
            merged.append(s)
    return tuple(merged)


def cut_spans(spans: Sequence[Span], use: Use) -> list[Span]:
    """The parts of spans that lie in the columns of one use."""
    found = []
    for s in spans:
        start, stop = max(s.column, use.column), min(s.column + s.width, use.column + use.width)
        if start < stop:
            found.append(
                replace(s, source=s.source + start - s.column, column=start, width=stop - start)
            )
    return found
