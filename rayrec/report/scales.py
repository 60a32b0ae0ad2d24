"""Which points of a curve are drawn, which range of values is shown, and where its lines lie.

Long curves are thinned: of every group of neighbouring points the least and the greatest stay, so
that a spike is seen. A few values far from the others do not flatten the rest; they lie outside of
the range. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10

Points = Sequence[tuple[int, float]]
MAX_POINTS = 600
# this many times the range of nearly all values is far
FAR = 4.0


def thinned(points: Points, most: int = MAX_POINTS) -> list[tuple[int, float]]:
    """At most about `most` of the points, the least and the greatest of every group among them."""
    if len(points) <= most:
        return list(points)
    kept = []
    size = ceil(2 * len(points) / most)
    for first in range(0, len(points), size):
        group = points[first : first + size]
        ends = {min(group, key=lambda p: p[1]), max(group, key=lambda p: p[1])}
        # The last point of all is the newest value, which people look for.
        ends |= {points[-1]} if first + size >= len(points) else set()
        kept += sorted(ends)
    return kept


def value_range(values: Sequence[float], from_zero: bool) -> tuple[float, float, int]:
    """Least and greatest value of a scale, and how many values lie outside of it."""
    values = sorted(values) or [0.0]
    low, high, outside = values[0], values[-1], 0
    # Of few values none is far: they are what there is.
    if len(values) >= 20:
        edge = max(1, len(values) // 50)
        near_low, near_high = values[edge], values[-1 - edge]
        spread = FAR * (near_high - near_low) or abs(near_high) or 1.0
        low, high = max(low, near_low - spread), min(high, near_high + spread)
        outside = sum(not low <= value <= high for value in values)
    if from_zero:
        low = min(0.0, low)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return (low if from_zero else low - room), high + room, outside


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers between two numbers."""
    rough = (high - low) / count
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.999 * rough)
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]
