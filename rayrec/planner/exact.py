"""The best packing of a small problem, by branch and bound.

Every option of every item is tried on every set of ranks, so only few combinations may exist: those
of four tables on three ranks, say. A branch ends where a rank already is slower than the best
packing known. Of packings whose slowest ranks are equally fast, that with the least work of all
ranks is taken: beside a busier rank, an idle one would hide the work of a needless split or of
rows that left the device. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import comb

from rayrec.layout.topology import Topology
from rayrec.planner.options import Item
from rayrec.planner.packing import INFINITE, Choice, Packing
from rayrec.planner.polish import quality

MOST = 30_000  # combinations
# Sums of seconds differ by rounding, as items come and go; packings this close are equal.
ROUNDING = 1e-9


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
    best = _Best(known * (1 - ROUNDING))
    # Items with most work first: their branches end soonest.
    order = sorted(range(len(items)), key=lambda i: (-items[i].options[0].work_s, i))
    _branch(packing, order, ways, best)
    return [best.choices[item] for item in range(len(items))] if best.choices else None


class _Best:
    """The best packing so far; before the first, only what it has to beat."""

    def __init__(self, known: float) -> None:
        self.slowest = known
        self.work = INFINITE
        self.choices: dict[int, Choice] = {}

    def allows(self, slowest: float) -> bool:
        """Return True if a packing with this slowest rank may still become the best."""
        return slowest <= self.slowest * (1 + ROUNDING if self.choices else 1)

    def offer(self, packing: Packing) -> None:
        """Keep a packing that is allowed, if it is faster or as fast with less work."""
        slowest, work = quality(packing)
        if slowest < self.slowest * (1 - ROUNDING) or work < self.work * (1 - ROUNDING):
            # the least value seen, since many steps of one rounding each would lead upwards
            self.slowest = min(self.slowest, slowest)
            self.work, self.choices = work, dict(packing.choices)


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
        best.offer(packing)
        return
    item = order[0]
    banned = packing.banned(item)
    for choice in ways[item]:
        if banned and not banned.isdisjoint(choice.ranks):
            continue
        packing.put(item, choice)
        if best.allows(packing.slowest) and min(packing.free_bytes()) >= 0:
            _branch(packing, order[1:], ways, best)
        packing.take(item)
