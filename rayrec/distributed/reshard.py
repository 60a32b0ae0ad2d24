"""Moves tables to another plan between two steps; only what changes its owner travels.

Old and new layouts are two sets of rectangles; what stays on its rank is copied in place, the rest
goes by one all_to_all per table, so the extra memory is the new shards and one table's moving rows.
A replicated table needs no wire: every rank has it. Row-wise state follows the rules of
`rayrec.shards.overlap`.
"""

# rows and state travel as float32, which holds float16 and bfloat16 exactly

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec.checkpoint import OverlapWriter, ShardState
from rayrec.comm.exchange import Exchange
from rayrec.distributed.deployed import Deployed, deploy
from rayrec.layout import Layout, Replicated, Shard, ShardingPlan
from rayrec.optim import SparseOptimizer
from rayrec.shards.state import WEIGHT


@dataclass(frozen=True)
class Move:
    """One rectangle that leaves `source.rank` for `target.rank`."""

    source: Shard
    target: Shard
    rows: range
    cols: range


def moves(table: str, old: Layout, new: Layout) -> Iterator[Move]:
    """Give every rectangle of a table that changes its rank, in the same order on all ranks."""
    if isinstance(old, Replicated):
        return
    for source in old.shards(table):
        for target in new.shards(table):
            if source.rank != target.rank and (shared := source.intersect(target)):
                yield Move(source, target, *shared)


def _values(state: ShardState, rows: range, cols: range) -> Iterator[Tensor]:
    """Return the float32 values of a rectangle: the weight, then each state."""
    shard = state.shard
    r = slice(rows.start - shard.rows.start, rows.stop - shard.rows.start)
    c = slice(cols.start - shard.cols.start, cols.stop - shard.cols.start)
    for tensor in state.tensors().values():
        yield (tensor[r, c] if tensor.dim() == 2 else tensor[r]).detach().float().reshape(-1)


def _size(move: Move, row_wise: Mapping[str, bool]) -> int:
    return sum(len(move.rows) * (1 if one else len(move.cols)) for one in row_wise.values())


@dataclass(frozen=True)
class Moving:
    """One table on its way.

    Attributes:
        columns: name of each tensor of a shard, weight first -> whether it has one value per row.
    """

    table: str
    old: Layout
    new: Layout
    columns: Mapping[str, bool]

    @staticmethod
    def between(
        table: str, old: ShardingPlan, new: ShardingPlan, optimizer: SparseOptimizer
    ) -> Moving:
        """Return a table with its optimizer's state, from one plan to another."""
        columns = {WEIGHT: False}
        columns |= {name: per == "row" for name, per in optimizer.state_widths.items()}
        return Moving(table, old.tables[table].layout, new.tables[table].layout, columns)


def redeploy(old: Deployed, plan: ShardingPlan, lr: float | None) -> tuple[Deployed, int]:
    """Put another plan to work on all ranks, with the rows and the state of the old one.

    Args:
        lr: the learning rate that was set, or None where it is the optimizers' own.
    Returns:
        What follows from the plan, and the float32 values that this rank sent.
    Raises:
        PlanError: the plan does not fit the tables or the number of ranks.
        CommError: a peer is gone; the old shards are then still whole.
    """
    world = old.world
    # a rank may have had no shard until now, and learns the number of updates from the others
    box = torch.tensor([old.iteration], device=world.device)
    boxes = world.exchange.all_gather(box, [1] * world.exchange.world_size).wait()
    iteration = max(int(box) for box in boxes)
    new = deploy(world, plan, old)
    moving = []
    for table in (table for spec in world.specs for table in spec.tables):
        optimizer = world.optimizers[table.name]
        moving.append(Moving.between(table.name, old.plan, plan, optimizer))
    states = old.shard_states(), new.shard_states()
    sent = move_tables(moving, *states, world.exchange, world.device)
    for lookup in new.lookups.values():
        lookup.iteration = iteration
        if lr is not None:
            lookup.set_learning_rate(lr)
    return new, sent


def move_tables(
    tables: Sequence[Moving],
    old: Sequence[ShardState],
    new: Sequence[ShardState],
    exchange: Exchange,
    device: torch.device,
) -> int:
    """Fill this rank's new shards; every rank calls it with the same tables in the same order.

    Args:
        old, new: this rank's shards. New ones that share the memory of an old one are what they
            were.
    Returns:
        Float32 values that this rank sent.
    Raises:
        CommError: a peer is gone.
    """
    sent = 0
    for moving in tables:
        have = [state for state in old if state.shard.table == moving.table]
        want = [state for state in new if state.shard.table == moving.table]
        # a shard that stays where it was has nothing to receive
        kept = {state.weight.data_ptr() for state in have}
        fresh = [state for state in want if state.weight.data_ptr() not in kept]
        sent += _move(moving, have, fresh, exchange, device)
    return sent


@torch.no_grad()
def _move(
    moving: Moving,
    have: Sequence[ShardState],
    want: Sequence[ShardState],
    exchange: Exchange,
    device: torch.device,
) -> int:
    columns = moving.columns
    writer, rank = OverlapWriter(), exchange.rank
    for target in want:
        for source in have:
            writer.put(source.shard.rows, source.shard.cols, source.tensors(), target)
    # messages lie in rank order, and each in the order of `moves`, which all ranks share
    plan = list(moves(moving.table, moving.old, moving.new))
    leaving = sorted([m for m in plan if m.source.rank == rank], key=lambda m: m.target.rank)
    coming = sorted([m for m in plan if m.target.rank == rank], key=lambda m: m.source.rank)
    send_splits, recv_splits = [0] * exchange.world_size, [0] * exchange.world_size
    sources = {state.shard: state for state in have}
    parts: list[Tensor] = []
    for m in leaving:
        parts += _values(sources[m.source], m.rows, m.cols)
        send_splits[m.target.rank] += _size(m, columns)
    for m in coming:
        recv_splits[m.source.rank] += _size(m, columns)
    send = torch.cat(parts) if parts else torch.empty(0, device=device)
    received = exchange.all_to_all(send, send_splits, recv_splits).wait()
    targets = {state.shard: state for state in want}
    at = 0
    for m in coming:
        data = {}
        for name, one in columns.items():
            count = len(m.rows) * (1 if one else len(m.cols))
            part = received[at : at + count]
            data[name] = part if one else part.view(len(m.rows), len(m.cols))
            at += count
        writer.put(m.rows, m.cols, data, targets[m.target])
    writer.finish(want)
    return send.numel()
