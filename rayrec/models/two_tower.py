"""Two-tower retrieval: a query and a candidate become vectors whose dot product is the score.

The towers know nothing of sharding. With a collection per tower, candidates can be embedded without
queries; collections that are given the same KeyedJaggedTensor share one exchange. Leaves out: dense
columns. `rayrec.models.two_tower_train` trains them.

    # B rows of the batch, D width of the vectors
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.comm.exchange import Exchange, LocalExchange
from rayrec.errors import ConfigError
from rayrec.fields.typed import check_argument
from rayrec.modules import MLP, EmbeddingBagCollection, get_embedding_names_by_table
from rayrec.sparse import KeyedJaggedTensor, KeyedTensor

Device = torch.device | str | None


class Tower(nn.Module):
    """Pooled rows of some features through an MLP: KeyedTensor of B rows -> (B, layer_sizes[-1]).

    Args:
        features: names of the rows to read, as the collection gives them.
        in_features: columns of those rows together.
        layer_sizes: sizes of the MLP's layers; the last layer has no activation.
        normalize: True scales vectors to length 1.
    """

    def __init__(
        self,
        features: Sequence[str],
        in_features: int,
        layer_sizes: Sequence[int],
        normalize: bool,
        device: Device,
    ) -> None:
        super().__init__()
        self.features, self.normalize = list(features), normalize
        self.mlp = MLP(
            in_features, layer_sizes, activation="relu", device=device, activation_on_last=False
        )

    def forward(self, rows: KeyedTensor) -> Tensor:
        """-> (B, layer_sizes[-1])."""
        (flat,) = KeyedTensor.regroup([rows], [self.features])
        vectors = self.mlp(flat)
        return functional.normalize(vectors, dim=1) if self.normalize else vectors


class TwoTower(nn.Module):
    """A query tower and a candidate tower: ids of B pairs -> vectors (B, D) and (B, D).

    Args:
        embedding_bag_collection: tables of both towers, or of the query tower when there is a
            candidate_collection.
        layer_sizes: sizes of the layers of either tower's MLP; the last is D.
        candidate_collection: tables of the candidate tower.
        query_features, candidate_features: names of the looked-up rows that a tower reads; by
            default all rows of its own collection.
        normalize: True scales vectors to length 1, so that scores are cosines.
    Raises:
        ConfigError: a tower has no features, or an unknown one; or the layers are empty.

    Example:
        users, items = EmbeddingBagCollection(user_tables), EmbeddingBagCollection(item_tables)
        model = TwoTower(users, [64, 32], items)
        query, candidate = model(kjt)
        scores = model.query(some_users) @ model.candidate(some_items).T
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        layer_sizes: Sequence[int],
        candidate_collection: EmbeddingBagCollection | None = None,
        query_features: Sequence[str] | None = None,
        candidate_features: Sequence[str] | None = None,
        normalize: bool = True,
        dense_device: Device = None,
    ) -> None:
        super().__init__()
        check_argument("TwoTower", "layer_sizes", layer_sizes, Sequence[int])
        if not layer_sizes:
            raise ConfigError(
                "layer_sizes is empty; it needs at least the last layer, whose size is the width "
                "of the vectors."
            )
        if candidate_collection is None and (query_features is None or candidate_features is None):
            raise ConfigError(
                "one collection serves both towers: say which rows each reads, query_features and "
                "candidate_features."
            )
        self.ebc, self.candidate_ebc = embedding_bag_collection, candidate_collection
        options = (layer_sizes, normalize, dense_device)
        self.query_proj = _tower("query", self.ebc, query_features, *options)
        candidates = self.ebc if candidate_collection is None else candidate_collection
        self.candidate_proj = _tower("candidate", candidates, candidate_features, *options)

    @property
    def exchange(self) -> Exchange:
        """The ranks that share the tables; this rank alone where they are not sharded."""
        exchange: Exchange = getattr(self.ebc, "exchange", None) or LocalExchange()
        return exchange

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """B pairs of ids -> query (B, D), candidate (B, D). B may be 0."""
        rows = self.ebc(features)
        # Both collections get the same batch object, and so share one exchange of ids.
        candidates = rows if self.candidate_ebc is None else self.candidate_ebc(features)
        return self.query_proj(rows), self.candidate_proj(candidates)

    def query(self, features: KeyedJaggedTensor) -> Tensor:
        """Ids of B queries -> (B, D).

        All ranks of a sharded model call it together, each with its own B.
        """
        return self.query_proj(self.ebc(_complete(features, self.ebc)))

    def candidate(self, features: KeyedJaggedTensor) -> Tensor:
        """Ids of B candidates -> (B, D), likewise."""
        collection = self.ebc if self.candidate_ebc is None else self.candidate_ebc
        return self.candidate_proj(collection(_complete(features, collection)))


def _tower(
    side: str,
    collection: EmbeddingBagCollection,
    features: Sequence[str] | None,
    layers: Sequence[int],
    normalize: bool,
    device: Device,
) -> Tower:
    tables = collection.embedding_bag_configs()
    named = zip(tables, get_embedding_names_by_table(tables), strict=True)
    widths = {name: table.embedding_dim for table, names in named for name in names}
    chosen = list(widths) if features is None else list(features)
    unknown = [name for name in chosen if name not in widths]
    if unknown or not chosen:
        what = "has no features"
        if unknown:
            what = f"reads {unknown[0]!r}, which its collection does not give"
        raise ConfigError(f"the {side} tower {what}; the collection gives {list(widths)}.")
    return Tower(chosen, sum(widths[name] for name in chosen), layers, normalize, device)


def _complete(features: KeyedJaggedTensor, collection: EmbeddingBagCollection) -> KeyedJaggedTensor:
    """The batch with empty bags for those features of the collection that it lacks."""
    keys = set(features.keys())
    wanted = [f for table in collection.embedding_bag_configs() for f in table.feature_names]
    missing = [feature for feature in wanted if feature not in keys]
    if not missing:
        return features
    # A sharded collection exchanges all of its features. Empty bags make no rows and cost only
    # lengths.
    lengths = features.lengths().new_zeros(len(missing) * features.stride())
    weights = features.weights_or_none()
    weights = None if weights is None else weights[:0]
    ids = features.values()[:0]
    none = KeyedJaggedTensor(missing, ids, weights, lengths, stride=features.stride())
    return KeyedJaggedTensor.concat([features, none])
