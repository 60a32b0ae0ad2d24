"""The sharded counterpart of `EmbeddingBagCollection`: same forward, same table configs, same names in its state_dict.

It holds no rows: those are the engine's. Mean pooling divides here, by the lengths of the bags at home, because a row block sees only
part of a bag.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rayrec.distributed.engine import ShardedEmbeddings
from rayrec.distributed.state import TableShards
from rayrec.layout import EmbeddingBagConfig, PoolingType
from rayrec.modules import EmbeddingBagCollection, get_embedding_names_by_table
from rayrec.sparse import KeyedJaggedTensor, KeyedTensor


class ShardedEmbeddingBagCollection(nn.Module):
    """An `EmbeddingBagCollection` whose tables are spread over the ranks.

    Args:
        engine: the sharded embeddings of the model.
        index: which of its collections this is.
        unsharded: the module it replaces; its rows are not read here.
    """

    def __init__(self, engine: ShardedEmbeddings, index: int, unsharded: EmbeddingBagCollection) -> None:
        super().__init__()
        self._engine, self._index = engine, index
        self._configs, self._weighted = unsharded.embedding_bag_configs(), unsharded.is_weighted()
        self._names = [name for names in get_embedding_names_by_table(self._configs) for name in names]
        uses = [(config, feature) for config in self._configs for feature in config.feature_names]
        self._features = [feature for _, feature in uses]
        self._dims = [config.embedding_dim for config, _ in uses]
        mean = [config.pooling is PoolingType.MEAN for config, _ in uses]
        self._mean = torch.tensor(mean, device=engine.device).unsqueeze(1) if any(mean) else None
        self._use_of_column = torch.tensor([i for i, d in enumerate(self._dims) for _ in range(d)], device=engine.device)
        self.embedding_bags = nn.ModuleDict({config.name: TableShards(engine, config) for config in self._configs})

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool every bag.

        Args:
            features: holds at least the keys of the tables' features; B bags each. B may differ between ranks.
        Returns:
            KeyedTensor of (B, sum D) float32: tables in order, the features of each in order.
        Raises:
            InputError: a feature is missing, an id is out of range (names key, row, value), or weights are missing.
            CommError: another rank is gone.
        """
        pooled = self._engine.forward(self._index, features)
        if self._mean is not None:
            pooled = pooled * self._mean_scale(features, self._mean)
        return KeyedTensor(self._names, self._dims, pooled)

    def _mean_scale(self, features: KeyedJaggedTensor, mean_U: Tensor) -> Tensor:
        where = [features.index_per_key()[feature] for feature in self._features]
        lengths_UB = features.lengths().view(len(features.keys()), features.stride())[where]
        scale_UB = torch.where(mean_U, lengths_UB.clamp(min=1).float().reciprocal(), 1.0)
        return scale_UB.t().index_select(1, self._use_of_column)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables, in output order."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether bags carry a weight per id."""
        return self._weighted

    @property
    def device(self) -> torch.device:
        """Where this rank's shards live."""
        return self._engine.device

    def extra_repr(self) -> str:
        """The tables with their layouts, for printing."""
        layouts: Mapping[str, Any] = self._engine.plan.tables
        return "\n".join(f"{c.name}: {c.num_embeddings} x {c.embedding_dim}, {layouts[c.name].layout}" for c in self._configs)
