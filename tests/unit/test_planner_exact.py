"""Of plans that are equally fast, a small problem gets the one with the least work."""

from __future__ import annotations

from rayrec.layout import EmbeddingBagConfig, Storage, Topology
from rayrec.planner import EmbeddingShardingPlanner, ParameterConstraints

# Rows and ids per bag. The rank of the first and third table is the slower one: that of the others
# has a little time to spare.
TABLES = ((5_268, 10), (444_172, 1), (225_043, 1), (440_701, 1))


def test_a_rank_with_time_to_spare_does_not_spend_it() -> None:
    """With ample memory, a cache in front of rows in the host's memory is needless work, even where
    another rank is slower yet.
    """
    tables = [
        EmbeddingBagConfig(rows, 64, f"t{i}", feature_names=[f"f{i}"])
        for i, (rows, _) in enumerate(TABLES)
    ]
    limits = {
        f"t{i}": ParameterConstraints(storage="auto", skew=1.0, pooling_factor=ids)
        for i, (_, ids) in enumerate(TABLES)
    }
    gpus = Topology.local(2, memory_bytes=10**12, device="cuda")
    plan = EmbeddingShardingPlanner(gpus, 256, limits).plan(tables)
    owners = [plan.tables[table.name].layout.owners for table in tables]
    assert owners[0] == owners[2] != owners[1] == owners[3]
    assert {placement.storage for placement in plan.tables.values()} == {Storage()}
