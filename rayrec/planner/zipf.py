"""Expected number of a table's rows that a step touches when some are asked for more often.

An id is the row of rank r (by how often it is asked for) with probability r^-s / H, a Zipf law of
exponent s; s = 0 makes all rows equal. Of n ids, a row of probability p is among them with
probability 1 - e^(-n p); the sum over all rows is taken row by row over the most frequent ones and
by Gauss's quadrature over log-spaced intervals of the rest: about a hundred terms whatever the
table's size, within 0.1% of the whole sum. Standard library only.
"""

from __future__ import annotations

import math
from functools import lru_cache

HEAD = 24  # ranks that are summed one by one
SPACING = 0.7  # width of the other intervals, in ln(rank)
# of an interval, and their weights
NODES = ((-math.sqrt(0.6), 5 / 18), (0.0, 8 / 18), (math.sqrt(0.6), 5 / 18))
STEEPEST = 8.0  # skew beyond which every id of a step is one of a few rows
HALVINGS = 40


@lru_cache(maxsize=4096)
def _ranks(rows: int) -> tuple[tuple[float, float], ...]:
    """(ln rank, number of rows that it stands for) of the terms of a sum over all rows."""
    terms = [(math.log(rank), 1.0) for rank in range(1, min(rows, HEAD) + 1)]
    if rows > HEAD:
        low, high = math.log(HEAD + 0.5), math.log(rows + 0.5)
        count = math.ceil((high - low) / SPACING)
        width = (high - low) / count
        for i in range(count):
            for node, weight in NODES:
                at = low + width * (i + 0.5 + node / 2)
                # a step d ln(rank) holds rank * d ln(rank) rows
                terms.append((at, weight * width * math.exp(at)))
    return tuple(terms)


@lru_cache(maxsize=4096)
def _total(rows: int, skew: float) -> float:
    """H, the sum of rank^-skew over all rows."""
    return sum(count * math.exp(-skew * rank) for rank, count in _ranks(rows))


@lru_cache(maxsize=4096)
def distinct_rows(rows: int, ids: float, skew: float = 0.0, first: int | None = None) -> float:
    """Expected number of different rows among some ids.

    Args:
        rows: number of rows of the table.
        ids: number of ids drawn.
        skew: exponent of the Zipf law, 0 or more.
        first: count only so many of the most frequent rows; None counts all.
    """
    counted = rows if first is None else first
    if skew == 0.0:
        return -counted * math.expm1(-ids / rows)
    # Poisson: a row of probability p is among n ids with probability 1 - e^(-n p).
    scale = -ids / _total(rows, skew)
    return -sum(
        count * math.expm1(scale * math.exp(-skew * rank)) for rank, count in _ranks(counted)
    )


def fit_skew(rows: int, ids: float, seen: float) -> float:
    """The exponent for which `ids` of a sample are expected to be of `seen` different rows.

    It is 0 where uniform ids would repeat as often.

    Args:
        rows: number of rows of the table.
    """
    low, high = 0.0, STEEPEST
    if seen >= distinct_rows(rows, ids):
        return low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if distinct_rows(rows, ids, middle) > seen else (low, middle)
    return (low + high) / 2
