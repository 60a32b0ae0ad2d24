"""Choose an option and ranks for every item so that the slowest rank is fast and every rank's
memory holds.

For a ceiling of T seconds the best packing is nearly the greedy one: items by falling work, each by
the option that is cheapest for the mean rank among those that fit under T, on the least loaded
ranks. So a ladder of ceilings is packed, from the lower bound up; the best are then polished by
moving or exchanging what lies on the slowest rank and by uneven cuts, as long as that helps, and
neighbours are seated together. Where memory is tight, an item that finds no place goes to the front
and the packing starts again; the last resort packs by bytes alone.

More memory makes no plan slower: besides the packing that ignores memory, those under a fixed
ladder of limits count as found wherever they fit, and the fastest is taken. Where storages are
open, `storages` fixes them step by step until such a packing fits; a later step may have found a
plan that is faster by up to a percent. The last resort is not on the ladder: in a little more
memory than it needs, a plan may be some percent slower. Deterministic. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayrec.layout.topology import Topology
from rayrec.planner.bounds import lower_bound
from rayrec.planner.exact import solve
from rayrec.planner.neighbours import seat_neighbours
from rayrec.planner.options import Item
from rayrec.planner.packing import INFINITE, Choice, Packing
from rayrec.planner.polish import polish, quality
from rayrec.planner.storages import fixed_storages, least_bytes
from rayrec.planner.uneven import Recutter, even_out

CEILINGS = (1.0, 1.01, 1.025, 1.05, 1.1, 1.2, 1.35, 1.6, 2.0, 3.0)  # times the lower bound
# where the ladder ended far from the bound, on problems of at most SMALL
FINE = tuple(1.0 + i / 32 for i in range(32))
FAR = 1.05
# the best packings of the ladder; of the fine one; of that without memory limits
POLISHED, POLISHED_FINE, POLISHED_FREE = 2, 4, 16
NO_LIMIT = 1 << 62
# memory ladder, times the bytes of a perfectly even packing
LIMITS = (1.02, 1.06, 1.15, 1.35, 1.8, 3.0)
SMALL = 4000  # items x ranks up to which every search is a fine one
# items x ranks up to which the whole memory ladder is always searched, so that more memory makes no
# plan slower
MONOTONE = 16_000
RESTARTS = 16


@dataclass(slots=True)
class NoRoom(Exception):
    """Item `item` fits nowhere; `free_bytes` per rank are what the other items left."""

    item: int
    free_bytes: tuple[int, ...] = ()


def pack(
    items: Sequence[Item], topology: Topology, recutter: Recutter | None = None
) -> list[Choice]:
    """A choice for every item.

    Args:
        items: none without options.
        recutter: prices uneven cuts; without it only the options' own cuts are used.
    Raises:
        NoRoom: the item that found no place, in the last attempt.
    """
    world, limits = topology.world_size, topology.memory_bytes
    found: list[Packing] = []
    for each in fixed_storages(items, world):
        if least_bytes(each, world) * world <= sum(limits) * (1 + 1e-9):
            packings, fits = _packings(each, topology, recutter)
            found += packings
            if fits:
                break
    bound = lower_bound(items, world)
    if not found:
        exact = _search(items, topology, limits, bound, recutter)
        found = [exact if exact is not None else _by_bytes(items, topology, limits)]
    best = min(found, key=quality)
    if (
        best.slowest > bound * 1.001
        and (exact_choices := solve(items, topology, best.slowest)) is not None
    ):
        return seat_neighbours(items, exact_choices, topology, limits, more=1.0)
    return [best.choices[item] for item in range(len(items))]


def _packings(
    items: Sequence[Item], topology: Topology, recutter: Recutter | None
) -> tuple[list[Packing], bool]:
    """Those that fit under the memory limits, and whether the one that ignores memory is among
    them.
    """
    world, limits = topology.world_size, topology.memory_bytes
    bound = lower_bound(items, world)
    free = _search(items, topology, [NO_LIMIT] * world, bound, recutter)
    found: list[Packing] = []
    fits = free is not None and all(
        used + free.home_bytes <= limit for used, limit in zip(free.used, limits, strict=True)
    )
    if free is not None and fits:
        found.append(free)
    if not fits or (
        len(items) * world <= MONOTONE and free is not None and free.slowest > bound * 1.0001
    ):
        even = least_bytes(items, world)
        mean = max(sum(limits) / world, 1.0)
        for factor in LIMITS:
            share = even * factor / mean
            if share <= 1.0:
                packing = _search(
                    items, topology, [int(limit * share) for limit in limits], bound, recutter
                )
                found += [packing] if packing is not None else []
    return found, fits


def has_room(items: Sequence[Item], topology: Topology) -> bool:
    """Whether `pack` finds room for every item, without searching for a fast packing."""
    order = sorted(range(len(items)), key=lambda i: (-min(o.work_s for o in items[i].options), i))
    if (
        _first(
            items, topology, topology.memory_bytes, order, lower_bound(items, topology.world_size)
        )
        is not None
    ):
        return True
    try:
        _by_bytes(items, topology, topology.memory_bytes)
    except NoRoom:
        return False
    return True


def _search(
    items: Sequence[Item],
    topology: Topology,
    limits: Sequence[int],
    bound: float,
    recutter: Recutter | None,
) -> Packing | None:
    """The best packing under some limits, or None when the greedy order finds no room."""
    order = sorted(range(len(items)), key=lambda i: (-min(o.work_s for o in items[i].options), i))
    best = _climb(items, topology, limits, order, bound, CEILINGS, POLISHED)
    if best is None:
        return None
    if best.slowest > bound * FAR and len(items) * topology.world_size <= SMALL:
        polished = POLISHED_FREE if min(limits) >= NO_LIMIT else POLISHED_FINE
        finer = _climb(items, topology, limits, order, bound, FINE, polished)
        best = min((p for p in (best, finer) if p is not None), key=quality)
    _tidy(best, order)
    best = _rebuilt(best)
    if recutter is not None:
        even_out(best, recutter, bound)
    choices = [best.choices[item] for item in range(len(items))]
    return _packed(
        topology, items, limits, dict(enumerate(seat_neighbours(items, choices, topology, limits)))
    )


def _climb(
    items: Sequence[Item],
    topology: Topology,
    limits: Sequence[int],
    order: Sequence[int],
    bound: float,
    ceilings: Sequence[float],
    polished: int,
) -> Packing | None:
    """Pack under every ceiling, polish the best few, take the best."""
    ladder: list[Packing] = []
    for factor in ceilings:
        packing = _first(items, topology, limits, order, bound * factor)
        if packing is None:
            continue
        ladder.append(packing)
        if packing.slowest <= bound * 1.001:
            break
    ladder.sort(key=quality)
    for packing in ladder[:polished]:
        polish(packing, bound)
    return min(ladder[:polished], key=quality, default=None)


def _first(
    items: Sequence[Item],
    topology: Topology,
    limits: Sequence[int],
    order: Sequence[int],
    ceiling: float,
) -> Packing | None:
    """Greedy under a ceiling; items that found no room go to the front of another attempt. None
    when that does not help.
    """
    order = list(order)
    for _ in range(RESTARTS):
        packing = Packing(topology, items, limits)
        failed = _place_all(packing, order, ceiling)
        if failed is None:
            return packing
        if order[0] == failed:
            return None  # not even an empty world has room
        order.remove(failed)
        order.insert(0, failed)
    return None


def _place_all(packing: Packing, order: Sequence[int], ceiling: float) -> int | None:
    """Place items in order, each by the first option that fits under the ceiling, else by the least
    harmful. The first without room.
    """
    for item in order:
        choice = _under(packing, item, ceiling - packing.home_s) or _least_harm(packing, item)
        if choice is None:
            return item
        packing.put(item, choice)
    return None


def _under(packing: Packing, item: int, ceiling: float) -> Choice | None:
    lowest = packing.loads[packing.order()[0]]
    for option in packing.items[item].options:
        top = ceiling - option.home_s
        if lowest + option.work_s / option.num_ranks > top * 1.000001:
            continue
        choice = packing.find(item, option, top)
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


def _tidy(packing: Packing, order: Sequence[int]) -> None:
    """Undo splits that do not help: every item to its cheapest option that leaves the slowest rank
    no slower. Small items first.
    """
    slowest = packing.slowest
    for item in reversed(order):
        options = packing.items[item].options
        if packing.choices[item].option is options[0]:
            continue
        old = packing.take(item)
        better = _under(packing, item, slowest - packing.home_s)
        packing.put(
            item, better if better is not None and better.option.mean_s < old.option.mean_s else old
        )


def _rebuilt(packing: Packing) -> Packing:
    """The same choices, free of the rounding of many changes."""
    return _packed(packing.topology, packing.items, packing.limits, packing.choices)


def _packed(
    topology: Topology, items: Sequence[Item], limits: Sequence[int], choices: Mapping[int, Choice]
) -> Packing:
    fresh = Packing(topology, items, limits)
    for item, choice in sorted(choices.items()):
        fresh.put(item, choice)
    return fresh


def _by_bytes(items: Sequence[Item], topology: Topology, limits: Sequence[int]) -> Packing:
    """Pack by bytes alone, largest first; then polish by time under the limits.

    Raises:
        NoRoom: an item found no place.
    """
    order = sorted(
        range(len(items)), key=lambda i: (-min(o.most_bytes for o in items[i].options), i)
    )
    packing = Packing(topology, items, limits, by_bytes=True)
    failed = _place_all(packing, order, 0.0)
    if failed is not None:
        raise NoRoom(failed, packing.free_bytes())
    timed = _rebuilt(packing)
    polish(timed, 0.0)
    return timed
