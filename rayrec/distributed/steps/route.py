"""The input step: every id travels to the ranks that own its row.

    KJT -> bucketize by row block -> header -> all_to_all -> payload -> all_to_all -> ids per lookup
    group

`pack` and `unpack` around each collective are pure functions of tensors and of the compiled slot
table. The header has a static size: extents of what is read in place, and per piece its number of
ids and of bags; so sizes may differ from rank to rank, key to key and step to step, and one host
sync per step reads them all. The payload carries ids, lengths and weights of one destination side
by side, in words of 32 bits, so that one collective moves them. What a rank looks up itself takes
part in neither. Costs one copy of the ids on either side; a feature with one row block is not even
bucketized.

Where pieces of a matrix have different numbers of bags (a variable batch, or row blocks whose bags
without ids stayed at home), those with fewer are padded by empty bags on arrival; nothing but their
pooled rows is sent back for the padding.
"""

# P pieces, N ids

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from rayrec.comm.exchange import Exchange
from rayrec.distributed.kernels.ids import WORD, GroupIds
from rayrec.distributed.program.groups import GroupKey, Piece
from rayrec.distributed.program.slots import Sizes, SlotTable
from rayrec.distributed.steps.bucketize import Bucketing, SourceRows, bucketize
from rayrec.distributed.steps.unpack import Arrived, unpack
from rayrec.errors import InputError, ShapeError
from rayrec.sparse import KeyedJaggedTensor
from rayrec.sparse.ops import runs


@dataclass(frozen=True)
class RoutedIds:
    """Everything this rank looks up in one step, and what it remembers of what it sent.

    Attributes:
        groups: per lookup group of this rank.
        sent: sizes of this rank's message to each rank.
        got: sizes of each rank's message to this rank.
        source: this rank's rows of bags, which know where ids came from.
    """

    groups: dict[GroupKey, GroupIds]
    sent: tuple[Sizes, ...]
    got: tuple[Sizes, ...]
    source: SourceRows


@dataclass(frozen=True)
class Message:
    """What one destination is sent, as runs of source rows: of ids, of lengths (pooled pieces) and
    of weights (weighted pieces).
    """

    rows: tuple[int, ...]  # per piece
    ids: tuple[range, ...]
    lengths: tuple[range, ...]
    weights: tuple[range, ...]


@dataclass(frozen=True)
class SendPlan:
    """How a KJT with given keys becomes send buffers: compiled once per key list.

    Source rows are numbered: the KJT's own F rows first, then per bucketing blocks * features rows,
    block by block.
    """

    bucketings: tuple[Bucketing, ...]
    messages: tuple[Message, ...]  # per destination rank
    keys: tuple[str, ...]
    # see `Sizes`: the key whose ids are counted, or None for the most bags
    extents: tuple[int | None, ...]


def plan_send(slots: SlotTable, keys: Sequence[str], device: torch.device) -> SendPlan:
    """Compile how a KJT with `keys` is sent.

    Raises:
        InputError: a feature that some table needs is not among the keys.
    """
    where = {key: i for i, key in enumerate(keys)}
    missing = [f for f in slots.features if f not in where]
    if missing:
        raise InputError(
            f"the KeyedJaggedTensor lacks feature {missing[0]!r}, which its tables look up; its "
            f"keys are {list(keys)[:20]}. "
            "Add the key (with empty bags if need be)."
        )
    alike: dict[tuple[int, bool, bool, bool], dict[Piece, None]] = {}
    for piece in (piece for rank in slots.ranks for piece in rank.pieces if piece.cuts is not None):
        assert piece.cuts is not None
        key = len(piece.cuts) - 1, piece.sequence, piece.weighted, piece.compact
        alike.setdefault(key, {}).setdefault(replace(piece, block=0))
    row_of: dict[Piece, int] = {}
    bucketings: list[Bucketing] = []
    base = len(keys)
    for (blocks, sequence, weighted, compact), found in sorted(alike.items()):
        for block in range(blocks):
            for i, piece in enumerate(found):
                row_of[replace(piece, block=block)] = base + block * len(found) + i
        cuts = tuple(torch.tensor(piece.cuts, dtype=torch.int64, device=device) for piece in found)
        bucketings.append(
            Bucketing(
                blocks,
                tuple(where[piece.feature] for piece in found),
                cuts,
                sequence,
                weighted,
                compact,
            )
        )
        base += blocks * len(found)
    messages = []
    for rank in slots.ranks:
        rows = [
            where[piece.feature] if piece.cuts is None else row_of[piece] for piece in rank.pieces
        ]
        pooled = [row for row, piece in zip(rows, rank.pieces, strict=True) if not piece.sequence]
        weights = [row for row, piece in zip(rows, rank.pieces, strict=True) if piece.weighted]
        messages.append(
            Message(tuple(rows), tuple(runs(rows)), tuple(runs(pooled)), tuple(runs(weights)))
        )
    extents: list[int | None] = []
    for collection in slots.extents:
        extents.extend(
            [where[use.feature] for use in slots.uses[collection]]
            if slots.collections[collection].sequence
            else [None]
        )
    return SendPlan(tuple(bucketings), tuple(messages), tuple(keys), tuple(extents))


