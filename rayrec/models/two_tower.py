"""Two-tower retrieval: a query and a candidate become vectors whose dot product is the score.

Trained by softmax over the batch: each row's own candidate against the candidates of all rows.
Under data parallelism those are the rows of the local batch, so N ranks see N times fewer negatives
per row than one rank of the global batch: the loss of N ranks differs from that of one by
definition, though each is exact. Rows with the same candidate id are not each other's negatives
(accidental hits), and scores may be corrected by the log of the probability with which a candidate
comes up in a batch (logQ), or popular ones are punished.

The towers know nothing of sharding. With a collection per tower, candidates can be embedded without
queries; collections that are given the same KeyedJaggedTensor share one exchange. Leaves out: dense
columns, and negatives from other ranks.

    # B rows of the batch, D width of the vectors
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.errors import ConfigError, InputError
from rayrec.fields.typed import check_argument
from rayrec.modules import MLP, EmbeddingBagCollection, get_embedding_names_by_table
from rayrec.sparse import KeyedJaggedTensor, KeyedTensor

Device = torch.device | str | None


class PairBatch(Protocol):
    """Batch of TwoTowerTrain: sparse_features of B rows, labels (B,)."""

    @property
    def sparse_features(self) -> KeyedJaggedTensor: ...

    @property
    def labels(self) -> Tensor: ...


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


class TwoTowerTrain(nn.Module):
    """Two towers and the in-batch softmax loss: batch -> (loss, (loss, logits, labels)).

    A row's loss is the cross entropy of its own candidate among those of the local batch, times its
    label: rows with label 0 serve as candidates alone. `loss` is the sum over rows divided by B.
    `logits` are the log-odds of picking the own candidate among those of the batch.

    Args:
        temperature: scores are divided by it; for cosines below 1, such as 0.05.
        candidate_id: the feature, with one id per row, by which candidates are the same; without it
            nothing is masked or corrected.
        log_q: (ids,) log of the share of each candidate id among the rows that make batches;
            subtracted from scores in training. It is no parameter and not saved. Needs
            candidate_id.
        mask_hits: rows with the same candidate are no negatives of each other. With log_q and
            candidates that fill a good part of a batch, False is the consistent choice: then
            exp(score) tends to p(candidate | query).
    Raises:
        ConfigError: the temperature is not positive, or log_q comes without candidate_id.
    Attributes:
        gives_probabilities: False: how likely a candidate is picked depends on the others of its
            batch, so that training tells the AUC of the logits, and no score of a click's
            probability, such as the normalized entropy.
    Source: Yi et al., Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
    Recommendations, RecSys 2019.
    """

    gives_probabilities = False

    def __init__(
        self,
        two_tower: TwoTower,
        temperature: float = 1.0,
        candidate_id: str | None = None,
        log_q: Tensor | None = None,
        mask_hits: bool = True,
    ) -> None:
        super().__init__()
        if not 0 < temperature < float("inf"):
            raise ConfigError(f"temperature={temperature} must be positive and finite.")
        if log_q is not None and candidate_id is None:
            raise ConfigError(
                "log_q is per candidate id: say which feature holds it, candidate_id."
            )
        self.two_tower, self.temperature = two_tower, temperature
        self.candidate_id, self.mask_hits = candidate_id, mask_hits
        self.log_q: Tensor | None
        # As a buffer it moves to the device with the model; checkpoints would only repeat the data.
        self.register_buffer("log_q", log_q, persistent=False)

    def forward(self, batch: PairBatch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """B pairs -> scalar loss; loss, logits (B,), labels (B,).

        Raises:
            InputError: candidate_id has not one id per row.
        """
        query_BD, candidate_BD = self.two_tower(batch.sparse_features)
        labels = batch.labels.to(query_BD.dtype)
        rows = len(labels)
        # A rank without rows takes part in the collectives of the backward pass, so its loss stays
        # in the graph, with gradients of zero.
        if not rows:
            loss = (query_BD.sum() + candidate_BD.sum()) * 0
            return loss, (loss.detach(), labels.new_zeros(0), batch.labels.detach())
        # row b: scores of query b with the candidates of all rows; its own is on the diagonal
        scores_BB = query_BD @ candidate_BD.t() / self.temperature
        own = torch.eye(rows, dtype=torch.bool, device=scores_BB.device)
        if self.candidate_id is not None:
            ids_B = self._candidate_ids(batch.sparse_features, rows)
            if self.log_q is not None:
                # A popular candidate is the negative of many rows, and would be pushed down for it.
                scores_BB = scores_BB - self.log_q[ids_B]
            if self.mask_hits:
                # A score of -inf has no weight in the sum. The own candidate is kept, so no row is
                # empty.
                scores_BB = scores_BB.masked_fill((ids_B.unsqueeze(1) == ids_B) & ~own, -torch.inf)
        positive = scores_BB.diagonal()
        loss_B = scores_BB.logsumexp(1) - positive
        loss = (loss_B * labels).sum() / rows
        with torch.no_grad():
            # The probability p of the own candidate has the log-odds log p - log(1 - p). That is
            # its score less the logsumexp of all others.
            logits = positive - scores_BB.masked_fill(own, -torch.inf).logsumexp(1)
        return loss, (loss.detach(), logits, batch.labels.detach())

    def _candidate_ids(self, features: KeyedJaggedTensor, rows: int) -> Tensor:
        assert self.candidate_id is not None
        ids = features[self.candidate_id].values().long()
        if ids.numel() != rows:
            raise InputError(
                f"candidate_id {self.candidate_id!r} has {ids.numel()} ids in {rows} rows; it "
                "needs one in each."
            )
        return ids


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
