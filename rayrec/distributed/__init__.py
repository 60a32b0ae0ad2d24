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
from rayrec.distributed.sharding import find_collections, shard_embeddings, table_configs

__all__ = [
    "DistributedModelParallel",
    "FusedEmbeddingBagCollection",
    "FusedEmbeddingCollection",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardedEmbeddings",
    "find_collections",
    "fuse_embedding_optimizer",
    "load_table",
    "shard_embeddings",
    "table_configs",
    "unsharded_state_dict",
]
