"""Every table by one named kind: for comparisons, and for those who know their cluster.

Where a kind leaves a choice of ranks (table_wise: any rank, table_row_wise: any host), the tables
with most work go first, to the ranks with least: lookups and exchange, not bytes, decide how long a
step takes. Only where that exceeds a rank's memory do bytes decide. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

from rayrec.errors import PlanError
from rayrec.fields.typed import check_argument
from rayrec.layout.plan import ShardingPlan, TablePlacement
from rayrec.layout.tables import BaseEmbeddingConfig, check_tables
from rayrec.layout.topology import Topology
from rayrec.layout.units import format_bytes
from rayrec.planner.candidates import enumerate_candidates, find_sites
from rayrec.planner.constraints import NO_CONSTRAINTS, check_kinds
from rayrec.planner.costs import CostModel
from rayrec.planner.greedy import place
from rayrec.planner.options import Item, Option
from rayrec.planner.pricing import price_options
from rayrec.planner.search import NO_LIMIT
from rayrec.planner.work import table_work

BATCH_SIZE = 2048  # rows per rank; one id per bag. Only ratios between tables matter


def manual_plan(
    tables: Sequence[BaseEmbeddingConfig], kind: str, topology: Topology
) -> ShardingPlan:
    """Place every table by `kind`, split as widely as the kind allows, work balanced greedily.

    A table too small to cut gets fewer blocks. The plan has no estimates.

    Raises:
        PlanError: weights alone exceed a rank's memory, or the kind has no meaning on this
            topology.
        ConfigError: the kind is unknown, or the tables contradict themselves.
    """
    check_argument("manual_plan", "tables", tables, Sequence[BaseEmbeddingConfig])
    check_argument("manual_plan", "kind", kind, str)
    check_tables(tables)
    check_kinds([kind])
    items = [Item((i,), _widest(table, kind, topology)) for i, table in enumerate(tables)]
    # Work decides where tables lie; bytes only where that exceeds a rank's memory.
    for by_bytes in (False, True):
        packing = place(items, topology, [NO_LIMIT] * topology.world_size, by_bytes)
        placed: dict[str, TablePlacement] = {}
        used = [0] * topology.world_size
        for i, table in enumerate(tables):
            (layout,) = packing.choices[i].layouts
            placed[table.name] = TablePlacement(layout)
            for shard in layout.shards(table.name):
                used[shard.rank] += len(shard.rows) * len(shard.cols) * table.data_type.num_bytes
        if all(taken <= limit for taken, limit in zip(used, topology.memory_bytes, strict=True)):
            world = topology.world_size
            return ShardingPlan(world_size=world, tables=placed, hosts=topology.hosts)
    rank = max(range(topology.world_size), key=lambda r: used[r] - topology.memory_bytes[r])
    raise PlanError(
        f"weights by {kind} take {format_bytes(used[rank])} on rank {rank}, which has "
        f"{format_bytes(topology.memory_bytes[rank])}. Use another kind, fp16 tables or more "
        "ranks, or let EmbeddingShardingPlanner choose."
    )


def _widest(table: BaseEmbeddingConfig, kind: str, topology: Topology) -> tuple[Option, ...]:
    """Return the widest split of a table for each size of host."""
    candidates = enumerate_candidates(table, find_sites(topology), [kind])
    if not candidates:
        sizes = [len(host) for host in topology.hosts]
        raise PlanError(
            f"{kind} has no meaning for table {table.name!r} on hosts of {sizes} ranks; use "
            "row_wise or column_wise."
        )
    work = table_work(table, NO_CONSTRAINTS, BATCH_SIZE, topology.world_size, topology.device)
    widest: dict[int, Option] = {}
    for option in price_options(work, candidates, CostModel(topology)):
        size = len(option.sites[0])
        if size not in widest or option.num_ranks > widest[size].num_ranks:
            widest[size] = option
    return tuple(widest.values())
