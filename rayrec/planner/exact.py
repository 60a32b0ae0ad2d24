"""The best packing of a small problem, by branch and bound.

Every option of every item is tried on every set of ranks, so only few combinations may exist: those
of four tables on three ranks, say. A branch ends where a rank already is as slow as the best
packing known. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import comb

from rayrec.layout.topology import Topology
from rayrec.planner.options import Item
from rayrec.planner.packing import Choice, Packing

MOST = 30_000  # combinations


def solve(items: Sequence[Item], topology: Topology, known: float) -> list[Choice] | None:
    """The fastest packing; None if it takes `known` seconds or the problem is too large."""
    total = 1
    for item in items:
        total *= sum(
            comb(len(site), option.num_ranks) for option in item.options for site in option.sites
        )
        if total > MOST:
            return None
    packing = Packing(topology, items, topology.memory_bytes)
    ways = [_ways(item) for item in items]
    best = _Best(known * (1 - 1e-9))
    # Items with most work first: their branches end soonest.
    order = sorted(range(len(items)), key=lambda i: (-items[i].options[0].work_s, i))
    _branch(packing, order, ways, best)
    return [best.choices[item] for item in range(len(items))] if best.choices else None


class _Best:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.choices: dict[int, Choice] = {}


def _ways(item: Item) -> list[Choice]:
    return [
        Choice(option, ranks)
        for option in item.options
        for site in option.sites
        for ranks in combinations(site, option.num_ranks)
    ]


def _branch(
    packing: Packing, order: Sequence[int], ways: Sequence[list[Choice]], best: _Best
) -> None:
    if not order:
        best.seconds, best.choices = packing.slowest, dict(packing.choices)
        return
    item = order[0]
    banned = packing.banned(item)
    for choice in ways[item]:
        if banned and not banned.isdisjoint(choice.ranks):
            continue
        packing.put(item, choice)
        if packing.slowest < best.seconds and min(packing.free_bytes()) >= 0:
            _branch(packing, order[1:], ways, best)
        packing.take(item)
