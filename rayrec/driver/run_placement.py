"""`RunPlacement`: the places on the cluster that a run's ranks hold, and those that it asks for.

The smallest number of ranks shares one placement group: they get their places together or not at
all, so that two runs never wait for each other with half of their ranks. Every further rank has a
group of its own. A group without a place stays asked for, so that an autoscaler sees it, and Ray
finds places by itself for what a lost node held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from rayrec.driver.cluster import Cluster
from rayrec.driver.facts import alive_nodes, bundles_on, draining, resources
from rayrec.driver.head import head
from rayrec.driver.placement import (
    NOTICE_AFTER_S,
    WAIT_TURN_S,
    crowding,
    give_back,
    longest_wait,
    placed,
    refusal,
    refuse_too_much,
    shortage,
    total,
    wait_for_room,
)
from rayrec.driver.scaling import SHRINK_AFTER_S, ScalingConfig

# how long a run waits at its start for one more place than it has
SETTLE_S = 2.0
LOOK_S = 1.0
# places that are asked for beyond those that ranks hold: each is a question at every look
MOST_ASKED = 128


class RankPlace(NamedTuple):
    """RankPlace for one rank: a bundle of a placement group."""

    group: Any
    bundle: int


class PlaceLost(Exception):
    """A place was lost while its rank was being started."""


class RunPlacement:
    """Places of one run, as `run_placement` holds them.

    Args:
        base: the placement group of the smallest number of ranks.
        notice: told once when a run waits for room.
        check: called several times a second while it waits; its error ends the wait.
    Attributes:
        say: is `notice`.
    """

    def __init__(
        self,
        scaling: ScalingConfig,
        cluster: Cluster,
        base: Any,
        notice: Callable[[str], None] = lambda line: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._scaling, self._cluster, self._base = scaling, cluster, base
        self.say, self._check = notice, check
        self._single: list[Any] = []
        self._there: tuple[RankPlace, ...] = ()
        self._told = False
        self._looked_at = 0.0
        # for how many ranks there is no room, since when; no time once that was told
        self._short: tuple[int, float | None] = (0, None)

    def places(self) -> tuple[RankPlace, ...]:
        """Return the places that exist now, also those that ranks hold; asks the head and waits.

        Nodes that will go have none, where the number of ranks may change.
        """
        return head.answer(self._find, self._check)

    def seen(self) -> tuple[RankPlace, ...]:
        """Return the places by the head's last answer, without waiting."""
        head.recent(self, self._find)
        return self._there

    def _find(self) -> tuple[RankPlace, ...]:
        least = self._scaling.least
        if not self._scaling.is_elastic:
            return tuple(RankPlace(self._base, bundle) for bundle in range(least))
        # a place on a draining node does not count
        alive = alive_nodes() - draining().keys()
        there = []
        for group in (self._base, *self._single):
            there += [RankPlace(group, bundle) for bundle in bundles_on(group, alive)]
        self._there = tuple(there)
        return self._there

    def ask(self, ranks: int, taken: Collection[RankPlace] = ()) -> None:
        """Ask the cluster for `ranks` places in all, and give surplus places back.

        It waits for nothing; what is asked for next knows of it.

        Args:
            ranks: number of places, between the smallest and the largest number of ranks.
            taken: places that ranks hold, which are given back last. So many more are asked for
                at a time as `MOST_ASKED` says.
        """
        head.aside(partial(self._ask, ranks, tuple(taken)))

    def _ask(self, ranks: int, taken: Collection[RankPlace]) -> None:
        from ray.util.placement_group import placement_group, remove_placement_group

        self._give_back(taken)
        self._single.sort(key=lambda group: RankPlace(group, 0) not in taken)
        held = sum(RankPlace(group, 0) in taken for group in self._single)
        # if the base has lost a place, more ranks than these hold a single one
        wanted = min(max(ranks - self._scaling.least, held), held + MOST_ASKED)
        for group in self._single[wanted:]:
            remove_placement_group(group)
        del self._single[wanted:]
        while len(self._single) < wanted:
            bundle = dict(self._scaling.bundle)
            self._single.append(placement_group([bundle], strategy="PACK"))

    def _give_back(self, taken: Collection[RankPlace]) -> None:
        """Give back places that no rank holds on nodes that will go; others are asked for."""
        from ray.util.placement_group import remove_placement_group

        nodes = draining()
        if not nodes:
            return
        for group in [group for group in self._single if RankPlace(group, 0) not in taken]:
            if bundles_on(group, nodes):
                remove_placement_group(group)
                self._single.remove(group)

    def settle(self) -> None:
        """Wait until all places that were asked for are there, or no more seem to come."""
        seen, since = 0, time.monotonic()
        while seen < self._scaling.most and time.monotonic() - since < SETTLE_S:
            self._check()
            there = len(self.places())
            if there > seen:
                seen, since = there, time.monotonic()
            time.sleep(WAIT_TURN_S)

    def wait_for(self, places: Sequence[RankPlace]) -> None:
        """Wait until lost ranks of a fixed number have their places again; see `wait_for_room`."""
        for group in dict.fromkeys(place.group for place in places):
            wanted = {place.bundle for place in places if place.group == group}
            there = head.answer(lambda: bundles_on(group, alive_nodes()), self._check)  # noqa: B023
            # a group may lack places that no rank needs now
            if not wanted <= set(there):
                wait_for_room(self._scaling, self._cluster, group, self.say, self._check)

    def shrink_after_s(self, ranks: int) -> float:
        """Return the seconds that a run of `ranks` waits for a lost place before it shrinks."""
        given = self._scaling.shrink_after_s
        if given is not None:
            return given
        # no waiting for a node that nobody will add
        never = self._cluster.fixed and shortage(self._scaling, total(self._check), ranks)
        return 0.0 if never else SHRINK_AFTER_S

    def wait_on(self, room: int, ranks: int, waited_s: float) -> None:
        """Spend one turn of waiting for more places than there are.

        Args:
            room: number of places that exist. ranks: number of ranks that the run had.
            waited_s: seconds that it has waited.
        Raises:
            ConfigError: the places do not suffice even for the smallest number of ranks, and more
                cannot come or did not come in time.
        """
        least, limit_s = self._scaling.least, longest_wait(self._scaling)
        self._check()
        if room < least:
            refuse_too_much(self._scaling, self._cluster, self._check)
            if waited_s >= limit_s:
                raise refusal(self._scaling, self._base, waited_s, self._check)
        if waited_s < NOTICE_AFTER_S:
            self._told = False
        elif not self._told:
            self._told = True
            until = f"at least {least} are needed, up to {limit_s:.0f} s"
            if room >= least:
                until = f"goes on with {room} after {self.shrink_after_s(ranks):.0f} s"
            self.say(f"waiting for room: {room} of {ranks} ranks have a place ({until})")
        time.sleep(WAIT_TURN_S)

    def tell_short(self, wanted: int, room: int, now: float) -> None:
        """Tell the user once, after some seconds, why requested ranks have no place.

        Args:
            room: number of places that exist. now: seconds of a steady clock.
        """
        if room >= wanted or self._short[0] != wanted:
            self._short = (wanted, now)
        since = self._short[1]
        if since is None or now - since < NOTICE_AFTER_S:
            return
        told = head.recent((self, "resources"), resources)
        if told is not None:
            self._short = (wanted, None)
            why = shortage(self._scaling, told.total, wanted)
            why = why or crowding(self._scaling, told.free, wanted - room) or "Ray gives no more."
            self.say(
                f"{wanted} ranks are asked for, and {room} have room: {why} The run goes on "
                "meanwhile, and grows when there is room."
            )

    def check_places(self, taken: Collection[RankPlace]) -> None:
        """Check about once a second that the places of ranks that start still exist.

        Raises:
            PlaceLost: a place does not exist any more.
        """
        now = time.monotonic()
        if not self._scaling.is_elastic or now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        if not set(taken) <= set(self.seen()):
            raise PlaceLost

    def close(self) -> None:
        """Give back all places but those of the base."""
        give_back(self._single)


