"""Passes the shards of one plan on to another, for the same ranks, more of them or fewer.

Both worlds meet as one: ranks of the old world hold shards, ranks of the new one take shards, and
most do both. What a rank holds and takes stays where it is. The rest travels once, byte for byte,
in rounds of bounded size; where several ranks hold the same rows, the takers share them out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rayrec.comm.exchange import Exchange
from rayrec.layout import Shard, ShardingPlan
from rayrec.shards.overlap import within
from rayrec.shards.state import Gather, ShardState

# of all ranks together, in one round
ROUND_BYTES = 1 << 28
CPU = torch.device("cpu")
# what begins at a multiple of it can be read as numbers of any type
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Passage:
    """A rectangle that a rank takes from one that holds it, which may be itself.

    Attributes:
        source, target: ranks of the joint world.
        held: the shard of the source that has it.
        piece: the rectangle.
    """

    source: int
    target: int
    held: Shard
    piece: Shard


@dataclass(frozen=True, slots=True)
class RowType:
    """The type of rows, or of a state of their optimizer, and whether a row has one value of it."""

    dtype: torch.dtype
    is_row_wise: bool

    def bytes_of(self, shard: Shard) -> int:
        """Bytes of a rectangle on the wire."""
        rows, cols = shard.shape
        size = rows * (1 if self.is_row_wise else cols) * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT


Columns = Mapping[str, RowType]  # by name, the weight first


def passages(
    table: str,
    old: ShardingPlan,
    new: ShardingPlan,
    holders: Sequence[int | None],
    takers: Sequence[int | None],
) -> Iterator[Passage]:
    """Yield the passages of a table from holders to takers, in the same order on all ranks.

    Args:
        holders: per rank of the joint world, its rank under the old plan, or None.
        takers: the same under the new plan.
    """
    held: dict[tuple[range, range], list[tuple[int, Shard]]] = {}
    for shard in old.tables[table].layout.shards(table):
        here = [(rank, shard) for rank, own in enumerate(holders) if own == shard.rank]
        held.setdefault((shard.rows, shard.cols), []).extend(here)
    for target, taker in enumerate(takers):
        for wanted in new.tables[table].layout.shards(table):
            if taker is None or wanted.rank != taker:
                continue
            for owners in held.values():
                shared = wanted.intersect(owners[0][1])
                if shared is None:
                    continue
                by_rank = dict(owners)
                source = target if target in by_rank else owners[target % len(owners)][0]
                piece = Shard(table, *shared, target)
                yield Passage(source, target, by_rank[source], piece)


def columns_of(states: Sequence[ShardState], gather: Gather) -> dict[str, Columns]:
    """Return the columns of all tables of a joint world, on every rank, whoever holds them."""
    own: dict[str, Columns] = {}
    for state in states:
        own[state.shard.table] = {
            name: RowType(tensor.dtype, tensor.dim() == 1)
            for name, tensor in state.tensors().items()
        }
    everyone: dict[str, Columns] = {}
    for told in gather(own):
        everyone |= told
    return everyone


def pass_on(
    old: ShardingPlan,
    new: ShardingPlan,
    holders: Sequence[int | None],
    takers: Sequence[int | None],
    states: Sequence[ShardState],
    exchange: Exchange,
    tables: Mapping[str, Columns],
    device: torch.device = CPU,
) -> tuple[list[ShardState], int]:
    """Pass shards on; all ranks of the joint world call it together.

    Args:
        old, new: plans of the two worlds.
        holders, takers: see `passages`.
        states: shards that this rank holds, on any device.
        exchange: exchange of the joint world.
        tables: tables to pass on, in the same order on all ranks, each with its columns of
            rows and state; see `columns_of`.
        device: device of the messages, and so of the pieces that arrive.
    Returns:
        The pieces of which this rank's new shards consist, each with the rank's number in the joint
        world: views of `states`, and what came. And the bytes that this rank sent.
    Raises:
        CommError: a peer is gone.
    """
    own = {state.shard: state for state in states}
    pieces: list[ShardState] = []
    coming: dict[Passage, ShardState] = {}
    travels: list[Passage] = []
    for table, columns in tables.items():
        for passage in passages(table, old, new, holders, takers):
            if passage.source != passage.target:
                travels.append(passage)
            elif passage.target == exchange.rank:
                pieces.append(_part(own[passage.held], passage.piece))
            if passage.target == exchange.rank != passage.source:
                coming[passage] = _empty(passage.piece, columns, device)
    sent = 0
    for batch in _rounds(travels, tables):
        sent += _round(batch, own, coming, tables, exchange, device)
    return pieces + list(coming.values()), sent


def _part(state: ShardState, piece: Shard) -> ShardState:
    """A rectangle of a shard, as views."""
    rows, cols = within(piece.rows, state.shard.rows), within(piece.cols, state.shard.cols)
    tensors = {
        name: tensor[rows, cols] if tensor.dim() == 2 else tensor[rows]
        for name, tensor in state.tensors().items()
    }
    (weight, *_), optimizer = tensors.values(), dict(list(tensors.items())[1:])
    return ShardState(piece, weight.detach(), optimizer)


def _empty(piece: Shard, columns: Columns, device: torch.device) -> ShardState:
    rows, cols = piece.shape
    tensors = {}
    for name, column in columns.items():
        shape = (rows,) if column.is_row_wise else (rows, cols)
        tensors[name] = torch.empty(shape, dtype=column.dtype, device=device)
    (weight, *_), optimizer = tensors.values(), dict(list(tensors.items())[1:])
    return ShardState(piece, weight, optimizer)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Some rows of a passage, which travel in one round."""

    passage: Passage
    piece: Shard

    def bytes(self, columns: Columns) -> int:
        return sum(column.bytes_of(self.piece) for column in columns.values())


