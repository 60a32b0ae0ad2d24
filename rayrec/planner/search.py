"""Choose an option and ranks for every item so that the slowest rank is fast and all memory holds.

For a ceiling of T seconds the best packing is nearly the greedy one: items by falling work, each by
the option that is cheapest for the mean rank among those that fit under T, on the least loaded
ranks. So a ladder of ceilings is packed, from the lower bound up; the best are then polished by
moving or exchanging what lies on the slowest rank and by uneven cuts, as long as that helps, and
neighbours are seated together. Where memory is tight, an item that finds no place goes to the front
and the packing starts again; the last resort packs by bytes alone, and tries every packing of few
items on few ranks.

More memory makes no plan slower, by more than a quarter of a percent: besides the packing that
ignores memory, those under a fixed ladder of limits count as found wherever they fit, and the
fastest is taken. What is nearer than that to the lower bound ends the search. Where storages are
open, `storages` fixes them step by step until such a packing fits; a later step may have found a
plan that is faster by up to a percent. The last resort is not on the ladder: in a little more
memory than it needs, a plan may be some percent slower. Deterministic. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rayrec.layout.topology import Topology
from rayrec.planner.bounds import lower_bound
from rayrec.planner.exact import ROUNDING, solve
from rayrec.planner.greedy import NoRoom, by_least, packed, place, place_all
from rayrec.planner.neighbours import seat_neighbours
from rayrec.planner.options import Item
from rayrec.planner.packing import INFINITE, Choice, Packing
from rayrec.planner.polish import polish, quality
from rayrec.planner.storages import fixed_storages, least_bytes
from rayrec.planner.uneven import Recutter, even_out

CEILINGS = (1.0, 1.01, 1.025, 1.05, 1.1, 1.2, 1.35, 1.6, 2.0, 3.0)  # times the lower bound
# a second ladder, where the first ended FAR from the bound, on problems of at most SMALL
FINE = tuple(1.0 + i / 32 for i in range(32))
FAR = 1.05
# how many of the best packings are polished: of the ladder, of the fine one, of that without limits
POLISHED, POLISHED_FINE, POLISHED_FREE = 2, 4, 16
NO_LIMIT = 1 << 62
# memory ladder, times the bytes of a perfectly even packing
LIMITS = (1.02, 1.06, 1.15, 1.35, 1.8, 3.0)
SMALL = 4000  # items x ranks up to which every search is a fine one
# items x ranks up to which the memory ladder is searched although all memory suffices, so that more
# of it makes no plan slower
MONOTONE = 16_000
# times the lower bound: so near a packing ends the search, of problems up to SMALL and of others
NEAR_SMALL, NEAR = 1.0001, 1.0025
RESTARTS = 16


@dataclass(frozen=True)
class _Problem:
    """Input of a search, the same for all of its packings."""

    items: Sequence[Item]
    topology: Topology
    recutter: Recutter | None = None

    @cached_property
    def bound(self) -> float:
        """Seconds that no packing beats."""
        return lower_bound(self.items)

    @cached_property
    def order(self) -> list[int]:
        """Items by falling work of their cheapest option."""
        return by_least(self.items, lambda option: option.work_s)


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
    packings: list[Packing] = []
    for each in fixed_storages(items, world):
        if least_bytes(each, world) * world <= sum(limits) * (1 + 1e-9):
            fitting, fits = _packings(_Problem(each, topology, recutter))
            packings += fitting
            if fits:
                break
    problem = _Problem(items, topology, recutter)
    if not packings:
        last = _search(problem, limits)
        packings = [_last_resort(problem) if last is None else last]
    best = min(packings, key=quality)
    if best.slowest > problem.bound * (1 + ROUNDING):
        # Small problems are solved exactly where the search ended above the bound.
        exact = solve(items, topology, best.slowest)
        if exact is not None:
            found = packed(topology, items, limits, dict(enumerate(exact)))
            return seat_neighbours(found, more=1.0)
    return [best.choices[item] for item in range(len(items))]


def _packings(problem: _Problem) -> tuple[list[Packing], bool]:
    """Packings within the limits, and whether that which ignores memory is among them."""
    world, limits = problem.topology.world_size, problem.topology.memory_bytes
    free = _search(problem, [NO_LIMIT] * world)
    packings: list[Packing] = []
    fits = free is not None and all(
        own + free.home_bytes <= limit for own, limit in zip(free.used, limits, strict=True)
    )
    size = len(problem.items) * world
    if free is not None and fits:
        packings.append(free)
        if size > MONOTONE:
            return packings, fits
    # A packing of the ladder may be faster than the free one, which is found greedily, too.
    enough = problem.bound * (NEAR_SMALL if size <= SMALL else NEAR)
    even = least_bytes(problem.items, world)
    mean = max(sum(limits) / world, 1.0)
    for factor in reversed(LIMITS):
        if min((packing.slowest for packing in packings), default=INFINITE) <= enough:
            break
        share = even * factor / mean
        if share <= 1.0:
            packing = _search(problem, [int(limit * share) for limit in limits])
            # of equally fast ones that of the lower limit is taken
            packings[int(fits) : int(fits)] = [] if packing is None else [packing]
    return packings, fits


def has_room(items: Sequence[Item], topology: Topology) -> bool:
    """Return True if `pack` finds room for every item, without searching for a fast packing."""
    problem = _Problem(items, topology)
    if _first(problem, topology.memory_bytes, problem.bound) is not None:
        return True
    try:
        _last_resort(problem)
    except NoRoom:
        return False
    return True


def _search(problem: _Problem, limits: Sequence[int]) -> Packing | None:
    """The best packing under some limits, or None when the greedy order finds no room."""
    best = _climb(problem, limits, CEILINGS, POLISHED)
    if best is None:
        return None
    small = len(problem.items) * problem.topology.world_size <= SMALL
    if small and best.slowest > problem.bound * FAR:
        polished = POLISHED_FREE if min(limits) >= NO_LIMIT else POLISHED_FINE
        finer = _climb(problem, limits, FINE, polished), _by_bytes(problem, limits)
        best = min((p for p in (best, *finer) if p is not None), key=quality)
    # Packed anew, sums are free of the rounding of many changes.
    best = packed(problem.topology, problem.items, limits, best.choices)
    if problem.recutter is not None:
        even_out(best, problem.recutter, problem.bound)
        best = packed(problem.topology, problem.items, limits, best.choices)
    seated = seat_neighbours(best)
    return packed(problem.topology, problem.items, limits, dict(enumerate(seated)))


def _climb(
    problem: _Problem, limits: Sequence[int], ceilings: Sequence[float], polished: int
) -> Packing | None:
    """Pack under every ceiling, polish the best few, take the best."""
    ladder: list[Packing] = []
    for factor in ceilings:
        packing = _first(problem, limits, problem.bound * factor)
        if packing is None:
            continue
        ladder.append(packing)
        if packing.slowest <= problem.bound * 1.001:
            break
    ladder.sort(key=quality)
    # Which of the packings polishing helps most is not known before.
    for packing in ladder[:polished]:
        polish(packing, problem.bound)
    return min(ladder[:polished], key=quality, default=None)


def _first(problem: _Problem, limits: Sequence[int], ceiling: float) -> Packing | None:
    """Greedy under a ceiling, with an item that found no room in front next; None if none helps."""
    order = problem.order.copy()
    for _ in range(RESTARTS):
        packing = Packing(problem.topology, problem.items, limits)
        failed = place_all(packing, order, ceiling)
        if failed is None:
            return packing
        if order[0] == failed:
            return None  # not even an empty world has room
        order.remove(failed)
        order.insert(0, failed)
    return None


def _by_bytes(problem: _Problem, limits: Sequence[int]) -> Packing | None:
    """Pack by bytes alone, largest first; then polish by time under the limits."""
    items, topology = problem.items, problem.topology
    try:
        choices = place(items, topology, limits, by_bytes=True).choices
    except NoRoom:
        return None
    timed = packed(topology, items, limits, choices)
    polish(timed, problem.bound)
    return timed


def _last_resort(problem: _Problem) -> Packing:
    """Pack by bytes alone, or few items in any way that fits; NoRoom where an item has no place."""
    items, topology = problem.items, problem.topology
    packing = _by_bytes(problem, topology.memory_bytes)
    exact = solve(items, topology, INFINITE) if packing is None else None
    if exact is not None:
        packing = packed(topology, items, topology.memory_bytes, dict(enumerate(exact)))
    return packing or place(items, topology, topology.memory_bytes, by_bytes=True)
