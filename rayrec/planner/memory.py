"""Bytes that a layout takes on each rank: weights, optimizer state, and buffers of the exchange.

Owners hold the ids they receive and the rows and gradients of all W*B bags; every rank, as home of its own batch, holds the ids it
sends and the rows that return. Buffers of all tables live at once, as the collections share one exchange. Integers, so that adding
and removing tables is exact. Leaves out: the dense model, allocator waste. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rayrec.layout.geometry import Layout, Replicated, Shard
from rayrec.planner.optimizers import sparse_state
from rayrec.planner.work import NO_TRAFFIC, TableWork, Traffic, shard_traffic


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
    """State of one shard: values per row of the shard, or per element."""
    return len(shard.rows) * sparse_state(sparse_optimizer).row_bytes(len(shard.cols))


def owner_memory(work: TableWork, shards: Sequence[Shard], sparse_optimizer: str) -> RankMemory:
    """Bytes of owning `shards` of one table.

    Buffers: the ids as received and as grouped by slot, rows of all ranks as looked up, and their gradients in.
    """
    traffic, world = shard_traffic(work, shards), work.world_size
    stored = [] if work.off_device else shards  # rows in the host's memory take none of the GPU's
    return RankMemory(
        weight_bytes=sum(len(shard.rows) * len(shard.cols) for shard in stored) * work.element_bytes,
        optimizer_bytes=sum(optimizer_bytes(shard, sparse_optimizer) for shard in stored),
        buffer_bytes=math.ceil(world * (2 * traffic.id_bytes + 2 * traffic.row_bytes)),
    )


def home_buffer_bytes(total: Traffic, replicated: bool = False) -> int:
    """Buffers of one table on EVERY rank, as home of its batch: ids out, rows in, gradients out.

    Args:
        total: with all owners together; replicas get a copy of the ids and gradients each, and return no rows.
    """
    return math.ceil(total.id_bytes + (1 if replicated else 2) * total.row_bytes)


def layout_memory_parts(work: TableWork, layout: Layout, sparse_optimizer: str) -> tuple[dict[int, RankMemory], RankMemory]:
    """Bytes of one table on each rank that owns a part of it, and those on every rank of the world as home."""
    by_rank = shards_by_rank(layout)
    replicated = isinstance(layout, Replicated)
    total = sum((shard_traffic(work, shards) for shards in by_rank.values()), NO_TRAFFIC)
    owners = {rank: owner_memory(work, shards, sparse_optimizer) for rank, shards in by_rank.items()}
    return owners, RankMemory(buffer_bytes=home_buffer_bytes(total, replicated))


def layout_memory(work: TableWork, layout: Layout, sparse_optimizer: str) -> tuple[RankMemory, ...]:
    """Bytes of one table on every rank of the world."""
    owners, home = layout_memory_parts(work, layout, sparse_optimizer)
    return tuple(home + owners.get(rank, RankMemory()) for rank in range(work.world_size))


def shards_by_rank(layout: Layout) -> dict[int, list[Shard]]:
    """Rank -> the rectangles it owns, ranks ascending."""
    found: dict[int, list[Shard]] = {rank: [] for rank in layout.ranks}
    for shard in layout.shards(""):
        found[shard.rank].append(shard)
    return found
