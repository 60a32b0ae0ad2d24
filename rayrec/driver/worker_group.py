"""`WorkerGroup`: the actors of a world by rank, each at a place on the cluster.

Every rank without an actor is given one, at the start, after a failure, and where the number of
ranks grows; the others keep theirs.
The actors are sorted so that the ranks of one host are neighbours, the driver's host first. They
import torch while the caller goes on, and are killed when the block of `started` ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

from rayrec.driver.head import head
from rayrec.driver.rank_group import RankGroup
from rayrec.driver.rank_process import end_process, start_process
from rayrec.driver.ray_replies import get_replies
from rayrec.driver.run_placement import RankPlace
from rayrec.driver.scaling import ScalingConfig
from rayrec.train.seat import RankAddress

# how long ranks may take to answer, when they are about to be ended
_FREE_S = 1.0


class WorkerGroup:
    """Actors of a world's ranks.

    Args:
        places: one for each rank.
        check: called several times a second while actors start; its error ends the wait.
    Attributes:
        keeps_memory: hosts keep the memory of ranks until the run ends.
        generation: number of worlds that the actors have formed.
        leaving: actors that have lost their rank; `part` ends them.
    """

    keeps_memory = False
    generation = 0

    def __init__(
        self,
        scaling: ScalingConfig,
        places: Sequence[RankPlace],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._scaling, self._places, self._check = scaling, list(places), check
        self._actors: list[Any] = [None] * len(places)
        self._addresses: list[RankAddress | None] = [None] * len(places)
        self.leaving: list[tuple[Any, RankAddress, RankPlace]] = []
        # actors that are on their way to places where no rank is yet
        self._coming: dict[RankPlace, tuple[Any, Any]] = {}
        # last known node of each place
        self._nodes: dict[RankPlace, str] = {}

    @property
    def actors(self) -> list[Any]:
        """Ray handles by rank; None where there is none."""
        return self._actors

    @property
    def addresses(self) -> tuple[RankAddress, ...]:
        """Addresses of the started ranks; complete once `fill` is done."""
        return tuple(address for address in self._addresses if address is not None)

    @property
    def places(self) -> tuple[RankPlace, ...]:
        """RankPlace of each rank on the cluster, also of ranks that `fill` has yet to start."""
        return tuple(self._places)

    @property
    def vacant(self) -> tuple[int, ...]:
        """Ranks without an actor that is known to live."""
        return tuple(rank for rank, address in enumerate(self._addresses) if address is None)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node of each rank, for a lost rank the last one; "" if unknown."""
        return tuple(self._nodes.get(place, "") for place in self._places)

    def relieve(
        self, rank: int, place: RankPlace, node: str, actor: Any, address: RankAddress | None
    ) -> RankPlace:
        """Move a lost rank to another place, and to the actor there.

        Args:
            node: node of the new place.
            actor: actor at the place, or None if `fill` shall start one.
            address: address of the actor, or None if the actor has yet to describe itself.
        Returns:
            the old place of the rank.
        """
        before, self._places[rank] = self._places[rank], place
        self._actors[rank], self._addresses[rank] = actor, address
        self._nodes[place] = node
        return before

    def seat(self, places: Sequence[RankPlace], *, part: bool = True) -> tuple[int, ...]:
        """Assign one rank to each of `places`; ranks at other places lose their rank.

        Ranks whose place stays keep their actor and their order. Those that are leaving come back
        where their place is among them.

        Args:
            part: end the actors of lost places now; else they become `leaving`.
        Returns:
            the old indices of the removed ranks.
        """
        gone = [rank for rank, place in enumerate(self._places) if place not in places]
        for rank in gone:
            address = self._addresses[rank]
            if not part and address is not None:
                self.leaving.append((self._actors[rank], address, self._places[rank]))
            else:
                self.dismiss(rank)
        stay = [rank for rank in range(len(self._places)) if rank not in gone]
        new = [place for place in places if place not in self._places]
        back = {place: (actor, at) for actor, at, place in self.leaving if place in new}
        self.leaving = [one for one in self.leaving if one[2] not in back]
        came = [back.get(place, (None, None)) for place in new]
        self._actors[:] = [self._actors[rank] for rank in stay] + [actor for actor, _ in came]
        self._addresses = [self._addresses[rank] for rank in stay] + [at for _, at in came]
        self._places = [self._places[rank] for rank in stay] + new
        return tuple(gone)

    def call(self, places: Sequence[RankPlace], task: Any) -> None:
        """Start actors at places that the next `fill` assigns to ranks.

        Args:
            task: Ray reference of the ranks' task, whose imports warm the actors up.
        """
        for place in places:
            actor = self.start_process(place)
            self._coming[place] = actor, actor.stand_by.remote([task])

    def have_come(self) -> bool:
        """Return True if all actors that `call` started are ready or dead."""
        import ray

        asked = [ready for _, ready in self._coming.values()]
        return not asked or len(ray.wait(asked, num_returns=len(asked), timeout=0)[0]) == len(asked)

    def send_away(self) -> None:
        """End the actors that `call` started and no rank took."""
        for actor, _ in self._coming.values():
            end_process(actor, None)
        self._coming.clear()

    def fill(self, timeout_s: float, look: Callable[[], None] = lambda: None) -> tuple[int, ...]:
        """Give an actor to every rank that has none, and return the ranks that got one.

        Args:
            look: called as often as `check`, while actors start.
        Raises:
            TrainingFailed: an actor did not come up within `timeout_s` seconds.
        """
        for rank, actor in enumerate(self._actors):
            if actor is None:
                place = self._places[rank]
                came, _ = self._coming.pop(place, (None, None))
                # the head is given the actor's class first
                actor = came or head.answer(partial(self.start_process, place), self._check)
                self._actors[rank] = actor
        self.send_away()
        new = self.vacant
        asked = {rank: self._actors[rank].describe.remote() for rank in new}

        def check() -> None:
            self._check()
            look()

        told = get_replies(asked, (), len(self._actors), "start", timeout_s, check)
        for rank, address in zip(new, told, strict=True):
            self._addresses[rank] = address
            self._nodes[self._places[rank]] = address.node_id
        if len(new) == len(self._actors) or not _are_neighbours(self.addresses):
            self._sort()
        return tuple(new)

    def dismiss(self, rank: int) -> None:
        """End the actor of a rank, whatever it does, so that `fill` gives the rank another."""
        if self._actors[rank] is not None:
            end_process(self._actors[rank], self._addresses[rank])
            self._actors[rank] = self._addresses[rank] = None

    def part(self) -> None:
        """End the actors that have lost their rank."""
        for actor, address, _ in self.leaving:
            end_process(actor, address)
        self.leaving.clear()

    def end(self) -> None:
        """End all actors, and free the memory that their hosts keep for them."""
        import ray

        living = [actor for actor in self._actors if actor is not None and self.keeps_memory]
        # A host that none of them answers for frees it by itself after a minute.
        asked = [actor.free_memory.remote() for actor in living]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=_FREE_S)
        self.send_away()
        for actor in [*self._actors, *(actor for actor, *_ in self.leaving)]:
            if actor is not None:
                ray.kill(actor, no_restart=True)

    def start_process(self, place: RankPlace) -> Any:
        """Start an actor at a place, which imports torch at once, and return its handle."""
        return start_process(self._scaling, place)

    def _sort(self) -> None:
        import ray

        order = neighbours(self.addresses, ray.get_runtime_context().get_node_id())
        self._actors[:] = [self._actors[i] for i in order]
        self._addresses = [self._addresses[i] for i in order]
        self._places = [self._places[i] for i in order]


