"""The sharded runtime: programs, steps, kernels and ways, and the modules around them."""

from rayrec.distributed.collections import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from rayrec.distributed.engine import ShardedEmbeddings
from rayrec.distributed.fused_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    fuse_embedding_optimizer,
)
from rayrec.distributed.interop import load_table, unsharded_state_dict
from rayrec.distributed.model_parallel import DistributedModelParallel
from rayrec.distributed.sharders import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    ModuleSharder,
    ShardingEnv,
    get_default_sharders,
)
from rayrec.distributed.sharding import find_collections, shard_embeddings, table_configs
from rayrec.dynamic.managed_collision import managed_collision_ids
from rayrec.layout.words import foreign_names

__all__ = [
    "DistributedModelParallel",
    "EmbeddingBagCollectionSharder",
    "EmbeddingCollectionSharder",
    "FusedEmbeddingBagCollection",
    "FusedEmbeddingCollection",
    "ModuleSharder",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardedEmbeddings",
    "ShardingEnv",
    "find_collections",
    "fuse_embedding_optimizer",
    "get_default_sharders",
    "load_table",
    "managed_collision_ids",
    "shard_embeddings",
    "table_configs",
    "unsharded_state_dict",
]

__getattr__ = foreign_names(__name__)
