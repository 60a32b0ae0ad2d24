"""Packing in one order: each item where it is cheap under a ceiling, or else does least harm.

What `search` does again and again. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rayrec.layout.topology import Topology
from rayrec.planner.options import Item, Option
from rayrec.planner.packing import INFINITE, Choice, Packing


@dataclass(slots=True)
class NoRoom(Exception):
    """Item `item` fits nowhere.

    Attributes:
        free_bytes: what the others left on every rank, less their buffers that have no place yet.
    """

    item: int
    free_bytes: tuple[int, ...] = ()


def by_least(items: Sequence[Item], price: Callable[[Option], float]) -> list[int]:
    """Return the items, that whose cheapest option has the highest price first."""
    least = [item.least(price) for item in items]
    return sorted(range(len(items)), key=lambda i: (-least[i], i))


def place_all(packing: Packing, order: Sequence[int], ceiling: float) -> int | None:
    """Place items in order, each by the first option under the ceiling, else the least harmful.

    Returns:
        The first item that has no room, or None.
    """
    for item in order:
        choice = _under(packing, item, ceiling - packing.home_s) or _least_harm(packing, item)
        if choice is None:
            return item
        packing.put(item, choice)
    return None


def _under(packing: Packing, item: int, ceiling: float) -> Choice | None:
    for option in packing.items[item].options:
        top = ceiling - option.home_s
        choice = packing.find(item, option, top) if packing.may_hold(option, top) else None
        if choice is not None:
            return choice
    return None


def _least_harm(packing: Packing, item: int) -> Choice | None:
    """The choice whose slowest rank is fastest."""
    best, best_key = None, (INFINITE, INFINITE)
    for option in packing.items[item].options:
        choice = packing.find(item, option)
        if choice is not None:
            key = (packing.lifted(choice), option.mean_s)
            if key < best_key:
                best, best_key = choice, key
    return best


def packed(
    topology: Topology, items: Sequence[Item], limits: Sequence[int], choices: Mapping[int, Choice]
) -> Packing:
    """Return a packing of what was chosen."""
    fresh = Packing(topology, items, limits)
    for item, choice in sorted(choices.items()):
        fresh.put(item, choice)
    return fresh


def place(
    items: Sequence[Item], topology: Topology, limits: Sequence[int], by_bytes: bool
) -> Packing:
    """Put each item where it makes the slowest rank least slow, those of most work first.

    Args:
        limits: bytes per rank.
        by_bytes: count bytes in the place of seconds.
    Raises:
        NoRoom: an item found no place.
    """
    order = by_least(items, lambda option: option.most_bytes if by_bytes else option.work_s)
    packing = Packing(topology, items, limits, by_bytes)
    failed = place_all(packing, order, 0.0)
    if failed is not None:
        kept = packing.reserve - packing.least_home[failed]
        raise NoRoom(failed, tuple(free - kept for free in packing.free_bytes()))
    return packing
