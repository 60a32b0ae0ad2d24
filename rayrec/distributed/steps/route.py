"""The input step: every id travels to the ranks that own its row.

    KJT -> source rows (`bucketize`) -> header -> payload -> ids per lookup group (`unpack`)

What happens around the two collectives is a pure function of tensors and of the compiled slot
table. The header has a static size: what the ways want to know of the batch, its time where dynamic
tables ask for it, and per piece its number of ids and of bags. So sizes may differ from rank to
rank, key to key and step to step, and one host sync per step reads them all. The payload carries
the ids, lengths and weights of one destination side by side, in words of 32 bits, so that one
collective moves them. What a rank looks up itself takes part in neither. The step costs one copy of
the ids on either side.
"""

# P pieces, N ids

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from rayrec.comm.exchange import Exchange
from rayrec.distributed.kernels.ids import WORD, GroupIds
from rayrec.distributed.program.groups import GroupKey, Piece
from rayrec.distributed.program.slots import Sizes, SlotTable
from rayrec.distributed.steps.bucketize import Bucketing, bucketize
from rayrec.distributed.steps.source_rows import SourceRows
from rayrec.distributed.steps.unpack import Arrived
from rayrec.dynamic.clock import NO_TIME
from rayrec.errors import InputError, ShapeError
from rayrec.sparse import KeyedJaggedTensor
from rayrec.sparse.ops import runs

# (sizes, what arrived) of every source -> the ids of every lookup group of this rank
Unpack = Callable[[Sequence[Sizes], Sequence[Arrived]], Mapping[GroupKey, GroupIds]]


@dataclass(frozen=True)
class RoutedIds:
    """Everything this rank looks up in one step, and what it remembers of what it sent.

    Attributes:
        groups: per lookup group of this rank.
        sent: sizes of this rank's message to each rank.
        got: sizes of each rank's message to this rank.
        source: this rank's rows of bags, which know where ids came from.
        time: the largest time of the batches of all ranks, where tables ask for it; else `NO_TIME`.
    """

    groups: Mapping[GroupKey, GroupIds]
    sent: tuple[Sizes, ...]
    got: tuple[Sizes, ...]
    source: SourceRows
    time: int


@dataclass(frozen=True)
class Message:
    """Message to one destination, as runs of source rows: of ids, of lengths (pooled pieces) and
    of weights (weighted pieces).
    """

    rows: tuple[int, ...]  # per piece
    ids: tuple[range, ...]
    lengths: tuple[range, ...]
    weights: tuple[range, ...]


