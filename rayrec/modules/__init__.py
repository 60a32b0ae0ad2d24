"""Unsharded modules: collections (the reference of every test), initial values, dense layers,
attention and encoders of sequences.
"""

from rayrec.layout.tables import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from rayrec.layout.words import foreign_names
from rayrec.modules.activation import SwishLayerNorm
from rayrec.modules.attention import TargetAttention
from rayrec.modules.attention_causal import causal_attention
from rayrec.modules.attention_hstu import hstu_attention
from rayrec.modules.crossnet import (
    CrossNet,
    LowRankCrossNet,
    LowRankMixtureCrossNet,
    VectorCrossNet,
)
from rayrec.modules.embedding import EmbeddingCollection
from rayrec.modules.embedding_bag import EmbeddingBagCollection, expand_inverse, pool_bags
from rayrec.modules.feature_processor import (
    FeatureProcessedEmbeddingBagCollection,
    FeatureProcessorDictWrapper,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from rayrec.modules.gru_encoder import GRUEncoder
from rayrec.modules.init import table_values
from rayrec.modules.init_fn import trunc_normal_
from rayrec.modules.interaction import pairwise_dots
from rayrec.modules.jagged_dropout import JaggedDropout, row_keys
from rayrec.modules.mlp import MLP, Perceptron
from rayrec.modules.names import get_embedding_names_by_table, torch_dtype
from rayrec.modules.regroup import KTRegroupAsDict
from rayrec.modules.sequence_encoders import AttentionEncoder, HSTUEncoder, SASRecEncoder

__all__ = [
    "MLP",
    "AttentionEncoder",
    "BaseEmbeddingConfig",
    "CrossNet",
    "DataType",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "FeatureProcessedEmbeddingBagCollection",
    "FeatureProcessorDictWrapper",
    "GRUEncoder",
    "HSTUEncoder",
    "JaggedDropout",
    "KTRegroupAsDict",
    "LowRankCrossNet",
    "LowRankMixtureCrossNet",
    "Perceptron",
    "PoolingType",
    "PositionWeightedModule",
    "PositionWeightedModuleCollection",
    "SASRecEncoder",
    "SwishLayerNorm",
    "TargetAttention",
    "VectorCrossNet",
    "causal_attention",
    "expand_inverse",
    "get_embedding_names_by_table",
    "hstu_attention",
    "pairwise_dots",
    "pool_bags",
    "row_keys",
    "table_values",
    "torch_dtype",
    "trunc_normal_",
]

__getattr__ = foreign_names(__name__)
