"""The input step: every id travels to the ranks that own its row.

    KJT -> bucketize by row block -> header -> all_to_all -> payload -> all_to_all -> ids per lookup group

`pack` and `unpack` around each collective are pure functions of tensors and of the compiled slot table. The header has a static size:
the sender's number of bags and, per piece, its number of ids; so sizes may differ from rank to rank and step to step, and one host
sync per step reads them all. The payload carries lengths, ids and weights of one destination side by side, in words of 32 bits, so
that one collective moves them. Costs one copy of the ids on either side; a feature with one row block is not even bucketized.

Leaves out: variable batch per feature, which needs per-piece bag counts.
"""

# B local batch, F features of the KJT, W ranks, P pieces, N ids

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from rayrec.comm.exchange import Exchange, Pending
from rayrec.distributed.bucketize import Bucketing, SourceRows, bucketize
from rayrec.distributed.slots import GroupKey, Piece, SlotTable
from rayrec.errors import InputError, ShapeError
from rayrec.sparse import KeyedJaggedTensor
from rayrec.sparse.ops import offsets_of, runs

_WORD = torch.int32


@dataclass(frozen=True)
class GroupIds:
    """What one lookup kernel reads: for each slot, the bags of all ranks in rank order.

    Attributes:
        ids: (N,) int64, local to the shards' first rows.
        offsets: (slots * bags + 1,) int64.
        weights: (N,) float32, or None when the group is unweighted.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None


@dataclass(frozen=True)
class RoutedIds:
    """Everything this rank looks up in one step.

    Attributes:
        groups: per lookup group of this rank, in the slot table's order.
        batch_sizes: bags per feature of every rank.
    """

    groups: dict[GroupKey, GroupIds]
    batch_sizes: tuple[int, ...]


@dataclass(frozen=True)
class SendPlan:
    """How a KJT with given keys becomes send buffers: compiled once per key list.

    Source rows are numbered: the KJT's own F rows first, then per bucketing blocks * features rows, block by block.
    """

    bucketings: tuple[Bucketing, ...]
    rows: tuple[tuple[int, ...], ...]  # per destination rank, the source row of each of its pieces
    runs: tuple[tuple[range, ...], ...]  # the same as maximal runs of neighbouring source rows


def plan_send(slots: SlotTable, keys: Sequence[str], device: torch.device) -> SendPlan:
    """Compile how a KJT with `keys` is sent.

    Raises:
        InputError: a feature that some table needs is not among the keys.
    """
    where = {key: i for i, key in enumerate(keys)}
    missing = [f for f in slots.features if f not in where]
    if missing:
        raise InputError(
            f"the KeyedJaggedTensor lacks feature {missing[0]!r}, which its tables look up; its keys are {list(keys)[:20]}. "
            "Add the key (with empty bags if need be)."
        )
    row_of: dict[Piece, int] = {}
    bucketings: list[Bucketing] = []
    cut_features: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
    for rank in slots.ranks:
        for piece in rank.pieces:
            if piece.cuts is None:
                row_of[piece] = where[piece.feature]
                continue
            found = cut_features.setdefault(len(piece.cuts) - 1, [])
            if (piece.feature, piece.cuts) not in found:
                found.append((piece.feature, piece.cuts))
    base = len(keys)
    for blocks, found in sorted(cut_features.items()):
        for i, (feature, cuts) in enumerate(found):
            for block in range(blocks):
                row_of[Piece(feature, cuts, block)] = base + block * len(found) + i
        tensors = tuple(torch.tensor(cuts, dtype=torch.int64, device=device) for _, cuts in found)
        bucketings.append(Bucketing(blocks, tuple(where[feature] for feature, _ in found), tensors))
        base += blocks * len(found)
    rows = tuple(tuple(row_of[piece] for piece in rank.pieces) for rank in slots.ranks)
    return SendPlan(tuple(bucketings), rows, tuple(tuple(runs(r)) for r in rows))


def pack_header(rows: SourceRows, send: SendPlan) -> list[int]:
    """Per destination rank: B, then the number of ids of each of its pieces."""
    counts = rows.counts
    header: list[int] = []
    for wanted in send.rows:
        header.append(rows.batch_size)
        header.extend(counts[row] for row in wanted)
    return header


def payload_words(header: Sequence[int], num_pieces: int, weighted: bool) -> int:
    """32-bit words of one message: ids (two words each), lengths and weights, padded so that the next message's ids are aligned."""
    ids = sum(header[1:])
    words = 2 * ids + num_pieces * header[0] + (ids if weighted else 0)
    return words + words % 2


