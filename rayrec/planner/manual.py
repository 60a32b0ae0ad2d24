"""Every table by one named kind: for tests, comparisons, and those who know their cluster better than any price.

Where a kind leaves a choice of ranks (table_wise: any rank, table_row_wise: any host), larger tables go first, to the ranks with
the fewest bytes of weights. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

from rayrec.errors import PlanError
from rayrec.layout.plan import ShardingPlan, TablePlacement
from rayrec.layout.tables import BaseEmbeddingConfig, check_tables
from rayrec.layout.topology import Topology
from rayrec.layout.units import format_bytes
from rayrec.planner.candidates import Candidate, enumerate_candidates
from rayrec.planner.constraints import check_kinds


def manual_plan(tables: Sequence[BaseEmbeddingConfig], kind: str, topology: Topology) -> ShardingPlan:
    """Place every table by `kind`, split as widely as the kind allows, weights balanced greedily.

    A table too small to cut gets fewer blocks. The plan has no estimates.

    Raises:
        PlanError: weights alone exceed a rank's memory, or the kind has no meaning on this topology.
        ConfigError: the kind is unknown, or the tables contradict themselves.
    """
    check_tables(tables)
    check_kinds([kind])
    used = [0] * topology.world_size
    placements: dict[str, TablePlacement] = {}
    for table in sorted(tables, key=_weight_bytes, reverse=True):
        widest: dict[int, Candidate] = {}
        candidates = enumerate_candidates(table, topology, [kind])
        if not candidates:
            sizes = [len(host) for host in topology.hosts]
            raise PlanError(f"{kind} has no meaning for table {table.name!r} on hosts of {sizes} ranks; use row_wise or column_wise.")
        for candidate in candidates:  # by size of host
            size = len(candidate.sites[0])
            if size not in widest or candidate.num_ranks > widest[size].num_ranks:
                widest[size] = candidate
        places = [(candidate, site) for candidate in widest.values() for site in candidate.sites]
        candidate, site = min(places, key=lambda place: (sum(used[rank] for rank in place[1]) / len(place[1]), place[1]))
        ranks = sorted(sorted(site, key=lambda rank: (used[rank], rank))[: candidate.num_ranks])
        layout = candidate.place(ranks)
        placements[table.name] = TablePlacement(layout)
        for shard in layout.shards(table.name):
            used[shard.rank] += len(shard.rows) * len(shard.cols) * table.data_type.num_bytes
    for rank, (taken, limit) in enumerate(zip(used, topology.memory_bytes, strict=True)):
        if taken > limit:
            raise PlanError(
                f"weights by {kind} take {format_bytes(taken)} on rank {rank}, which has {format_bytes(limit)}. "
                f"Use another kind, fp16 tables or more ranks, or let EmbeddingShardingPlanner choose."
            )
    ordered = {table.name: placements[table.name] for table in tables}
    return ShardingPlan(world_size=topology.world_size, tables=ordered, hosts=topology.hosts)


def _weight_bytes(table: BaseEmbeddingConfig) -> int:
    return table.num_embeddings * table.embedding_dim * table.data_type.num_bytes
