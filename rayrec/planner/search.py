"""Choose an option and ranks for every item so that the slowest rank is fast and every rank's memory holds.

For a ceiling of T seconds the best packing is nearly the greedy one: items by falling work, each by the option that is cheapest for
the mean rank among those that fit under T, on the least loaded ranks. So a ladder of ceilings is packed, from the lower bound up; the
best are then polished by moving or exchanging what lies on the slowest rank and by uneven cuts, as long as that helps. Where memory is
tight, an item that finds no place goes to the front and the packing starts again; the last resort packs by bytes alone.

More memory makes no plan slower: besides the packing that ignores memory, those under a fixed ladder of limits count as found wherever
they fit, and the fastest is taken. Deterministic. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayrec.layout.topology import Topology
from rayrec.planner.bounds import lower_bound
from rayrec.planner.exact import solve
from rayrec.planner.options import Item
from rayrec.planner.packing import INFINITE, Choice, Packing
from rayrec.planner.uneven import Recutter, even_out

CEILINGS = (1.0, 1.01, 1.025, 1.05, 1.1, 1.2, 1.35, 1.6, 2.0, 3.0)  # times the lower bound
FINE = tuple(1.0 + i / 32 for i in range(32))  # where the ladder ended far from the bound, on problems of at most SMALL
FAR = 1.05
POLISHED, POLISHED_FINE = 2, 16  # the best packings of the ladder
LIMITS = (1.02, 1.06, 1.15, 1.35, 1.8, 3.0)  # memory ladder, times the bytes of a perfectly even packing
SMALL = 4000  # items x ranks up to which every search is a fine one
MONOTONE = 16_000  # items x ranks up to which the whole memory ladder is always searched, so that more memory makes no plan slower
RESTARTS = 16
PATIENCE = 60  # moves without a faster slowest rank


@dataclass(slots=True)
class NoRoom(Exception):
    """Item `item` fits nowhere; `free_bytes` per rank are what the other items left."""

    item: int
    free_bytes: tuple[int, ...] = ()


def pack(items: Sequence[Item], topology: Topology, recutter: Recutter | None = None) -> list[Choice]:
    """A choice for every item.

    Args:
        items: none without options.
        recutter: prices uneven cuts; without it only the options' own cuts are used.
    Raises:
        NoRoom: the item that found no place, in the last attempt.
    """
    world, limits = topology.world_size, topology.memory_bytes
    bound = lower_bound(items, world)
    free = _search(items, topology, [1 << 62] * world, bound, recutter)
    found: list[Packing] = []
    fits = free is not None and all(used + free.home_bytes <= limit for used, limit in zip(free.used, limits, strict=True))
    if free is not None and fits:
        found.append(free)
    if not fits or (len(items) * world <= MONOTONE and free is not None and free.slowest > bound * 1.0001):
        even = sum(min(sum(o.num_bytes) + world * o.home_bytes for o in item.options) for item in items) / world
        mean = max(sum(limits) / world, 1.0)
        for factor in LIMITS:
            share = even * factor / mean
            if share <= 1.0:
                packing = _search(items, topology, [int(limit * share) for limit in limits], bound, recutter)
                found += [packing] if packing is not None else []
    if not found:
        exact = _search(items, topology, limits, bound, recutter)
        found = [exact if exact is not None else _by_bytes(items, topology, limits)]
    best = min(found, key=_quality)
    if best.slowest > bound * 1.001 and (exact_choices := solve(items, topology, best.slowest)) is not None:
        return exact_choices
    return [best.choices[item] for item in range(len(items))]


def has_room(items: Sequence[Item], topology: Topology) -> bool:
    """Whether `pack` finds room for every item, without searching for a fast packing."""
    order = sorted(range(len(items)), key=lambda i: (-min(o.work_s for o in items[i].options), i))
    if _first(items, topology, topology.memory_bytes, order, lower_bound(items, topology.world_size)) is not None:
        return True
    try:
        _by_bytes(items, topology, topology.memory_bytes)
    except NoRoom:
        return False
    return True


def _quality(packing: Packing) -> tuple[float, float]:
    return packing.slowest, sum(packing.loads)


def _search(items: Sequence[Item], topology: Topology, limits: Sequence[int], bound: float, recutter: Recutter | None) -> Packing | None:
    """The best packing under some limits, or None when the greedy order finds no room."""
    order = sorted(range(len(items)), key=lambda i: (-min(o.work_s for o in items[i].options), i))
    best = _climb(items, topology, limits, order, bound, CEILINGS, POLISHED)
    if best is None:
        return None
    if best.slowest > bound * FAR and len(items) * topology.world_size <= SMALL:
        finer = _climb(items, topology, limits, order, bound, FINE, POLISHED_FINE)
        best = min((p for p in (best, finer) if p is not None), key=_quality)
    _tidy(best, order)
    best = _rebuilt(best)
    if recutter is not None:
        even_out(best, recutter, bound)
    return best


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
    ladder.sort(key=_quality)
    for packing in ladder[:polished]:
        _polish(packing, bound)
    return min(ladder[:polished], key=_quality, default=None)


def _first(items: Sequence[Item], topology: Topology, limits: Sequence[int], order: Sequence[int], ceiling: float) -> Packing | None:
    """Greedy under a ceiling; items that found no room go to the front of another attempt. None when that does not help."""
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
    """Place items in order, each by the first option that fits under the ceiling, else by the least harmful. The first without room."""
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


def _polish(packing: Packing, bound: float) -> None:
    """Empty the slowest rank, move by move, until nothing on it has a better place."""
    best, best_key, idle = dict(packing.choices), _quality(packing), 0
    stuck: set[int] = set()
    while idle < PATIENCE and packing.slowest > bound * 1.0005:
        ranked = packing.order()
        rank = next((r for r in reversed(ranked) if r not in stuck), None)
        if rank is None or packing.loads[rank] < max(packing.loads) * 0.999:
            break
        if _relieve(packing, rank):
            stuck.clear()
        else:
            stuck.add(rank)
        key = _quality(packing)
        if key[0] < best_key[0] * (1 - 1e-9):
            best, best_key, idle = dict(packing.choices), key, 0
        else:
            idle += 1
    if _quality(packing) > best_key:
        for item in sorted(packing.choices):
            packing.take(item)
        for item, choice in sorted(best.items()):
            packing.put(item, choice)


def _relieve(packing: Packing, rank: int) -> bool:
    """Move an item off a rank, or exchange it for a lighter one, so that all ranks that it meets end below what this one had."""
    had = packing.loads[rank]
    mine = sorted(packing.on_rank[rank], key=lambda i: (-packing.choices[i].option.mean_s, i))
    for item in mine:
        old = packing.take(item)
        goal = (had + old.option.home_s) * (1 - 1e-6)
        best, best_key = None, (goal, INFINITE)
        for option in packing.items[item].options:
            choice = packing.find(item, option, goal - option.home_s)
            if choice is not None:
                key = (max(packing.lifted(choice), packing.loads[rank] + option.home_s), option.mean_s)
                if key < best_key:
                    best, best_key = choice, key
        packing.put(item, best or old)
        if best is not None:
            return True
    return _exchange(packing, rank, mine)


def _exchange(packing: Packing, rank: int, mine: Sequence[int]) -> bool:
    """Swap a whole item of this rank with a lighter one of one of the idlest ranks."""
    had = packing.loads[rank]
    for item in mine[:8]:
        choice = packing.choices[item]
        if choice.option.num_ranks > 1:
            continue
        for other in packing.order()[:8]:
            gap = had - packing.loads[other]
            seconds = packing.seconds_of(choice.option, (rank,))[0]
            for partner in sorted(packing.on_rank[other]):
                theirs = packing.choices[partner]
                if theirs.option.num_ranks > 1 or not 0 < seconds - packing.seconds_of(theirs.option, (other,))[0] < gap:
                    continue
                if _swap(packing, item, partner, had):
                    return True
    return False


def _swap(packing: Packing, item: int, partner: int, ceiling: float) -> bool:
    old = {item: packing.take(item), partner: packing.take(partner)}
    wanted = {item: Choice(old[item].option, old[partner].ranks), partner: Choice(old[partner].option, old[item].ranks)}
    home = packing.home_bytes + sum(choice.option.home_bytes for choice in wanted.values())
    for one, choice in wanted.items():
        (rank,) = choice.ranks
        room = packing.limits[rank] - packing.used[rank] >= choice.option.num_bytes[0] + home
        allowed = any(rank in site for site in choice.option.sites) and rank not in packing.banned(one)
        if not (room and allowed and packing.loads[rank] + packing.seconds_of(choice.option, choice.ranks)[0] < ceiling):
            break
        packing.put(one, choice)
    else:
        return True
    for one in old:
        if one in packing.choices:
            packing.take(one)
    for one, choice in old.items():
        packing.put(one, choice)
    return False


def _tidy(packing: Packing, order: Sequence[int]) -> None:
    """Undo splits that do not help: every item to its cheapest option that leaves the slowest rank no slower. Small items first."""
    slowest = packing.slowest
    for item in reversed(order):
        options = packing.items[item].options
        if packing.choices[item].option is options[0]:
            continue
        old = packing.take(item)
        better = _under(packing, item, slowest - packing.home_s)
        packing.put(item, better if better is not None and better.option.mean_s < old.option.mean_s else old)


def _rebuilt(packing: Packing) -> Packing:
    """The same choices, free of the rounding of many changes."""
    fresh = Packing(packing.topology, packing.items, packing.limits)
    for item, choice in sorted(packing.choices.items()):
        fresh.put(item, choice)
    return fresh


def _by_bytes(items: Sequence[Item], topology: Topology, limits: Sequence[int]) -> Packing:
    """Pack by bytes alone, largest first; then polish by time under the limits.

    Raises:
        NoRoom: an item found no place.
    """
    order = sorted(range(len(items)), key=lambda i: (-min(o.most_bytes for o in items[i].options), i))
    packing = Packing(topology, items, limits, by_bytes=True)
    failed = _place_all(packing, order, 0.0)
    if failed is not None:
        raise NoRoom(failed, packing.free_bytes())
    timed = _rebuilt(packing)
    _polish(timed, 0.0)
    return timed
