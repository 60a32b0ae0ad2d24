"""Ranking metrics against loops over lists, merging in any order, and queries that cannot be
scored.
"""

from __future__ import annotations

import math
import random

import pytest
import torch

from rayrec.errors import ConfigError, InputError, ShapeError
from rayrec.metrics import RankingMetrics, RankingScores


def by_hand(scores: torch.Tensor, relevant: torch.Tensor, ks: list[int]) -> RankingScores:
    recall, ndcg, first = {k: [] for k in ks}, {k: [] for k in ks}, []
    for row, wanted in zip(scores.tolist(), relevant.tolist(), strict=True):
        if not any(wanted):
            continue
        ranked = [
            wanted[i] for i in sorted(range(len(row)), key=lambda i: -row[i]) if row[i] > -math.inf
        ]
        for k in ks:
            recall[k].append(sum(ranked[:k]) / sum(wanted))
            best = sum(1 / math.log2(place + 2) for place in range(min(k, sum(wanted))))
            ndcg[k].append(
                sum(1 / math.log2(place + 2) for place, hit in enumerate(ranked[:k]) if hit) / best
            )
        first.append(
            next((1 / (place + 1) for place, hit in enumerate(ranked[: max(ks)]) if hit), 0.0)
        )
    mean = lambda values: sum(values) / len(values) if values else math.nan  # noqa: E731
    means = {k: mean(v) for k, v in recall.items()}, {k: mean(v) for k, v in ndcg.items()}
    return RankingScores(queries=len(first), recall=means[0], ndcg=means[1], mrr=mean(first))


def random_queries(seed: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    queries, items = rng.randrange(1, 20), rng.randrange(1, 40)
    scores = torch.rand(queries, items, generator=generator, dtype=torch.float64)
    scores[torch.rand(queries, items, generator=generator) < 0.1] = -math.inf
    relevant = torch.rand(queries, items, generator=generator) < rng.choice([0.05, 0.5])
    return scores, relevant, sorted(rng.sample(range(1, 50), rng.randrange(1, 4)))


def assert_close(got: RankingScores, wanted: RankingScores) -> None:
    close = {"abs": 1e-9, "nan_ok": True}  # values are counted in units of 2**-32
    assert got.queries == wanted.queries
    assert got.recall == pytest.approx(wanted.recall, **close)
    assert got.ndcg == pytest.approx(wanted.ndcg, **close)
    assert got.mrr == pytest.approx(wanted.mrr, **close)


@pytest.mark.seeds(range(60))
def test_scores_equal_those_of_a_loop_over_lists(seed: int) -> None:
    scores, relevant, ks = random_queries(seed)
    metrics = RankingMetrics(ks)
    metrics.update(scores, relevant)
    assert_close(metrics.compute(), by_hand(scores, relevant, ks))


@pytest.mark.seeds(range(5))
def test_ranks_merge_by_sums_to_the_same_bits(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores, relevant = (
        torch.rand(50, 30, generator=generator),
        torch.rand(50, 30, generator=generator) < 0.1,
    )
    whole, parts = RankingMetrics([5, 20]), []
    whole.update(scores, relevant)
    for rows in torch.randperm(50, generator=generator).split([7, 0, 20, 23]):
        parts.append(RankingMetrics([5, 20]))
        parts[-1].update(scores[rows], relevant[rows])
    merged = torch.stack([part.state() for part in parts]).sum(0)
    assert torch.equal(merged, whole.state())
    assert RankingMetrics.from_state(merged, [5, 20]).compute() == whole.compute()


def test_known_lists_give_known_scores() -> None:
    metrics = RankingMetrics([1, 3])
    metrics.update_hits(
        torch.tensor([[False, True, True], [True, False, False]]), torch.tensor([2, 1])
    )
    scores = metrics.compute()
    assert scores.recall == pytest.approx({1: 0.5, 3: 1.0})
    assert scores.mrr == pytest.approx(0.75)
    found = (1 / math.log2(3) + 1 / math.log2(4)) / (1 + 1 / math.log2(3))
    assert scores.ndcg == pytest.approx({1: 0.5, 3: (found + 1) / 2})


def test_nothing_seen_and_nothing_relevant_are_nan() -> None:
    metrics = RankingMetrics([3])
    assert metrics.compute().queries == 0 and math.isnan(metrics.compute().mrr)
    metrics.update(torch.rand(4, 2), torch.zeros(4, 2, dtype=torch.bool))
    assert metrics.compute().queries == 0 and math.isnan(metrics.compute().recall[3])


def test_what_does_not_fit_is_refused() -> None:
    for ks in ([], [0, 1], [3, 3]):
        with pytest.raises(ConfigError, match="cut-offs"):
            RankingMetrics(ks)
    metrics = RankingMetrics([2])
    with pytest.raises(ShapeError, match=r"\(3, 4\).*\(3, 5\)"):
        metrics.update(torch.rand(3, 4), torch.zeros(3, 5))
    with pytest.raises(ShapeError):
        metrics.update_hits(torch.ones(3, 2), torch.ones(2))
    with pytest.raises(ShapeError, match="int64"):
        metrics.merge(torch.zeros(9, dtype=torch.int64))
    metrics.update_hits(torch.ones(1, 2, dtype=torch.bool), torch.tensor([1]))
    with pytest.raises(InputError, match="more hits"):
        metrics.compute()
