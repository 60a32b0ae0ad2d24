"""`RankingMetrics`: recall@k, NDCG@k and MRR of ranked lists, streamed and merged exactly.

The state is one vector of int64: the number of queries and, per cut-off k, sums over queries in
units of 2**-32. So states of ranks or batches merge by adding them, in any order, to the same
result bit for bit; each value is off by at most 2**-33. Relevance is binary. A query without
relevant items is not counted, since no list could be right for it. MRR looks at the first max(ks)
places and counts 0 beyond them. Costs one top-k and a few passes over (Q, max(ks)); nothing is
copied to the host until `compute`.

    # Q queries, N items, K places of the lists, max(ks)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayrec.errors import ConfigError, InputError, ShapeError

_UNIT = float(1 << 32)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankingScores:
    """Means over queries that have relevant items; nan when there are none.

    Attributes:
        recall: k -> share of a query's relevant items among its first k places.
        ndcg: k -> discounted gain of the first k places over that of the best possible list.
        mrr: one over the place of the first relevant item, 0 when it is not among the first
            max(ks).
    """

    queries: int
    recall: dict[int, float]
    ndcg: dict[int, float]
    mrr: float


class RankingMetrics:
    """Accumulates ranked lists; see the top of this file for what is counted.

    Args:
        ks: cut-offs, each at least 1.
    Raises:
        ConfigError: no cut-off, or one below 1, or one twice.
    """

    def __init__(self, ks: Sequence[int], device: torch.device | str = "cpu") -> None:
        if not ks or min(ks) < 1 or len(set(ks)) != len(ks):
            raise ConfigError(
                f"ks={list(ks)}; ranking metrics need different cut-offs of at least 1, such as "
                "[10, 50]."
            )
        self.ks = tuple(sorted(ks))
        self._state = torch.zeros(2 + 2 * len(self.ks), dtype=torch.int64, device=device)

    def update(self, scores: Tensor, relevant: Tensor) -> None:
        """Add queries with the scores of all items.

        Args:
            scores: (Q, N) any float type; -inf excludes an item from the list. Ties are ranked as
                by torch.topk.
            relevant: (Q, N) bool.
        Raises:
            ShapeError: the shapes differ.
        """
        if scores.dim() != 2 or scores.shape != relevant.shape:
            raise ShapeError(
                f"scores {tuple(scores.shape)} and relevant {tuple(relevant.shape)} must both be "
                "(queries, items)."
            )
        relevant = relevant.bool()
        top = scores.topk(min(self.ks[-1], scores.shape[1]), dim=1)
        hits = relevant.gather(1, top.indices) & (top.values > -math.inf)
        self.update_hits(hits, relevant.sum(1))

    @torch.no_grad()
    def update_hits(self, hits: Tensor, num_relevant: Tensor) -> None:
        """Add queries whose lists are known.

        Args:
            hits: (Q, K) bool, whether each place holds a relevant item, best place first; shorter
                lists count as misses after their end.
            num_relevant: (Q,) integers, relevant items of each query, at least its hits.
        Raises:
            ShapeError: the shapes do not fit.
        """
        if hits.dim() != 2 or num_relevant.shape != hits.shape[:1]:
            raise ShapeError(
                f"hits {tuple(hits.shape)} and num_relevant {tuple(num_relevant.shape)} must be "
                "(Q, K) and (Q,)."
            )
        device = self._state.device
        depth = min(self.ks[-1], hits.shape[1])
        hits_QK, wanted_Q = hits[:, :depth].to(device).double(), num_relevant.to(device).double()
        counted = wanted_Q > 0
        # best[n]: the discounted gain of n relevant items in the first n places
        gain_K = 1.0 / torch.arange(2, self.ks[-1] + 2, device=device, dtype=torch.float64).log2()
        best = torch.cat([gain_K.new_zeros(1), gain_K.cumsum(0)])
        sums: list[Tensor] = []
        for k in self.ks:
            sums.append(hits_QK[:, :k].sum(1) / wanted_Q.clamp(min=1))
            sums.append(hits_QK[:, :k] @ gain_K[:k][:depth] / best[wanted_Q.clamp(1, k).long()])
        place_K = 1.0 / torch.arange(1, depth + 1, device=device, dtype=torch.float64)
        sums.append((hits_QK * place_K).amax(1) if depth else torch.zeros_like(wanted_Q))
        quantized = torch.stack([(value * counted * _UNIT).round().long().sum() for value in sums])
        self._state += torch.cat([counted.long().sum().view(1), quantized])

    def state(self) -> Tensor:
        """(2 + 2 len(ks),) int64: all that was seen. States of equal ks add."""
        return self._state.clone()

    def merge(self, state: Tensor) -> None:
        """Add what another accumulator of the same ks saw.

        Raises:
            ShapeError: `state` is not the state of a `RankingMetrics` with as many cut-offs.
        """
        if state.shape != self._state.shape or state.dtype != torch.int64:
            raise ShapeError(
                f"a state for ks={list(self.ks)} is {tuple(self._state.shape)} int64, not "
                f"{tuple(state.shape)} {state.dtype}."
            )
        self._state += state.to(self._state.device)

    @classmethod
    def from_state(
        cls, state: Tensor, ks: Sequence[int], device: torch.device | str = "cpu"
    ) -> RankingMetrics:
        """An accumulator that saw what `state` says; for example the sum of all ranks' states."""
        metrics = cls(ks, device)
        metrics.merge(state)
        return metrics

    def compute(self) -> RankingScores:
        """The scores of everything seen.

        Raises:
            InputError: some query had more hits than relevant items.
        """
        queries, *sums = self._state.tolist()
        means = [value / _UNIT / queries if queries else math.nan for value in sums]
        recall = dict(zip(self.ks, means[0:-1:2], strict=True))
        ndcg = dict(zip(self.ks, means[1:-1:2], strict=True))
        if any(value > 1 + 1e-6 for value in recall.values()):
            raise InputError(
                f"recall is {recall}: queries have more hits than num_relevant. Count each "
                "relevant item of a query once."
            )
        return RankingScores(queries=queries, recall=recall, ndcg=ndcg, mrr=means[-1])
