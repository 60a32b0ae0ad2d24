"""The sharded `EmbeddingBagCollection` and `EmbeddingCollection`: same forward, same names.

They hold no rows: those are the engine's. Mean pooling divides here, by the lengths of the bags at
home, because a row block sees only part of a bag. A variable batch is expanded here to the full
batch, by its inverse indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from rayrec.comm.exchange import Exchange
from rayrec.distributed.engine import ShardedEmbeddings
from rayrec.distributed.state import TableShards
from rayrec.layout import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from rayrec.modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    expand_inverse,
    get_embedding_names_by_table,
)
from rayrec.sparse import JaggedTensor, JaggedTensors, KeyedJaggedTensor, KeyedTensor


class Sharded(nn.Module):
    """Base of both kinds: the engine, this collection's number in it, and the tables."""

    def __init__(
        self, engine: ShardedEmbeddings, index: int, configs: Sequence[BaseEmbeddingConfig]
    ) -> None:
        super().__init__()
        self._engine, self._index, self._tables = engine, index, tuple(configs)

    def _shards(self) -> nn.ModuleDict:
        shards = [TableShards(self._engine, config) for config in self._tables]
        return nn.ModuleDict({part.name: part for part in shards})

    @property
    def device(self) -> torch.device:
        """Device of this rank's shards."""
        return self._engine.device

    @property
    def exchange(self) -> Exchange:
        """The ranks that share the tables, for a model's own collectives in its steps.

        All ranks enter them in the same order, between the look-ups.
        """
        return self._engine.exchange

    def extra_repr(self) -> str:
        """Return the tables with their sharding kinds, for printing."""
        lines = []
        for table in self._tables:
            plan = self._engine.plan
            rows, width = plan.tables[table.name].layout.shape
            lines.append(f"{table.name}: {rows} x {width}, {plan.kind(table.name)}")
        return "\n".join(lines)


class PooledTables:
    """Tables of a pooled collection, as `EmbeddingBagCollection` tells of them."""

    _configs: list[EmbeddingBagConfig]
    _weighted: bool

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the tables, in output order."""
        return self._configs

    def is_weighted(self) -> bool:
        """Return whether bags carry a weight per id."""
        return self._weighted


class SequenceTables:
    """Tables of a sequence collection, as `EmbeddingCollection` tells of them."""

    _configs: list[EmbeddingConfig]
    _names: list[list[str]]
    _need_indices: bool

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the tables, in order."""
        return self._configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """Output names of each table."""
        return self._names

    def embedding_dim(self) -> int:
        """The width of all tables; -1 when there are none."""
        return self._configs[0].embedding_dim if self._configs else -1

    def need_indices(self) -> bool:
        """Return whether the outputs carry the ids as their weights."""
        return self._need_indices


