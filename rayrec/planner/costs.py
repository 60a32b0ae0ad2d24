"""Seconds of a training step on the rank that owns some shards: any layout is priced from its rectangles, no branch per kind.

A rank pays for the ids it receives, the rows it reads and pools, the rows it sends, the gradients it receives, and the fused update.
Exchanges are priced on the owner's side: all owners together send what all homes together receive, and homes are even, so the
slowest owner is never faster than a home. Bytes / bandwidth, plus a fixed time per slot so that needless splits of small tables
lose. Leaves out: overlap of steps, caches, skewed ids, the dense model. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from rayrec.errors import ConfigError
from rayrec.layout.geometry import Layout, Replicated, Shard
from rayrec.layout.topology import Topology
from rayrec.planner.work import ID_BYTES, ROW_ELEMENT_BYTES, TableWork, returned_rows, shard_traffic

LINE_BYTES = 64  # memory moves in lines: a row of 16 bytes costs as much as one of 64
SORT_BYTES = 8 * ID_BYTES  # per id in the backward: a radix sort reads and writes (id, bag) pairs a few times
SLOT_S = 2e-6  # a feature in a shard, on its owner: kernel arguments, a slice, a copy
HOME_SLOT_S = 0.2e-6  # the same slot on each rank of the world, which sends ids to it and combines its rows
COLLECTIVES = 4  # lengths, ids, rows, gradients

SPARSE_OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad")


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


def check_optimizer(name: str) -> None:
    """Raise ConfigError unless `name` is a sparse optimizer the planner knows."""
    if name not in SPARSE_OPTIMIZERS:
        raise ConfigError(f"sparse_optimizer={name!r} is unknown; the planner knows {', '.join(SPARSE_OPTIMIZERS)}.")


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


@dataclass(frozen=True, slots=True)
class CostModel:
    """Prices for one topology and sparse optimizer."""

    topology: Topology
    sparse_optimizer: str = "rowwise_adagrad"

    def owner_cost(self, work: TableWork, shards: Sequence[Shard], rank: int, replicated: bool = False) -> StepCost:
        """Price of owning `shards` of one table on `rank`.

        Args:
            replicated: every rank holds these shards, so lookups are at home and only ids and gradients of others arrive.
        """
        topology, world = self.topology, work.world_size
        near = len(topology.hosts[topology.host_of[rank]]) - 1
        wire_s = near / topology.intra_host_bw + (world - 1 - near) / topology.inter_host_bw  # one byte from every peer
        traffic = shard_traffic(work, shards)
        sources = 1 if replicated else world
        read = update = 0.0
        for shard in shards:
            rows, width = len(shard.rows), len(shard.cols)
            ids = work.ids * rows / work.rows  # from one source
            row_line = _lines(width * work.element_bytes)
            pooled = 2 * returned_rows(work, shard) * width * ROW_ELEMENT_BYTES  # written here, read where it is combined
            read += sources * (ids * (ID_BYTES + row_line) + pooled)
            touched = -rows * math.expm1(-world * ids / rows)  # distinct rows among all ids
            state = {"sgd": 0, "rowwise_adagrad": LINE_BYTES, "adagrad": _lines(width * 4)}[self.sparse_optimizer]
            gradients = world * ids * _lines(width * ROW_ELEMENT_BYTES)
            update += world * ids * SORT_BYTES + gradients + 2 * touched * (row_line + state)
        return StepCost(
            input_s=traffic.id_bytes * wire_s,
            lookup_s=read / topology.memory_bw,
            output_s=0.0 if replicated else traffic.row_bytes * wire_s,
            gradient_s=traffic.row_bytes * wire_s,
            update_s=update / topology.memory_bw,
            overhead_s=len(shards) * work.features * (SLOT_S + world * HOME_SLOT_S),
        )

    def price(self, work: TableWork, layout: Layout) -> dict[int, StepCost]:
        """Price of a layout on each rank that owns a part of it."""
        by_rank: dict[int, list[Shard]] = {}
        for shard in layout.shards(""):
            by_rank.setdefault(shard.rank, []).append(shard)
        replicated = isinstance(layout, Replicated)
        return {rank: self.owner_cost(work, shards, rank, replicated) for rank, shards in sorted(by_rank.items())}

    def fixed_cost(self) -> StepCost:
        """What every rank pays once a step: the latency of the collectives."""
        return StepCost(overhead_s=COLLECTIVES * self.topology.latency_s if self.topology.world_size > 1 else 0.0)
