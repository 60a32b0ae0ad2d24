"""Passes the shards of one plan on to another, for the same ranks, more of them or fewer.

Both worlds meet as one: ranks of the old world hold shards, ranks of the new one take shards, and
most do both. What a rank holds and takes stays where it is. The rest travels once, byte for byte,
in rounds of bounded size; where several ranks hold the same rows, the takers share them out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from rayrec.comm.exchange import Exchange
from rayrec.layout import Shard, ShardingPlan
from rayrec.shards.overlap import within
from rayrec.shards.state import WEIGHT, Gather, ShardState

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

    def shape_of(self, shard: Shard) -> tuple[int, ...]:
        """Shape of the values of a rectangle."""
        return shard.shape[:1] if self.is_row_wise else shard.shape

    def bytes_of(self, shard: Shard) -> int:
        """Bytes of a rectangle on the wire."""
        size = prod(self.shape_of(shard)) * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT


Columns = Mapping[str, RowType]  # by name


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
    tensors = {name: _cut(tensor, state.shard, piece) for name, tensor in state.tensors().items()}
    return ShardState(piece, tensors.pop(WEIGHT).detach(), tensors)


def _cut(tensor: Tensor, whole: Shard, piece: Shard) -> Tensor:
    rows, cols = within(piece.rows, whole.rows), within(piece.cols, whole.cols)
    return tensor[rows, cols] if tensor.dim() == 2 else tensor[rows]


def _empty(piece: Shard, columns: Columns, device: torch.device) -> ShardState:
    tensors = {
        name: torch.empty(column.shape_of(piece), dtype=column.dtype, device=device)
        for name, column in columns.items()
    }
    return ShardState(piece, tensors.pop(WEIGHT), tensors)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Some rows of a passage, which travel in one round, and their bytes on the wire."""

    passage: Passage
    piece: Shard
    size: int


def _rounds(travels: Sequence[Passage], columns: Mapping[str, Columns]) -> Iterator[list[_Stretch]]:
    """Cut the passages into rounds of about `ROUND_BYTES`."""
    batch: list[_Stretch] = []
    room = ROUND_BYTES
    for passage in travels:
        start, stop = passage.piece.rows.start, passage.piece.rows.stop
        row_bytes = _stretch(passage, start, start + 1, columns).size
        while start < stop:
            # a row is the least, also where it alone is larger than a round
            most = max(1, room // row_bytes)
            stretch = _stretch(passage, start, min(stop, start + most), columns)
            batch.append(stretch)
            room -= stretch.size
            start = stretch.piece.rows.stop
            if room < row_bytes:
                yield batch
                batch, room = [], ROUND_BYTES
    if batch:
        yield batch


def _stretch(passage: Passage, start: int, stop: int, columns: Mapping[str, Columns]) -> _Stretch:
    piece = replace(passage.piece, rows=range(start, stop))
    return _Stretch(
        passage, piece, sum(column.bytes_of(piece) for column in columns[piece.table].values())
    )


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
        send_splits[stretch.passage.target] += stretch.size
    for stretch in arriving:
        recv_splits[stretch.passage.source] += stretch.size
    send = torch.zeros(sum(send_splits), dtype=torch.uint8, device=device)
    for stretch, column, into in _columns_in(send, leaving, columns):
        held = own[stretch.passage.held]
        into.copy_(_cut(held.tensors()[column], held.shard, stretch.piece))
    received = exchange.all_to_all(send, send_splits, recv_splits).wait()
    for stretch, column, values in _columns_in(received, arriving, columns):
        taken = coming[stretch.passage]
        _cut(taken.tensors()[column], taken.shard, stretch.piece).copy_(values)
    return send.numel()


def _columns_in(
    message: Tensor, stretches: Sequence[_Stretch], columns: Mapping[str, Columns]
) -> Iterator[tuple[_Stretch, str, Tensor]]:
    """Yield the columns of stretches that follow each other in a message, as views."""
    at = 0
    for stretch in stretches:
        for name, column in columns[stretch.piece.table].items():
            shape = column.shape_of(stretch.piece)
            values = message[at : at + prod(shape) * column.dtype.itemsize].view(column.dtype)
            yield stretch, name, values.view(shape)
            at += column.bytes_of(stretch.piece)
