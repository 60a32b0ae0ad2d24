"""Tables, the one geometry, sharding kinds, topology and plan. Standard library only."""

from __future__ import annotations

from rayrec.layout.dynamic import DynamicConfig, GrowthConfig
from rayrec.layout.estimates import PlanEstimates, RankEstimate, TableEstimate
from rayrec.layout.geometry import (
    COLUMN_MULTIPLE,
    Layout,
    Replicated,
    Shard,
    TableLayout,
    even_cuts,
)
from rayrec.layout.kinds import (
    KINDS,
    ShardingType,
    column_wise,
    data_parallel,
    grid_shard,
    kind_of,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
    takes_two_hops,
)
from rayrec.layout.plan import ShardingPlan, Storage, TablePlacement
from rayrec.layout.tables import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    check_tables,
)
from rayrec.layout.topology import Topology

__all__ = [
    "COLUMN_MULTIPLE",
    "KINDS",
    "BaseEmbeddingConfig",
    "DataType",
    "DynamicConfig",
    "EmbeddingBagConfig",
    "EmbeddingConfig",
    "GrowthConfig",
    "Layout",
    "PlanEstimates",
    "PoolingType",
    "RankEstimate",
    "Replicated",
    "Shard",
    "ShardingPlan",
    "ShardingType",
    "Storage",
    "TableEstimate",
    "TableLayout",
    "TablePlacement",
    "Topology",
    "check_tables",
    "column_wise",
    "data_parallel",
    "even_cuts",
    "grid_shard",
    "kind_of",
    "row_wise",
    "table_column_wise",
    "table_row_wise",
    "table_wise",
    "takes_two_hops",
]
