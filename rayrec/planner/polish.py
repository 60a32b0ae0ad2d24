"""Polish a packing: empty its slowest rank as long as that helps.

What lies there moves to other ranks, or is exchanged for lighter items. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

from rayrec.planner.packing import INFINITE, Choice, Packing

PATIENCE = 60  # moves without a faster slowest rank


def quality(packing: Packing) -> tuple[float, float]:
    """Less is better: seconds of the slowest rank, then of all ranks."""
    return packing.slowest, sum(packing.loads)


def polish(packing: Packing, bound: float) -> None:
    """Empty the slowest rank, move by move, until nothing on it has a better place."""
    best, best_key, idle = dict(packing.choices), quality(packing), 0
    stuck: set[int] = set()
    while idle < PATIENCE and packing.slowest > bound * 1.0005:
        ranked = packing.order()
        rank = next((r for r in reversed(ranked) if r not in stuck), None)
        # To relieve a rank that is not the slowest does not make the step faster.
        if rank is None or packing.loads[rank] < max(packing.loads) * 0.999:
            break
        if _relieve(packing, rank):
            stuck.clear()
        else:
            stuck.add(rank)
        key = quality(packing)
        if key[0] < best_key[0] * (1 - 1e-9):
            best, best_key, idle = dict(packing.choices), key, 0
        else:
            idle += 1
    if quality(packing) > best_key:
        for item in sorted(packing.choices):
            packing.take(item)
        for item, choice in sorted(best.items()):
            packing.put(item, choice)


def _relieve(packing: Packing, rank: int) -> bool:
    """Move an item off a rank, or exchange it for a lighter one.

    All ranks that take part end below what this one had.
    """
    had = packing.loads[rank]
    mine = sorted(packing.on_rank[rank], key=lambda i: (-packing.choices[i].option.mean_s, i))
    for item in mine:
        old = packing.take(item)
        # Seconds below what the rank had, home included: options differ in what they ask of homes.
        goal = (had + old.option.home_s) * (1 - 1e-6)
        best, best_key = None, (goal, INFINITE)
        for option in packing.items[item].options:
            top = goal - option.home_s
            choice = packing.find(item, option, top) if packing.may_hold(option, top) else None
            if choice is not None:
                key = (
                    max(packing.lifted(choice), packing.loads[rank] + option.home_s),
                    option.mean_s,
                )
                if key < best_key:
                    best, best_key = choice, key
        packing.put(item, best or old)
        if best is not None:
            return True
    return _exchange(packing, rank, mine)


def _exchange(packing: Packing, rank: int, mine: Sequence[int]) -> bool:
    """Swap a whole item of this rank with a lighter one of one of the idlest ranks."""
    had = packing.loads[rank]
    whole: dict[int, list[tuple[int, float]]] = {}
    for item, seconds in _whole_items(packing, rank, mine[:8]):
        for other in packing.order()[:8]:
            if other not in whole:
                whole[other] = _whole_items(packing, other, sorted(packing.on_rank[other]))
            gap = had - packing.loads[other]
            for partner, theirs in whole[other]:
                if 0 < seconds - theirs < gap and _swap(packing, item, partner, had):
                    return True
    return False


def _whole_items(packing: Packing, rank: int, items: Sequence[int]) -> list[tuple[int, float]]:
    """Return the items that lie on the rank as a whole, with their seconds."""
    options = ((item, packing.choices[item].option) for item in items)
    return [
        (item, packing.seconds_of(option, (rank,))[0])
        for item, option in options
        if option.num_ranks == 1
    ]


def _swap(packing: Packing, item: int, partner: int, ceiling: float) -> bool:
    """Exchange two items of one rank each, unless there is no room or a rank reaches `ceiling`."""
    old = {item: packing.take(item), partner: packing.take(partner)}
    wanted = {
        item: Choice(old[item].option, old[partner].ranks),
        partner: Choice(old[partner].option, old[item].ranks),
    }
    home = packing.home_bytes + sum(choice.option.home_bytes for choice in wanted.values())
    for one, choice in wanted.items():
        (rank,) = choice.ranks
        option = choice.option
        has_room = packing.limits[rank] - packing.used[rank] >= option.num_bytes[0] + home
        is_site = any(rank in site for site in option.sites)
        if not (has_room and is_site) or rank in packing.banned(one):
            break
        if packing.loads[rank] + packing.seconds_of(option, choice.ranks)[0] >= ceiling:
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
