"""Bytes that a layout takes on each rank: weights, optimizer state, and buffers of a step.

Owners group the ids they receive, sort them for the update, and hold the rows and the gradients of
all W*B bags, and what of both is under way to other ranks; the exchange keeps two of its largest
messages. Every rank, as home of its own batch, sends ids, joins the rows that return, and holds
that output and its gradient; where rows are read in place, it looks up its output itself and holds
the gradient once more, for all to read. Rows and gradients that are coded on the wire have two
copies more at either end. Buffers of all tables live at once, as the collections share one
exchange; what is freed in between is kept for the next step, so all of them count (`python -m
benchmarks.memory` compares with real ranks). Integers, so that adding and removing tables is exact.
Leaves out: the dense model, batches that wait, what the process takes without any table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rayrec.layout.geometry import Layout, Shard
from rayrec.planner.work import (
    ID_BYTES,
    ROW_ELEMENT_BYTES,
    WEIGHT_BYTES,
    TableWork,
    Traffic,
    layout_traffic,
    returned_rows,
    row_blocks,
    shard_traffic,
    shards_by_rank,
)
from rayrec.spec.optimizers import optimizer_class

# per id in the backward: (id, bag) pairs and room to sort them, as FBGEMM's CPU kernel and torch's
# sort take
SORT_BYTES = 20
CACHE_SET = 32  # rows of a cache come in sets of so many
CACHE_ROW_BYTES = 16  # per row of a cache: whose it is, and when it was used last
CACHED_ROW_BYTES = 4  # per row of a table with a cache: its table
CACHE_ID_BYTES = 20  # per id of a step: its row in the cache, and what finds the distinct ones
# times an output read in place: itself and its gradient, holes that malloc leaves beside them, what
# all ranks read
IN_PLACE_ROWS = 5
OFFSET_BYTES = 12  # per bag: an offset, and the length it was made from


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


def _device_bytes(work: TableWork, shard: Shard, sparse_optimizer: str) -> tuple[int, int]:
    """Weights and state of one shard on the rank's device, as FBGEMM lays them out."""
    rows, width = len(shard.rows) * work.copies, len(shard.cols)
    optimizer = optimizer_class(work.optimizer or sparse_optimizer)
    row_bytes = width * work.element_bytes
    if not work.off_device:
        return rows * row_bytes, rows * (optimizer.state_bytes(width) + work.id_bytes)
    cache = 0
    if work.cached:
        held = -(-math.ceil(rows * (work.storage.load_factor or 0)) // CACHE_SET) * CACHE_SET
        cache = held * (row_bytes + CACHE_ROW_BYTES) + rows * CACHED_ROW_BYTES
    # States per row stay on the device, those per element go with the rows.
    return cache, rows * optimizer.state_bytes(0)


def owner_memory(
    work: TableWork, shards: Sequence[Shard], sparse_optimizer: str, summed: int = 1
) -> RankMemory:
    """Bytes of owning `shards` of one table.

    Buffers: ids and lengths grouped by slot and ids sorted; rows of all ranks as looked up, and
    their gradients; of both what goes to or comes from other ranks, twice.

    Args:
        summed: see `returned_rows`.
    """
    world = work.world_size
    stored = [_device_bytes(work, shard, sparse_optimizer) for shard in shards]
    per_id = ID_BYTES + SORT_BYTES + WEIGHT_BYTES * work.weighted + CACHE_ID_BYTES * work.cached
    ids = world * work.ids * per_id * sum(len(shard.rows) for shard in shards) / work.rows
    bags: float = work.bags * len(shards)
    if work.pooled:
        bags = sum(returned_rows(work, shard, summed) for shard in shards)
    offsets = world * bags * OFFSET_BYTES
    rows = 0.0  # times the rows of one source rank
    if not work.in_place:
        rows = 2 * world + 2 * (world - 1) + world * sum(coding.copies for coding in work.wire)
    row_bytes = shard_traffic(work, shards, summed).row_bytes
    return RankMemory(
        weight_bytes=sum(weights for weights, _ in stored),
        optimizer_bytes=sum(state for _, state in stored),
        buffer_bytes=math.ceil(ids + offsets + rows * row_bytes),
    )


def home_buffer_bytes(work: TableWork, total: Traffic, blocks: int) -> int:
    """Buffers of one table on EVERY rank, as home of its batch.

    They hold ids that leave, rows that are joined, the output and its gradient. The last three are
    of one size; where rows are read in place, there are `IN_PLACE_ROWS` of that size.

    Args:
        total: traffic with all owners together.
        blocks: row blocks that ids are sorted into before they leave.
    """
    sorted_ids = work.ids * ID_BYTES if blocks > 1 and (work.pooled or not work.in_place) else 0
    rows = (work.bags if work.pooled else work.ids) * (IN_PLACE_ROWS if work.in_place else 3)
    coded = total.row_bytes * sum(coding.copies for coding in work.wire)
    return math.ceil(2 * total.id_bytes + sorted_ids + rows * work.dim * ROW_ELEMENT_BYTES + coded)


def layout_memory(
    work: TableWork, layout: Layout, sparse_optimizer: str, summed: int = 1
) -> tuple[dict[int, RankMemory], RankMemory]:
    """Bytes of one table on each rank that owns a part of it, and on every rank as home."""
    by_rank = shards_by_rank(layout)
    total = layout_traffic(work, by_rank, summed)
    owners = {
        rank: owner_memory(work, shards, sparse_optimizer, summed)
        for rank, shards in by_rank.items()
    }
    home = home_buffer_bytes(work, total, row_blocks(layout))
    return owners, RankMemory(buffer_bytes=home)
