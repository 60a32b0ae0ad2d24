"""Training of two towers by a softmax over the batch: own candidates against those of other rows.

Those are the rows of the rank's part of the batch, so that N ranks see N times fewer negatives per
row than one; or, with `all_ranks`, the rows of the global batch, so that N ranks train as one. Rows
with the same candidate id are not each other's negatives (accidental hits), and scores may be
corrected by the log of the probability with which a candidate comes up in a batch (logQ), or
popular ones are punished.

    # B rows of this rank, N rows whose candidates are scored, D width of the vectors
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from rayrec.comm.differentiable import counts_by_rank, gather_rows
from rayrec.comm.exchange import Exchange
from rayrec.errors import ConfigError, InputError
from rayrec.models.two_tower import TwoTower
from rayrec.sparse import KeyedJaggedTensor


class PairBatch(Protocol):
    """Batch of TwoTowerTrain: sparse_features of B rows, labels (B,)."""

    @property
    def sparse_features(self) -> KeyedJaggedTensor: ...

    @property
    def labels(self) -> Tensor: ...


class TwoTowerTrain(nn.Module):
    """Two towers and the in-batch softmax loss: batch -> (loss, (loss, logits, labels)).

    A row's loss is the cross entropy of its own candidate among those of the batch, times its
    label: rows with label 0 serve as candidates alone. `loss` is the sum over rows divided by B.
    `logits` are the log-odds of picking the own candidate among those of the batch.

    Args:
        temperature: scores are divided by it; for cosines below 1, such as 0.05.
        candidate_id: the feature, with one id per row, by which candidates are the same; without it
            nothing is masked or corrected.
        log_q: log of the share of each candidate id among the rows that make batches; subtracted
            from scores in training. It is no parameter and not saved. Needs candidate_id.
        log_q_ids: the ids of log_q, ascending; others have the least of its values, which matters
            to batches of other rows alone. None for the ids 0, 1, 2 ...
        mask_hits: rows with the same candidate are no negatives of each other. With log_q and
            candidates that fill a good part of a batch, False is the consistent choice: then
            exp(score) tends to p(candidate | query).
        all_ranks: the batch is that of all ranks. Vectors of candidates travel to all of them, and
            gradients back.
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
        all_ranks: bool = False,
        log_q_ids: Tensor | None = None,
    ) -> None:
        super().__init__()
        if not 0 < temperature < float("inf"):
            raise ConfigError(f"temperature={temperature} must be positive and finite.")
        if log_q is not None and candidate_id is None:
            raise ConfigError(
                "log_q is per candidate id: say which feature holds it, candidate_id."
            )
        self.two_tower, self.temperature = two_tower, temperature
        self.candidate_id, self.mask_hits, self.all_ranks = candidate_id, mask_hits, all_ranks
        self.log_q: Tensor | None
        # As a buffer it moves to the device with the model; checkpoints would only repeat the data.
        self.register_buffer("log_q", log_q, persistent=False)
        self.log_q_ids: Tensor | None
        self.register_buffer("log_q_ids", log_q_ids, persistent=False)

    def forward(self, batch: PairBatch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """B pairs -> scalar loss; loss, logits (B,), labels (B,).

        Raises:
            InputError: candidate_id has not one id per row (seen on CPU; elsewhere where their sum
                differs).
        """
        query_BD, candidate_BD = self.two_tower(batch.sparse_features)
        labels = batch.labels.to(query_BD.dtype)
        rows, first, ids_B, ids_N = len(labels), 0, None, None
        if self.candidate_id is not None:
            ids_B = ids_N = self._candidate_ids(batch.sparse_features, rows)
        candidate_ND = candidate_BD
        if self.all_ranks:
            exchange = self.two_tower.exchange
            sizes = self._rows_by_rank(batch, exchange, candidate_BD.device)
            first = sum(sizes[: exchange.rank])
            candidate_ND = gather_rows(candidate_BD, sizes, exchange)
            ids_N = None if ids_B is None else gather_rows(ids_B, sizes, exchange)
        # A rank without rows takes part in the collectives of the backward pass, so its loss stays
        # in the graph, with gradients of zero.
        if not rows:
            loss = (query_BD.sum() + candidate_ND.sum()) * 0
            return loss, (loss.detach(), labels.new_zeros(0), batch.labels.detach())
        # row b: scores of query b with the candidates of all rows; its own is number first + b
        scores_BN = query_BD @ candidate_ND.t() / self.temperature
        places = torch.arange(first, first + rows, device=scores_BN.device).unsqueeze(1)
        own = torch.zeros_like(scores_BN, dtype=torch.bool).scatter_(1, places, True)
        if ids_B is not None and ids_N is not None:
            if self.log_q is not None:
                # A popular candidate is the negative of many rows, and would be pushed down for it.
                scores_BN = scores_BN - self._corrections(ids_N)
            if self.mask_hits:
                # A score of -inf has no weight in the sum. The own candidate is kept, so no row is
                # empty.
                scores_BN = scores_BN.masked_fill((ids_B.unsqueeze(1) == ids_N) & ~own, -torch.inf)
        positive = scores_BN.gather(1, places).squeeze(1)
        loss_B = scores_BN.logsumexp(1) - positive
        loss = (loss_B * labels).sum() / rows
        with torch.no_grad():
            # The probability p of the own candidate has the log-odds log p - log(1 - p). That is
            # its score less the logsumexp of all others.
            logits = positive - scores_BN.masked_fill(own, -torch.inf).logsumexp(1)
        return loss, (loss.detach(), logits, batch.labels.detach())

    def _rows_by_rank(
        self, batch: PairBatch, exchange: Exchange, device: torch.device
    ) -> list[int]:
        """Return the rows of each rank.

        Raises:
            ConfigError: the ranks that share the tables do not hold the global batch.
        """
        (sizes,) = counts_by_rank([len(batch.labels)], exchange, device)
        wanted = getattr(batch, "global_rows", sum(sizes))
        if sum(sizes) != wanted:
            raise ConfigError(
                f"all_ranks=True: the ranks that share the tables hold {sum(sizes)} of the "
                f"{wanted} rows of a batch. It does not go with sharding_group_size; leave out one "
                "of them."
            )
        return sizes

    def _corrections(self, ids_N: Tensor) -> Tensor:
        """Return the `log_q` of (N,) ids."""
        assert self.log_q is not None, "scores are corrected"
        if self.log_q_ids is None:
            return self.log_q[ids_N]
        places = torch.searchsorted(self.log_q_ids, ids_N).clamp(max=len(self.log_q_ids) - 1)
        return torch.where(self.log_q_ids[places] == ids_N, self.log_q[places], self.log_q.min())

    def _candidate_ids(self, features: KeyedJaggedTensor, rows: int) -> Tensor:
        assert self.candidate_id is not None
        bags = features[self.candidate_id]
        ids, counts = bags.values().long(), bags.lengths()
        # as many as rows in all, some may be in the wrong one; elsewhere that would cost a sync
        if ids.numel() != rows or (counts.is_cpu and bool((counts != 1).any())):
            raise InputError(
                f"candidate_id {self.candidate_id!r} has {ids.numel()} ids in {rows} rows; it "
                "needs one in each."
            )
        return ids
