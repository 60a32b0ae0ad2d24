"""Seconds that no packing can beat, by what its options cost. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence

from rayrec.planner.options import Item


def simple_bound(items: Sequence[Item]) -> float:
    """The cheapest work shared evenly, or the largest piece that no option avoids."""
    bound = float(sum(item.options[0].mean_s for item in items))
    for item in items:
        pieces = (option.work_s / option.num_ranks + option.home_s for option in item.options)
        bound = max(bound, min(pieces))
    return bound


def lower_bound(items: Sequence[Item]) -> float:
    """Seconds that no packing of these options can beat; at least `simple_bound`.

    In T seconds, an item can only use options whose pieces, with what all items cost every home,
    take at most T; the cheapest of those for the mean rank must not add up to more than T. The
    smallest such T is found by bisection.
    """
    home = sum(item.least(lambda option: option.home_s) for item in items)
    ways = []  # per item: (seconds that its rank takes at least, seconds of the mean rank)
    for item in items:
        others = home - item.least(lambda option: option.home_s)
        pieces = [option.work_s / option.num_ranks + option.home_s for option in item.options]
        means = [option.mean_s for option in item.options]
        ways.append([(own + others, mean) for own, mean in zip(pieces, means, strict=True)])
    low = simple_bound(items)

    def possible(top: float) -> bool:
        total = 0.0
        for each in ways:
            # options are sorted by mean
            cheapest = next((mean for piece, mean in each if piece <= top), None)
            if cheapest is None:
                return False
            total += cheapest
            if total > top:
                return False
        return True

    if not items or possible(low):
        return low
    largest = max(max(way) for each in ways for way in each)
    high = max(low, largest) * len(items) + home
    # Bisection: `low` is never possible, `high` always is.
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if possible(middle) else (middle, high)
        if high - low < 1e-4 * low:
            break
    return low