def choose(there: Sequence[RankPlace], taken: Sequence[RankPlace], ranks: int) -> list[RankPlace]:
    """Choose places for `ranks` ranks: first those that ranks hold, in the order of the ranks.

    Args:
        there: all places; those that can only be given back together come first.
        taken: places of all ranks in order, also of lost ones.
    """
    held = [place for place in taken if place in there]
    order = sorted(held, key=there.index)[:ranks]
    kept = [place for place in held if place in order]
    return kept + [place for place in there if place not in held][: ranks - len(kept)]


@contextmanager
def run_placement(
    scaling: ScalingConfig,
    cluster: Cluster,
    notice: Callable[[str], None] = lambda line: None,
    check: Callable[[], None] = lambda: None,
) -> Iterator[RunPlacement]:
    """Hold places for the ranks of a run inside the block; they are given back at its end.

    Args:
        notice: told once when the cluster has no room yet.
        check: called several times a second while waiting; its error ends the wait.
    Raises:
        ConfigError: the smallest number of ranks does not fit, or not within the time that
            `scaling` allows.
    """
    with placed(scaling, cluster, notice, check) as base:
        placement = RunPlacement(scaling, cluster, base, notice, check)
        try:
            if scaling.is_elastic:
                placement.ask(scaling.most)
                placement.settle()
            yield placement
        finally:
            placement.close()
