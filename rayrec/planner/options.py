"""Candidates with their prices: what a table adds to each rank in seconds and bytes, wherever it goes.

A piece of a template costs the same on all ranks whose hosts have equally many ranks, so a candidate is priced once per size of host
instead of once per placement. Pieces of one shape are priced once. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayrec.layout.geometry import Replicated, Shard
from rayrec.planner.candidates import Candidate
from rayrec.planner.costs import CostModel
from rayrec.planner.memory import home_buffer_bytes, owner_memory
from rayrec.planner.work import TableWork


@dataclass(frozen=True, slots=True)
class Option:
    """A candidate with its prices.

    Attributes:
        seconds: seconds[locality][position], where a locality is a distinct number of ranks per host.
        num_bytes: owner's bytes by position. home_bytes: on every rank of the world.
    """

    candidate: Candidate
    seconds: dict[int, tuple[float, ...]]
    num_bytes: tuple[int, ...]
    home_bytes: int

    @property
    def most_bytes(self) -> int:
        """What the rank with the largest piece must have free."""
        return max(self.num_bytes) + self.home_bytes


def price_options(work: TableWork, candidates: Sequence[Candidate], costs: CostModel) -> tuple[Option, ...]:
    """Price every candidate of one table, once for each number of ranks per host."""
    example = {len(host): host[0] for host in reversed(costs.topology.hosts)}  # a rank of each locality
    out = []
    for candidate in candidates:
        by_position: list[list[Shard]] = [[] for _ in range(candidate.num_ranks)]
        for shard in candidate.template.shards(""):
            by_position[shard.rank].append(shard)
        replicated = isinstance(candidate.template, Replicated)
        known: dict[tuple[tuple[int, int], ...], tuple[list[float], int]] = {}  # by shapes: most pieces are alike
        seconds: dict[int, list[float]] = {size: [] for size in example}
        num_bytes = []
        for shards in by_position:
            key = (*(shard.shape for shard in shards), (len({shard.rows for shard in shards}), 0))
            if key not in known:
                known[key] = (
                    [costs.owner_cost(work, shards, rank, replicated).total_s for rank in example.values()],
                    owner_memory(work, shards, costs.sparse_optimizer, replicated).total,
                )
            prices, size_bytes = known[key]
            for size, price in zip(example, prices, strict=True):
                seconds[size].append(price)
            num_bytes.append(size_bytes)
        home = home_buffer_bytes(work, by_position, replicated)
        out.append(Option(candidate, {size: tuple(values) for size, values in seconds.items()}, tuple(num_bytes), home))
    return tuple(out)