def _rounds(travels: Sequence[Passage], columns: Mapping[str, Columns]) -> Iterator[list[_Stretch]]:
    """Cut the passages into rounds of about `ROUND_BYTES`."""
    batch: list[_Stretch] = []
    room = ROUND_BYTES
    for passage in travels:
        rows, of = passage.piece.rows, columns[passage.piece.table]
        one = replace(passage.piece, rows=range(rows.start, rows.start + 1))
        row_bytes = _Stretch(passage, one).bytes(of)
        start = rows.start
        while start < rows.stop:
            stop = min(rows.stop, start + max(1, room // row_bytes))
            stretch = _Stretch(passage, replace(passage.piece, rows=range(start, stop)))
            batch.append(stretch)
            room -= stretch.bytes(of)
            start = stop
            if room < row_bytes:
                yield batch
                batch, room = [], ROUND_BYTES
    if batch:
        yield batch


@torch.no_grad()
def _round(
    batch: Sequence[_Stretch],
    own: Mapping[Shard, ShardState],
    coming: Mapping[Passage, ShardState],
    columns: Mapping[str, Columns],
    exchange: Exchange,
    device: torch.device,
) -> int:
    """Pass stretches on by one all_to_all; return the bytes that this rank sent."""
    rank = exchange.rank
    # messages lie in rank order, and each in the order of the batch, which all ranks share
    leaving = sorted((s for s in batch if s.passage.source == rank), key=lambda s: s.passage.target)
    arriving = sorted(
        (s for s in batch if s.passage.target == rank), key=lambda s: s.passage.source
    )
    send_splits, recv_splits = [0] * exchange.world_size, [0] * exchange.world_size
    for stretch in leaving:
        size = stretch.bytes(columns[stretch.piece.table])
        send_splits[stretch.passage.target] += size
    for stretch in arriving:
        size = stretch.bytes(columns[stretch.piece.table])
        recv_splits[stretch.passage.source] += size
    send = torch.zeros(sum(send_splits), dtype=torch.uint8, device=device)
    at = 0
    for stretch in leaving:
        part = _part(own[stretch.passage.held], stretch.piece)
        for column, into in _columns_in(send, at, stretch.piece, columns[stretch.piece.table]):
            into.copy_(part.tensors()[column])
        at += stretch.bytes(columns[stretch.piece.table])
    received = exchange.all_to_all(send, send_splits, recv_splits).wait()
    at = 0
    for stretch in arriving:
        part = _part(coming[stretch.passage], stretch.piece)
        for column, values in _columns_in(
            received, at, stretch.piece, columns[stretch.piece.table]
        ):
            part.tensors()[column].copy_(values)
        at += stretch.bytes(columns[stretch.piece.table])
    return send.numel()


def _columns_in(
    message: Tensor, at: int, piece: Shard, columns: Columns
) -> Iterator[tuple[str, Tensor]]:
    """Yield the columns of a rectangle in a message from byte `at` on, as views."""
    rows, cols = piece.shape
    for name, column in columns.items():
        count = rows * (1 if column.is_row_wise else cols)
        values = message[at : at + count * column.dtype.itemsize].view(column.dtype)
        yield name, values if column.is_row_wise else values.view(rows, cols)
        at += column.bytes_of(piece)
