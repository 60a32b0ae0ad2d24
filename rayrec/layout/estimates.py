"""Predictions of the planner: memory and time per rank, and why each table has its kind.

Plain data that travels with a `ShardingPlan`, so that a report can be printed anywhere. It is a
prediction: nothing in the runtime reads it and two plans that differ only here are equal. Standard
library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rayrec.layout.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEstimate:
    """Predicted bytes and seconds of a training step on one rank.

    Attributes:
        weight_bytes, optimizer_bytes: the shards of this rank and their optimizer state.
        buffer_bytes: ids, rows and gradients in exchange, as owner and as home of the batch.
        input_s: ids received.
        lookup_s: rows read and pooled.
        output_s: rows sent. gradient_s: row gradients received.
        update_s: fused backward and optimizer.
        overhead_s: fixed time of a step on every rank, latency of the collectives included.
    """

    weight_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    input_s: float
    lookup_s: float
    output_s: float
    gradient_s: float
    update_s: float
    overhead_s: float

    @property
    def memory_bytes(self) -> int:
        """All bytes of this rank."""
        return self.weight_bytes + self.optimizer_bytes + self.buffer_bytes

    @property
    def exchange_s(self) -> float:
        """Seconds on the wire."""
        return self.input_s + self.output_s + self.gradient_s

    @property
    def total_s(self) -> float:
        """Seconds of the step's embedding part."""
        return self.exchange_s + self.lookup_s + self.update_s + self.overhead_s


@dataclass(frozen=True, kw_only=True, slots=True)
class TableEstimate:
    """The reason for a table's layout.

    Attributes:
        kind: name of its layout.
        data_type: storage of its rows, such as "FP32".
        weight_bytes: bytes of all its shards (a replicated table counts every copy), on the
            ranks' devices.
        why: "least work", "even ranks" (more work, but a faster slowest rank), "to fit" (off the
            device, which has no room), "only fit" or "forced" (the only kind allowed).
        work_s: seconds of a step summed over ranks.
        runner_up, runner_up_work_s: the next kind that fits and its work, or None.
    """

    kind: str
    data_type: str
    weight_bytes: int
    why: str
    work_s: float
    runner_up: str | None
    runner_up_work_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanEstimates:
    """Predictions for a whole plan.

    Attributes:
        topology: the machine the prices are for.
        batch_size: rows per rank and step.
        sparse_optimizer: name of the fused optimizer.
        ranks: one per rank. tables: one per table.
    """

    topology: Topology
    batch_size: int
    sparse_optimizer: str
    ranks: tuple[RankEstimate, ...]
    tables: Mapping[str, TableEstimate]

    @property
    def slowest_rank(self) -> int:
        """The rank that a step waits for."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].total_s)

    @property
    def step_s(self) -> float:
        """Seconds of the slowest rank."""
        return self.ranks[self.slowest_rank].total_s

    @property
    def imbalance(self) -> float:
        """Seconds of the slowest rank over those of the mean rank; 1 where nothing takes time."""
        total_s = sum(rank.total_s for rank in self.ranks)
        return self.step_s * len(self.ranks) / total_s if total_s else 1.0

    @property
    def fullest_rank(self) -> int:
        """The rank with the most memory in use."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].memory_bytes)
