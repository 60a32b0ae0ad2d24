"""Seconds of a training step: any layout is priced from its rectangles, with no branch per kind.

As owner, a rank pays for the ids it receives, the rows it reads and pools, the rows it sends, the gradients it receives, and the fused
update. As home of its own rows of the batch it pays for packing ids and gradients for every owner and for joining what they return: a
cost that all ranks share alike, and that wide splits raise. The wire is priced on the owner's side: all owners together send what all
homes together receive, and homes are even, so the slowest owner is never faster than a home. Bytes / bandwidth, plus a fixed time per
slot. Rows of a host that are summed before they go home (`routes`) cross between hosts once. Leaves out: overlap of steps, caches,
skewed ids, the two more collectives of that route, the dense model. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from rayrec.layout.geometry import Layout, Replicated, Shard
from rayrec.layout.topology import Topology
from rayrec.planner.memory import shards_by_rank
from rayrec.planner.optimizers import sparse_state
from rayrec.planner.routes import summed_ranks
from rayrec.planner.work import ID_BYTES, NO_TRAFFIC, ROW_ELEMENT_BYTES, TableWork, Traffic, returned_rows, shard_traffic

LINE_BYTES = 64  # memory moves in lines: a row of 16 bytes costs as much as one of 64
SORT_BYTES = 8 * ID_BYTES  # per id in the backward: a radix sort reads and writes (id, bag) pairs a few times
SLOT_S = 2e-6  # a feature in a shard, on its owner: kernel arguments, a slice, a copy
HOME_SLOT_S = 0.2e-6  # the same slot on every rank of the world, which sends ids to it and joins its rows
HOST_LINK_BW = 20e9  # bytes/s at which a GPU reads rows of its host's memory: PCIe 4.0 x16, less its protocol
COLLECTIVES = 4  # headers, ids, rows, gradients


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step on one rank, by part; adds up over tables."""

    input_s: float = 0.0
    lookup_s: float = 0.0
    output_s: float = 0.0
    gradient_s: float = 0.0
    update_s: float = 0.0
    overhead_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All parts together."""
        return self.input_s + self.lookup_s + self.output_s + self.gradient_s + self.update_s + self.overhead_s

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


@dataclass(frozen=True, slots=True)
class CostModel:
    """Prices for one topology and sparse optimizer."""

    topology: Topology
    sparse_optimizer: str = "rowwise_adagrad"

    def owner_cost(self, work: TableWork, shards: Sequence[Shard], rank: int, replicated: bool = False, summed: int = 1) -> StepCost:
        """Price of owning `shards` of one table on `rank`.

        Args:
            summed: ranks of this host that sum their rows before these go home, see `routes`.
            replicated: every rank holds these shards: all see all ids and make all updates, and no rows travel.
        """
        topology, world = self.topology, work.world_size
        near = len(topology.hosts[topology.host_of[rank]]) - 1
        wire_s = near / topology.intra_host_bw + (world - 1 - near) / topology.inter_host_bw  # one byte from every peer
        rows_s, copies, gradient_copies = wire_s, 3, 2  # pooled rows are written, then copied for the wire; gradients scaled in place
        if summed > 1:
            hosts = world // summed
            rows_s = hosts * (summed - 1) / topology.intra_host_bw + (hosts - 1) / topology.inter_host_bw
            copies, gradient_copies = 5, 5  # and summed; handed on to every rank of the host
        elif replicated:
            copies = 1
        traffic = shard_traffic(work, shards)
        state = sparse_state(self.sparse_optimizer)
        slower = topology.memory_bw / HOST_LINK_BW if work.off_device else 1.0  # of rows and state, in bytes of device memory
        read = 2.0 * world * traffic.id_bytes  # sorted by slot on arrival
        update = 0.0
        for shard in shards:
            rows, width = len(shard.rows), len(shard.cols)
            ids = work.ids * rows / work.rows  # from one source
            row_line = _lines(width * work.element_bytes)
            values = returned_rows(work, shard) * width * ROW_ELEMENT_BYTES
            read += world * (ids * (ID_BYTES + row_line * slower) + copies * values)
            touched = -rows * math.expm1(-world * ids / rows)  # distinct rows among all ids
            gradients = world * (gradient_copies * values + ids * _lines(width * ROW_ELEMENT_BYTES))
            update += world * ids * SORT_BYTES + gradients + 2 * touched * slower * (row_line + _lines(state.row_bytes(width)))
        return StepCost(
            input_s=traffic.id_bytes * wire_s,
            lookup_s=read / topology.memory_bw,
            output_s=0.0 if replicated else traffic.row_bytes * rows_s,
            gradient_s=traffic.row_bytes * rows_s,
            update_s=update / topology.memory_bw,
            overhead_s=len(shards) * work.features * SLOT_S,
        )

    def home_cost(self, work: TableWork, total: Traffic, slots: int, replicated: bool = False, summed: int = 1) -> StepCost:
        """Price of one table on EVERY rank, as home of its batch.

        Args:
            total: with all owners together. slots: rectangles, of all owners.
        """
        byte_s = 2 / self.topology.memory_bw  # read and written
        return StepCost(
            input_s=total.id_bytes * byte_s,
            output_s=total.row_bytes / (work.world_size if replicated else summed) * byte_s,
            gradient_s=total.row_bytes / summed * byte_s,
            overhead_s=slots * work.features * HOME_SLOT_S,
        )

    def layout_home_cost(self, work: TableWork, layout: Layout) -> StepCost:
        """`home_cost` of a real layout."""
        by_rank = shards_by_rank(layout)
        total = sum((shard_traffic(work, shards) for shards in by_rank.values()), NO_TRAFFIC)
        return self.home_cost(work, total, sum(map(len, by_rank.values())), isinstance(layout, Replicated), self.summed(work, layout))

    def summed(self, work: TableWork, layout: Layout) -> int:
        """Ranks of a host that sum the rows of this layout before they go home."""
        return summed_ranks(layout, self.topology.hosts) if work.pooled else 1

    def price(self, work: TableWork, layout: Layout) -> dict[int, StepCost]:
        """Price of a layout on each rank that owns a part of it, as owner."""
        replicated, summed = isinstance(layout, Replicated), self.summed(work, layout)
        known: dict[tuple[object, ...], StepCost] = {}  # most pieces are alike
        found = {}
        for rank, shards in shards_by_rank(layout).items():
            near = len(self.topology.hosts[self.topology.host_of[rank]])
            key = (near, len({shard.rows for shard in shards}), *(shard.shape for shard in shards))
            if key not in known:
                known[key] = self.owner_cost(work, shards, rank, replicated, summed)
            found[rank] = known[key]
        return found

    def fixed_cost(self) -> StepCost:
        """What every rank pays once a step: the latency of the collectives."""
        return StepCost(overhead_s=COLLECTIVES * self.topology.latency_s if self.topology.world_size > 1 else 0.0)
