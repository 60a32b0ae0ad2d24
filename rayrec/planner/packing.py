"""The state of a search: what every rank holds, and where one more item would go.

Ranks are kept in order of load, so that the places of an option are found by walking from the least
loaded: k ranks anywhere, or one host after another. A rank whose load has changed moves to its new
place in the order when that is asked for. Standard library only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from operator import sub

from rayrec.layout.geometry import Layout
from rayrec.layout.topology import Topology
from rayrec.planner.options import Item, Option

INFINITE = float("inf")
NOBODY: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Choice:
    """An option on chosen ranks, ascending."""

    option: Option
    ranks: tuple[int, ...]

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The real layout of every table of the item."""
        return self.option.layouts(self.ranks)


class Packing:
    """Items on ranks.

    Args:
        items: all that will be placed.
        limits: bytes per rank.
        by_bytes: balance bytes instead of seconds.
    """

    def __init__(
        self,
        topology: Topology,
        items: Sequence[Item],
        limits: Sequence[int],
        by_bytes: bool = False,
    ) -> None:
        world = topology.world_size
        self.topology, self.items = topology, items
        self.limits, self.by_bytes = list(limits), by_bytes
        self.loads = [0.0] * world
        self.used = [0] * world
        self.home_bytes = 0
        self.home_s = 0.0
        self.least_home = [min([o.home_bytes for o in item.options]) for item in items]
        # bytes on every rank for the buffers of items that have no place yet
        self.reserve = sum(self.least_home)
        self.choices: dict[int, Choice] = {}
        self.on_rank: list[set[int]] = [set() for _ in range(world)]
        self.locality = [len(topology.hosts[host]) for host in topology.host_of]
        # where ranks differ in nothing, an option takes the same seconds on all of them
        self._alike = None if by_bytes or len(set(self.locality)) > 1 else self.locality[0]
        # ranks by load, the least first, with the loads of `_seen`; `_moved` have changed since
        self._order = [(0.0, rank) for rank in range(world)]
        self._seen = [0.0] * world
        self._moved: set[int] = set()
        self._idlest: list[float] | None = None
        self._hosts_by_load: dict[tuple[tuple[int, ...], ...], list[tuple[int, ...]]] = {}
        self._tight: int | None = None

    @property
    def slowest(self) -> float:
        """Seconds of the slowest rank, home included."""
        return max(self.loads) + self.home_s

    def seconds_of(self, option: Option, ranks: Sequence[int]) -> Sequence[float]:
        """Return the load that the option adds to each of `ranks`."""
        if self._alike is not None:
            return option.seconds[self._alike]
        if self.by_bytes:
            limits = self.limits
            sized = zip(option.num_bytes, ranks, strict=True)
            return [num_bytes / max(limits[rank], 1) for num_bytes, rank in sized]
        by_locality, locality = option.seconds, self.locality
        return [by_locality[locality[rank]][position] for position, rank in enumerate(ranks)]

    def put(self, item: int, choice: Choice) -> None:
        """Place an item."""
        option, loads, used = choice.option, self.loads, self.used
        seconds = self.seconds_of(option, choice.ranks)
        for rank, load, num_bytes in zip(choice.ranks, seconds, option.num_bytes, strict=True):
            loads[rank] += load
            used[rank] += num_bytes
            self.on_rank[rank].add(item)
            if self._tight is not None and self.limits[rank] - used[rank] < self._tight:
                self._tight = self.limits[rank] - used[rank]
        # Every rank is home of its batch, whatever it owns.
        self.home_bytes += option.home_bytes
        self.home_s += option.home_s
        self.reserve -= self.least_home[item]
        self.choices[item] = choice
        self._changed(choice.ranks)

    def take(self, item: int) -> Choice:
        """Take an item out again."""
        choice = self.choices.pop(item)
        option, loads, used = choice.option, self.loads, self.used
        seconds = self.seconds_of(option, choice.ranks)
        for rank, load, num_bytes in zip(choice.ranks, seconds, option.num_bytes, strict=True):
            loads[rank] -= load
            used[rank] -= num_bytes
            self.on_rank[rank].discard(item)
        self.home_bytes -= option.home_bytes
        self.home_s -= option.home_s
        self.reserve += self.least_home[item]
        self._tight = None
        self._changed(choice.ranks)
        return choice

    def _changed(self, ranks: tuple[int, ...]) -> None:
        self._moved.update(ranks)
        self._idlest = None
        self._hosts_by_load.clear()

    def free_bytes(self) -> tuple[int, ...]:
        """Return the bytes that every rank has left."""
        ranks = zip(self.limits, self.used, strict=True)
        return tuple(limit - used - self.home_bytes for limit, used in ranks)

    def order(self) -> list[int]:
        """Ranks by load, the least first."""
        return [rank for _, rank in self._by_load()]

    def _by_load(self) -> list[tuple[float, int]]:
        order, loads, seen = self._order, self.loads, self._seen
        if not self._moved:
            return order
        if len(self._moved) > len(loads) // 4:
            order[:] = sorted(zip(loads, range(len(loads)), strict=True))
            seen[:] = loads
        else:
            for rank in self._moved:
                del order[bisect_left(order, (seen[rank], rank))]
                insort(order, (loads[rank], rank))
                seen[rank] = loads[rank]
        self._moved.clear()
        return order

    def may_hold(self, option: Option, ceiling: float) -> bool:
        """Return True if equal pieces on the idlest ranks would stay below `ceiling` seconds."""
        count, by_load = option.num_ranks, self._by_load()
        left = ceiling * count * 1.000001 - option.work_s
        if by_load[0][0] * count > left:
            return False
        if self._idlest is None and count > 1:
            self._idlest = list(accumulate(load for load, _ in by_load))
        return self._idlest is None or self._idlest[count - 1] <= left

    def _hosts(self, sites: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
        hosts = self._hosts_by_load.get(sites)
        if hosts is None:
            hosts = sorted(sites, key=lambda site: sum(self.loads[rank] for rank in site))
            self._hosts_by_load[sites] = hosts
        return hosts

    def banned(self, item: int) -> Set[int]:
        """Ranks that the rivals of an item hold."""
        rivals = self.items[item].rivals
        if not rivals:
            return NOBODY
        placed = [self.choices[other] for other in rivals if other in self.choices]
        return {rank for choice in placed for rank in choice.ranks}

    def find(self, item: int, option: Option, ceiling: float = INFINITE) -> Choice | None:
        """The least loaded ranks that have room for an option of an item that has no place.

        Returns:
            None where no ranks have room, or all would take more than `ceiling` seconds then.
        """
        if self._tight is None:
            self._tight = min(map(sub, self.limits, self.used))
        # What every rank needs as home then, the buffers of items without a place included.
        home = self.home_bytes + self.reserve - self.least_home[item] + option.home_bytes
        if self._tight < home:
            return None  # some rank has no room for buffers of its own batch
        banned = self.banned(item)
        count, sites = option.num_ranks, option.sites
        for site in sites if len(sites) == 1 else self._hosts(sites):
            ranks = site if count == len(site) else self._pick(option, site, home, banned)
            if ranks is None or (banned and not banned.isdisjoint(ranks)):
                continue
            if self._fits(option, ranks, home, ceiling):
                return Choice(option, ranks)
        return None

    def _pick(
        self, option: Option, site: tuple[int, ...], home: int, banned: Set[int]
    ) -> tuple[int, ...] | None:
        """The least loaded ranks of a site that have room for the largest piece."""
        loads, limits, used = self.loads, self.limits, self.used
        count, need = option.num_ranks, option.most_bytes - option.home_bytes + home
        order = self._by_load()
        if len(site) < len(loads):
            order = sorted((loads[rank], rank) for rank in site)
        # Any position may come to any of the ranks, so each must have room for the largest piece.
        ranks = []
        for _, rank in order:
            if limits[rank] - used[rank] >= need and rank not in banned:
                ranks.append(rank)
                if len(ranks) == count:
                    return tuple(sorted(ranks))
        return None

    def _fits(self, option: Option, ranks: tuple[int, ...], home: int, ceiling: float) -> bool:
        loads, limits, used = self.loads, self.limits, self.used
        if ceiling < INFINITE:
            for rank, load in zip(ranks, self.seconds_of(option, ranks), strict=True):
                if loads[rank] + load > ceiling:
                    return False
        if len(ranks) == len(option.sites[0]):  # `_pick` has not looked
            for rank, num_bytes in zip(ranks, option.num_bytes, strict=True):
                if limits[rank] - used[rank] < num_bytes + home:
                    return False
        return True

    def lifted(self, choice: Choice) -> float:
        """Seconds of the slowest rank of a choice once it is placed, its home included."""
        seconds = self.seconds_of(choice.option, choice.ranks)
        added = zip(choice.ranks, seconds, strict=True)
        top = max(self.loads[rank] + load for rank, load in added)
        return top if self.by_bytes else top + choice.option.home_s