def pack_payload(rows: SourceRows, send: SendPlan, header: Sequence[int]) -> Tensor:
    """(words,) int32: per destination rank its ids, lengths, weights and padding, in one copy."""
    batch, device = rows.batch_size, rows.parts[0].ids.device
    first_rows = offsets_of(len(part.counts) for part in rows.parts)
    id_bounds = [offsets_of(part.counts) for part in rows.parts]
    pad = torch.zeros(1, dtype=_WORD, device=device)
    views: list[Tensor] = []
    for wanted in send.runs:
        ids: list[Tensor] = []
        lengths: list[Tensor] = []
        weights: list[Tensor] = []
        for run in wanted:
            for part, first, bounds in zip(rows.parts, first_rows, id_bounds, strict=False):
                start, stop = max(run.start - first, 0), min(run.stop - first, len(part.counts))
                if start >= stop:
                    continue
                span = slice(bounds[start], bounds[stop])
                ids.append(part.ids[span].view(_WORD))
                lengths.append(part.lengths[start * batch : stop * batch])
                if part.weights is not None:
                    weights.append(part.weights[span].view(_WORD))
        message = ids + lengths + weights
        if sum(view.numel() for view in message) % 2:
            message.append(pad)
        views.extend(message)
    return torch.cat(views) if views else pad[:0]


def unpack(slots: SlotTable, rank: int, headers: Sequence[Sequence[int]], payload: Tensor) -> RoutedIds:
    """Sort what arrived by (slot, source rank), for each lookup group.

    Args:
        headers: per source rank, its header for this rank.
        payload: (words,) int32, the messages of all ranks in rank order.
    """
    mine = slots.ranks[rank]
    ids: list[list[Tensor]] = []  # [source][piece]
    lengths: list[list[Tensor]] = []
    weights: list[list[Tensor]] = []
    at = 0
    num = len(mine.pieces)
    for header in headers:
        batch, counts = header[0], list(header[1:])
        total = sum(counts)
        message = payload[at : at + payload_words(header, num, slots.weighted)]
        at += message.numel()
        ids.append(list(message[: 2 * total].view(torch.int64).split(counts)))
        lengths.append(list(message[2 * total : 2 * total + num * batch].split([batch] * num)))
        if slots.weighted:
            start = 2 * total + num * batch
            weights.append(list(message[start : start + total].view(torch.float32).split(counts)))
    groups = {}
    for group in mine.groups:
        pieces = [slot.piece for slot in group.slots]
        groups[group.key] = GroupIds(
            ids=torch.cat([source[piece] for piece in pieces for source in ids]),
            offsets=_offsets(torch.cat([source[piece] for piece in pieces for source in lengths])),
            weights=torch.cat([source[piece] for piece in pieces for source in weights]) if group.key.weighted else None,
        )
    return RoutedIds(groups, tuple(header[0] for header in headers))


def _offsets(lengths: Tensor) -> Tensor:
    offsets = lengths.new_zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, dtype=torch.int64, out=offsets[1:])
    return offsets


def route(kjt: KeyedJaggedTensor, slots: SlotTable, send: SendPlan, exchange: Exchange) -> Pending[RoutedIds]:
    """Start the input exchange of one KJT; the result is what this rank looks up.

    Two collectives: the headers, waited for here, and the payload, waited for by `wait()`.

    Raises:
        InputError: see `bucketize`.
        ShapeError: a header does not fit, so the ranks compiled different plans.
        CommError: a peer is gone.
    """
    rows = bucketize(kjt, send.bucketings, slots.weighted)
    mine, world = len(slots.ranks[exchange.rank].pieces), exchange.world_size
    header = pack_header(rows, send)
    header_splits = [1 + len(wanted) for wanted in send.rows]
    sent = torch.tensor(header, dtype=torch.int64, device=rows.parts[0].ids.device)
    received = exchange.all_to_all(sent, header_splits, [1 + mine] * world).wait().tolist()
    headers = [received[i * (1 + mine) : (i + 1) * (1 + mine)] for i in range(world)]
    if any(value < 0 for value in received):
        raise ShapeError(f"rank {exchange.rank} received a negative count in a header: the ranks do not share one plan.")
    bounds = offsets_of(header_splits)
    words_out = [payload_words(header[a:b], b - a - 1, slots.weighted) for a, b in pairwise(bounds)]
    words_in = [payload_words(h, mine, slots.weighted) for h in headers]
    pending = exchange.all_to_all(pack_payload(rows, send, header), words_out, words_in)
    return Pending(lambda: unpack(slots, exchange.rank, headers, pending.wait()))