class ShardedEmbeddingBagCollection(PooledTables, Sharded):
    """An `EmbeddingBagCollection` whose tables are spread over the ranks."""

    def __init__(
        self, engine: ShardedEmbeddings, index: int, unsharded: EmbeddingBagCollection
    ) -> None:
        super().__init__(engine, index, unsharded.embedding_bag_configs())
        self._configs, self._weighted = unsharded.embedding_bag_configs(), unsharded.is_weighted()
        self._names = list(chain.from_iterable(get_embedding_names_by_table(self._configs)))
        uses = [(config, feature) for config in self._configs for feature in config.feature_names]
        self._features = [feature for _, feature in uses]
        self._dims = [config.embedding_dim for config, _ in uses]
        mean = [config.pooling is PoolingType.MEAN for config, _ in uses]
        # (uses, 1) bool: True for means, whose sums are divided by bag lengths; None without means
        self._mean = torch.tensor(mean, device=engine.device).unsqueeze(1) if any(mean) else None
        self._mean_uses = [i for i, is_mean in enumerate(mean) if is_mean]
        self._orders: dict[tuple[str, ...], Tensor] = {}
        # (sum D,) the use that each output column belongs to
        use_of_column = [i for i, width in enumerate(self._dims) for _ in range(width)]
        self._use_of_column = torch.tensor(use_of_column, device=engine.device)
        self.embedding_bags = self._shards()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool every bag.

        Args:
            features: holds at least the keys of the tables' features; B bags each, or a variable
                batch with inverse indices. B may differ between ranks.
        Returns:
            KeyedTensor of (B, sum D) float32: tables in order, the features of each in order.
        Raises:
            InputError: a feature is missing, an id is out of range (names key, row, value), or
                weights are missing.
            CommError: another rank is gone.
        """
        outputs = self._engine.forward(self._index, features, self.training)
        if features.variable_stride_per_key():
            return KeyedTensor(self._names, self._dims, self._expand(features, list(outputs)))
        (pooled,) = outputs
        if self._mean is not None:
            pooled = pooled * self._mean_scale(features, self._mean)
        return KeyedTensor(self._names, self._dims, pooled)

    def _mean_scale(self, features: KeyedJaggedTensor, mean_U: Tensor) -> Tensor:
        """Return (B, sum D): one over the length of the bag where its use is a mean, else 1."""
        lengths_FB = features.lengths().view(len(features.keys()), features.stride())
        lengths_UB = lengths_FB.index_select(0, self._order(features))
        scale_UB = torch.where(mean_U, lengths_UB.clamp(min=1).float().reciprocal(), 1.0)
        return scale_UB.t().index_select(1, self._use_of_column)

    def _order(self, features: KeyedJaggedTensor) -> Tensor:
        """Return (uses,): the key that each use reads.

        It is kept, since copying an index from the host would wait for a GPU in every step.
        """
        keys = tuple(features.keys())
        if keys not in self._orders:
            where = [features.index_per_key()[feature] for feature in self._features]
            self._orders[keys] = torch.tensor(where, device=features.device())
        return self._orders[keys]

    def _expand(self, features: KeyedJaggedTensor, outputs: list[Tensor]) -> Tensor:
        for i in self._mean_uses:
            lengths = features[self._features[i]].lengths().clamp(min=1)
            outputs[i] = outputs[i] / lengths.unsqueeze(1)
        return torch.cat(expand_inverse(outputs, self._features, features), 1)


class ShardedEmbeddingCollection(SequenceTables, Sharded):
    """An `EmbeddingCollection` whose tables are spread over the ranks."""

    def __init__(
        self, engine: ShardedEmbeddings, index: int, unsharded: EmbeddingCollection
    ) -> None:
        super().__init__(engine, index, unsharded.embedding_configs())
        self._configs, self._need_indices = unsharded.embedding_configs(), unsharded.need_indices()
        self._names = get_embedding_names_by_table(self._configs)
        # a clipped gradient is that of each id, and here those of equal ids would be added up first
        optimizers = (engine.optimizers[config.name] for config in self._configs)
        is_clipped = any(optimizer.max_gradient is not None for optimizer in optimizers)
        self._sends_distinct = engine.options.dedup_sequences and not is_clipped
        self.embeddings = self._shards()

    def forward(self, features: KeyedJaggedTensor) -> JaggedTensors:
        """Look up every id.

        Args:
            features: holds at least the keys of the tables' features.
        Returns:
            Output name -> bags of (N, D) float32 rows, with the lengths of the feature; weights are
            the ids when need_indices.
        Raises:
            InputError: a feature is missing, or an id is out of range (names key, row, value).
            CommError: another rank is gone.
        """
        engine = self._engine
        look_up = engine.forward_distinct if self._sends_distinct else engine.forward
        rows = iter(look_up(self._index, features, self.training))
        outputs = JaggedTensors()
        for config, names in zip(self._configs, self._names, strict=True):
            for feature, name in zip(config.feature_names, names, strict=True):
                bags = features[feature]
                ids = bags.values() if self._need_indices else None
                outputs[name] = JaggedTensor(next(rows), ids, lengths=bags.lengths())
        return outputs