def pack_header(rows: SourceRows, slots: SlotTable, send: SendPlan) -> list[list[int]]:
    """Per destination rank: extents (see `Sizes`), ids of each of its pieces, then bags of each (0
    in sequences).
    """
    counts, bags = rows.counts, rows.bags
    extents = [rows.most_bags if key is None else counts[key] for key in send.extents]
    headers = []
    for message, rank in zip(send.messages, slots.ranks, strict=True):
        ids = [counts[row] for row in message.rows]
        headers.append(
            [*extents, *ids]
            + [
                0 if piece.sequence else bags[row]
                for row, piece in zip(message.rows, rank.pieces, strict=True)
            ]
        )
    return headers


def payload_words(pieces: Sequence[Piece], sizes: Sizes) -> int:
    """32-bit words of one message: ids (two words each), lengths and weights, padded so that the
    next message's ids are aligned.
    """
    weights = sum(ids for piece, ids in zip(pieces, sizes.ids, strict=True) if piece.weighted)
    words = 2 * sum(sizes.ids) + sum(sizes.bags) + weights
    return words + words % 2


def pack_payload(rows: SourceRows, send: SendPlan, rank: int, out: Tensor) -> Tensor:
    """Fill `out`, (words,) int32, with ids, lengths, weights and padding of each destination but
    this rank, in one copy.
    """
    pad = torch.zeros(1, dtype=WORD, device=rows.parts[0].ids.device)
    buffer: list[Tensor] = []
    for message in (
        message for destination, message in enumerate(send.messages) if destination != rank
    ):
        found = chain(
            rows.runs_of("ids", message.ids),
            rows.runs_of("lengths", message.lengths),
            rows.runs_of("weights", message.weights),
        )
        parts = [values.view(WORD) for values, _ in found]
        if sum(part.numel() for part in parts) % 2:
            parts.append(pad)
        buffer.extend(parts)
    return torch.cat(buffer, out=out) if buffer else out


def own_pieces(rows: SourceRows, message: Message, pieces: Sequence[Piece]) -> Arrived:
    """What this rank would send itself, where it lies."""
    ids = [one for values, sizes in rows.runs_of("ids", message.ids) for one in values.split(sizes)]
    lengths = (
        one
        for values, sizes in rows.runs_of("lengths", message.lengths)
        for one in values.split(sizes)
    )
    weights = (
        one
        for values, sizes in rows.runs_of("weights", message.weights)
        for one in values.split(sizes)
    )
    none = rows.parts[0].lengths[:0]
    return Arrived(
        ids,
        [none if piece.sequence else next(lengths) for piece in pieces],
        {i: next(weights) for i, piece in enumerate(pieces) if piece.weighted},
    )


def route(
    kjt: KeyedJaggedTensor,
    slots: SlotTable,
    send: SendPlan,
    exchange: Exchange,
    track: bool = False,
    checked: Callable[[], None] | None = None,
) -> RoutedIds:
    """The input exchange of one KJT: a header and a payload for every rank.

    Args:
        track: remember where weighted ids came from, for the gradient of their weights.
        checked: raises when ids are out of range. It is called before any id is cut by rows or
            sent, and not earlier: on a GPU
            the wait for the headers then is the one that it needs.
    Raises:
        InputError: see `bucketize`.
        ShapeError: a header does not fit, so the ranks compiled different plans.
        CommError: a peer is gone.
    """
    if checked is not None and send.bucketings:
        checked()
    rows = bucketize(kjt, send.bucketings, slots.weighted, track)
    pieces, me = [rank.pieces for rank in slots.ranks], exchange.rank
    mine = pieces[me]
    headers = pack_header(rows, slots, send)
    extents = len(send.extents)
    sent = tuple(Sizes.of(h, extents) for h in headers)
    words_out = [
        0 if rank == me else payload_words(pieces[rank], sizes) for rank, sizes in enumerate(sent)
    ]

    def words_in(received: list[list[int]]) -> list[int]:
        if checked is not None and not send.bucketings:
            checked()
        if any(value < 0 for h in received for value in h):
            raise ShapeError(
                f"rank {me} received a negative count in a header: the ranks do not share one plan."
            )
        return [
            0 if rank == me else payload_words(mine, Sizes.of(h, extents))
            for rank, h in enumerate(received)
        ]

    payload = pack_payload(rows, send, me, exchange.buffer(sum(words_out), rows.parts[0].lengths))
    received, messages = exchange.headed(
        headers, payload, words_out, extents + 2 * len(mine), words_in
    ).wait()
    got = tuple(Sizes.of(h, extents) for h in received)
    arrived = [
        own_pieces(rows, send.messages[me], mine)
        if rank == me
        else Arrived.of(message, sizes, mine)
        for rank, (message, sizes) in enumerate(zip(messages, got, strict=True))
    ]
    return RoutedIds(unpack(slots, me, got, arrived), sent, got, rows)