@dataclass(frozen=True)
class SendPlan:
    """Recipe of the send buffers of a KJT with given keys: compiled once per key list.

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
    missing = [f for f in slots.limits if f not in where]
    if missing:
        raise InputError(
            f"the KeyedJaggedTensor lacks feature {missing[0]!r}, which its tables look up; its "
            f"keys are {list(keys)[:20]}. "
            "Add the key (with empty bags if need be)."
        )
    bucketings, row_of = _plan_cuts(slots, keys, where, device)
    messages = []
    for rank in slots.ranks:
        rows = []
        for piece in rank.pieces:
            rows.append(where[piece.feature] if piece.cuts is None else row_of[piece])
        pooled = [row for row, piece in zip(rows, rank.pieces, strict=True) if not piece.sequence]
        weights = [row for row, piece in zip(rows, rank.pieces, strict=True) if piece.weighted]
        parts = (tuple(runs(part)) for part in (rows, pooled, weights))
        messages.append(Message(tuple(rows), *parts))
    extents: list[int | None] = []
    for entries in slots.headers.values():
        extents.extend(None if feature is None else where[feature] for feature in entries)
    return SendPlan(bucketings, tuple(messages), tuple(keys), tuple(extents))


def _plan_cuts(
    slots: SlotTable, keys: Sequence[str], where: Mapping[str, int], device: torch.device
) -> tuple[tuple[Bucketing, ...], dict[Piece, int]]:
    """Return how features are cut by rows, and the source row of every piece that this gives."""
    # One kernel call cuts all that is alike here; block 0 stands for all blocks of a feature.
    alike: dict[tuple[int, bool, bool, bool, bool], dict[Piece, None]] = {}
    for rank in slots.ranks:
        for piece in rank.pieces:
            if piece.cuts is not None:
                flags = piece.sequence, piece.weighted, piece.leaves_out, piece.dynamic != (0, 0)
                key = len(piece.cuts) - 1, *flags
                alike.setdefault(key, {}).setdefault(replace(piece, block=0))
    row_of: dict[Piece, int] = {}
    bucketings: list[Bucketing] = []
    base = len(keys)
    for (blocks, sequence, weighted, leaves_out, is_dynamic), pieces in sorted(alike.items()):
        for block in range(blocks):
            for i, piece in enumerate(pieces):
                row_of[replace(piece, block=block)] = base + block * len(pieces) + i
        features = tuple(where[piece.feature] for piece in pieces)
        cuts = tuple(torch.tensor(piece.cuts, dtype=torch.int64, device=device) for piece in pieces)
        dynamic = tuple(piece.dynamic for piece in pieces) if is_dynamic else ()
        bucketings.append(
            Bucketing(blocks, features, cuts, sequence, weighted, leaves_out, dynamic)
        )
        base += blocks * len(pieces)
    return tuple(bucketings), row_of


def pack_header(
    rows: SourceRows, slots: SlotTable, send: SendPlan, time: int | None
) -> list[list[int]]:
    """Return per destination rank a header, which `Sizes.of` reads.

    It holds the extents, the time of the batch where tables ask for it, the ids of each of its
    pieces, and the bags of each (0 in sequences).
    """
    counts, bags = rows.counts, rows.bags
    extents = [rows.most_bags if key is None else counts[key] for key in send.extents]
    if slots.uses_time:  # no number of a header is below 0
        extents.append((NO_TIME if time is None else time) - NO_TIME)
    headers = []
    for message, rank in zip(send.messages, slots.ranks, strict=True):
        ids = [counts[row] for row in message.rows]
        pairs = zip(message.rows, rank.pieces, strict=True)
        of_pieces = [0 if piece.sequence else bags[row] for row, piece in pairs]
        headers.append([*extents, *ids, *of_pieces])
    return headers


def payload_words(pieces: Sequence[Piece], sizes: Sizes) -> int:
    """Return the 32-bit words of one message: ids (two words each), lengths and weights.

    The number is even, so that the ids of the next message are aligned.
    """
    weights = sum(ids for piece, ids in zip(pieces, sizes.ids, strict=True) if piece.weighted)
    words = 2 * sum(sizes.ids) + sum(sizes.bags) + weights
    return words + words % 2


def pack_payload(rows: SourceRows, send: SendPlan, rank: int, out: Tensor) -> Tensor:
    """Fill `out`, (words,) int32, with ids, lengths, weights and padding of each destination but
    this rank, in one copy.
    """
    others = [message for to, message in enumerate(send.messages) if to != rank]
    if not others:
        return out
    pad = torch.zeros(1, dtype=WORD, device=rows.parts[0].ids.device)
    buffer: list[Tensor] = []
    for message in others:
        found = chain(
            rows.runs_of("ids", message.ids),
            rows.runs_of("lengths", message.lengths),
            rows.runs_of("weights", message.weights),
        )
        parts = [values.view(WORD) for values, _ in found]
        # Every message begins at an even word, since its ids are read as 64 bits.
        if sum(part.numel() for part in parts) % 2:
            parts.append(pad)
        buffer.extend(parts)
    return torch.cat(buffer, out=out) if buffer else out


def own_pieces(rows: SourceRows, message: Message, pieces: Sequence[Piece]) -> Arrived:
    """Return what this rank would send itself, where it lies."""
    ids = list(rows.runs_of("ids", message.ids))
    lengths = list(rows.runs_of("lengths", message.lengths))
    return Arrived(pieces, ids, lengths, list(rows.runs_of("weights", message.weights)))


def route(
    kjt: KeyedJaggedTensor,
    slots: SlotTable,
    send: SendPlan,
    exchange: Exchange,
    unpack: Unpack,
    track: bool = False,
    checked: Callable[[], None] | None = None,
) -> RoutedIds:
    """Exchange the ids of one KJT: a header and a payload for every rank.

    Args:
        unpack: sorts what arrived for each lookup group.
        track: remember where weighted ids came from, for the gradient of their weights.
        checked: raises when ids are out of range. It is called before any id is cut by rows, sent
            or looked up, and not earlier: on a GPU the wait for the headers then is the one that it
            needs, and a rank alone has launched all else before it waits.
    Raises:
        InputError: see `bucketize`.
        ShapeError: a header does not fit, so the ranks compiled different plans.
        CommError: a peer is gone.
    """
    checked = checked or _no_check
    if send.bucketings:
        checked()
    rows = bucketize(kjt, send.bucketings, slots.weighted, track)
    me, mine = exchange.rank, slots.ranks[exchange.rank].pieces
    headers = pack_header(rows, slots, send, kjt.time)
    extents = len(send.extents) + slots.uses_time
    sent = tuple(Sizes.of(header, extents) for header in headers)
    words_out = []
    for rank, (slots_of_rank, sizes) in enumerate(zip(slots.ranks, sent, strict=True)):
        words_out.append(0 if rank == me else payload_words(slots_of_rank.pieces, sizes))

    def words_in(received: list[list[int]]) -> list[int]:
        if exchange.world_size > 1 and not send.bucketings:
            checked()
        if any(min(header, default=0) < 0 for header in received):
            raise ShapeError(
                f"rank {me} received a negative count in a header: the ranks do not share one plan."
            )
        sizes = [Sizes.of(header, extents) for header in received]
        return [0 if rank == me else payload_words(mine, sizes[rank]) for rank in range(len(sizes))]

    payload = pack_payload(rows, send, me, exchange.buffer(sum(words_out), rows.parts[0].lengths))
    head = extents + 2 * len(mine)
    received, messages = exchange.headed(headers, payload, words_out, head, words_in).wait()
    got = tuple(Sizes.of(header, extents) for header in received)
    arrived = []
    for rank, (message, sizes) in enumerate(zip(messages, got, strict=True)):
        if rank == me:  # its own ids have not travelled
            arrived.append(own_pieces(rows, send.messages[me], mine))
        else:
            arrived.append(Arrived.of(message, sizes, mine))
    time = max(sizes.extents[-1] for sizes in got) + NO_TIME if slots.uses_time else NO_TIME
    routed = RoutedIds(unpack(got, arrived), sent, got, rows, time)
    if exchange.world_size == 1 and not send.bucketings:
        checked()
    return routed


def _no_check() -> None:
    """Judge nothing: the ids are known to be in range, or nobody asked."""
