"""Paired bootstrap: how sure the difference of two rankings of the same queries is.

Queries are drawn with replacement, many times, and each time the mean difference is taken; the
middle 95% of these means are the interval. Pairing the queries takes out what makes some of them
hard for both. An interval that holds 0 says that these queries do not tell the two apart.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayrec.errors import InputError

DRAWS = 2000


class Difference(NamedTuple):
    """Mean of the second less that of the first, and the ends of the middle 95% of draws."""

    mean: float
    low: float
    high: float


def paired_bootstrap(
    first: NDArray[np.float64], second: NDArray[np.float64], draws: int = DRAWS, seed: int = 0
) -> Difference:
    """Compare two scores of each query.

    Args:
        first, second: (Q,) scores of the same queries in the same order.
    Raises:
        InputError: the numbers of queries differ, or are 0.
    """
    if first.shape != second.shape or not len(first):
        raise InputError(
            f"{len(first)} and {len(second)} queries cannot be paired; rank the same rows."
        )
    differences, random = second - first, np.random.default_rng(seed)
    means = [
        differences[random.integers(0, len(differences), len(differences))].mean()
        for _ in range(draws)
    ]
    low, high = np.quantile(means, (0.025, 0.975))
    return Difference(float(differences.mean()), float(low), float(high))


def gains(
    places: NDArray[np.int64], k: int, wanted: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return recall and NDCG at k of each query that wants an item; of one item the recall is its
    hit.

    Args:
        places: of the wanted items, those of a query after those of the one before it.
        wanted: (Q,) items of each query; None for one.
    """
    hits = (places < k).astype(np.float64)
    gained = hits / np.log2(places + 2.0)
    if wanted is None:
        return hits, gained
    wanted = wanted[wanted > 0]
    first = np.cumsum(wanted) - wanted
    best = np.cumsum(1 / np.log2(np.arange(k) + 2.0))[np.minimum(wanted, k) - 1]
    return np.add.reduceat(hits, first) / wanted, np.add.reduceat(gained, first) / best
