"""Bytes that a layout takes on each rank: weights, optimizer state, and buffers of the exchange.

Owners hold the ids they receive and the rows and gradients of all W*B bags; every rank, as home of its own batch, holds the ids it
sends and the rows that return. Buffers of all tables live at once, as the collections share one exchange. Integers, so that adding
and removing tables is exact. Leaves out: the dense model, allocator waste. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rayrec.layout.geometry import Layout, Replicated, Shard
from rayrec.planner.work import TableWork, shard_traffic

STATE_BYTES = 4  # optimizer state is float32


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one rank."""

    weight_bytes: int = 0
    optimizer_bytes: int = 0
    buffer_bytes: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return self.weight_bytes + self.optimizer_bytes + self.buffer_bytes

    def __add__(self, other: RankMemory) -> RankMemory:
        return RankMemory(
            self.weight_bytes + other.weight_bytes,
            self.optimizer_bytes + other.optimizer_bytes,
            self.buffer_bytes + other.buffer_bytes,
        )


def optimizer_bytes(shard: Shard, sparse_optimizer: str) -> int:
    """State of one shard: none, one value per row of the shard, or one per element."""
    per_row = {"sgd": 0, "rowwise_adagrad": 1, "adagrad": len(shard.cols)}[sparse_optimizer]
    return len(shard.rows) * per_row * STATE_BYTES


def owner_memory(work: TableWork, shards: Sequence[Shard], sparse_optimizer: str, replicated: bool = False) -> RankMemory:
    """Bytes of owning `shards` of one table.

    Buffers: the ids as received and as grouped by slot, rows out (of this rank alone when replicated), and their gradients in.
    """
    traffic, world = shard_traffic(work, shards), work.world_size
    rows_out = 1 if replicated else world
    return RankMemory(
        weight_bytes=sum(len(shard.rows) * len(shard.cols) for shard in shards) * work.element_bytes,
        optimizer_bytes=sum(optimizer_bytes(shard, sparse_optimizer) for shard in shards),
        buffer_bytes=math.ceil(2 * world * traffic.id_bytes + (rows_out + world) * traffic.row_bytes),
    )


def home_buffer_bytes(work: TableWork, owners: Iterable[Sequence[Shard]], replicated: bool = False) -> int:
    """Buffers of one table on EVERY rank, as home of its batch: ids out, rows in, gradients out, once per owner.

    A replicated table's ids and gradients are sent from one buffer to all, and no rows come in.
    """
    parts = [shard_traffic(work, shards) for shards in owners]
    if replicated:
        return math.ceil(parts[0].id_bytes + parts[0].row_bytes)
    return math.ceil(sum(part.id_bytes + 2 * part.row_bytes for part in parts))


def layout_memory(work: TableWork, layout: Layout, sparse_optimizer: str) -> tuple[RankMemory, ...]:
    """Bytes of one table on every rank of the world."""
    by_rank: dict[int, list[Shard]] = {}
    for shard in layout.shards(""):
        by_rank.setdefault(shard.rank, []).append(shard)
    replicated = isinstance(layout, Replicated)
    home = RankMemory(buffer_bytes=home_buffer_bytes(work, by_rank.values(), replicated))
    return tuple(
        home + owner_memory(work, by_rank[rank], sparse_optimizer, replicated) if rank in by_rank else home
        for rank in range(work.world_size)
    )