@contextmanager
def started(
    scaling: ScalingConfig,
    placement: Any,
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> Iterator[RankGroup]:
    """Run actors on the bundles of `placement` inside the block; they are killed at its end.

    They import torch while the caller goes on.

    Args:
        check: called several times a second while the group waits; its error ends the wait.
    Raises:
        TrainingFailed: an actor did not come up within `timeout_s` seconds.
    """
    places = [RankPlace(placement, bundle) for bundle in range(scaling.least)]
    with worker_group(scaling, places, check) as workers:
        workers.fill(timeout_s)
        yield RankGroup(workers, scaling, check)


@contextmanager
def worker_group(
    scaling: ScalingConfig, places: Sequence[RankPlace], check: Callable[[], None] = lambda: None
) -> Iterator[WorkerGroup]:
    """Yield a group without actors; the actors that it gets are killed at the end of the block."""
    workers = WorkerGroup(scaling, places, check)
    try:
        yield workers
    finally:
        workers.end()


def neighbours(addresses: Sequence[RankAddress], here: str) -> list[int]:
    """Order of the actors by node: those of the node `here` first, then by address and node."""

    def key(i: int) -> tuple[bool, str, str, int]:
        address = addresses[i]
        return address.node_id != here, address.host, address.node_id, i

    return sorted(range(len(addresses)), key=key)


def _are_neighbours(addresses: Sequence[RankAddress]) -> bool:
    """Return True if the ranks of each node are consecutive."""
    nodes = [address.node_id for address in addresses]
    changes = sum(one != other for one, other in pairwise(nodes))
    return changes + 1 == len(set(nodes))
