"""`Assignment`: assigns the ranks of a run to places, whose number may change between attempts.

It takes the places of `RunPlacement` and the number that `sizing` decides, and seats the
`WorkerGroup` by them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rayrec.driver.blame import Observation
from rayrec.driver.recovery import Recovery
from rayrec.driver.run_placement import PlaceLost, RankPlace, RunPlacement, choose
from rayrec.driver.scaling import ScalingConfig
from rayrec.driver.sizing import Sizing, seats
from rayrec.driver.spare_pool import SparePool
from rayrec.driver.stall import StallWatch
from rayrec.driver.worker_group import WorkerGroup
from rayrec.train.events import Event

# how long new ranks may take to come before the others pause without them
COMING_S = 60.0


class Assignment:
    """Assignment of the ranks of one run to places.

    Args:
        placement: places of the cluster.
        workers: actors of the ranks.
        spares: spares of the ranks.
        sizing: decides the number of ranks.
        recovery: records which lost ranks were replaced, and which the run goes on without.
        watch: watches for stalls; knows when waiting is expected.
    """

    def __init__(
        self,
        scaling: ScalingConfig,
        placement: RunPlacement,
        workers: WorkerGroup,
        spares: SparePool,
        sizing: Sizing,
        recovery: Recovery,
        watch: StallWatch,
    ) -> None:
        self._scaling, self._placement, self._workers = scaling, placement, workers
        self._sizing = sizing
        self._spares, self._recovery, self._watch = spares, recovery, watch
        self._short_since: float | None = None
        # with how many ranks the run goes on once new ones have come, and until when it waits
        self._growing: tuple[int, float] | None = None
        # places of the ranks when they paused, and True if they go back there
        self._former: tuple[RankPlace, ...] = ()
        self._goes_back = False

    def say_how_many(self, say: Callable[[Event], None]) -> None:
        """Report the number of ranks at the start of a run that may have more."""
        ranks, most = len(self._workers.places), self._scaling.most
        if ranks < most:
            say(f"starts with {ranks} of at most {most} ranks; the cluster is asked for the rest")

    def fill(self, setup_timeout_s: float, *, part: bool = True) -> bool:
        """Give every rank a place and a process; return False if places are missing yet.

        Args:
            part: end the ranks that leave the run; else `part` does so.
        Raises:
            ConfigError: the smallest number of ranks has no room, and does not get it in time.
            TrainingFailed: a process did not come up.
        """
        workers, placement, self._growing = self._workers, self._placement, None
        relieved: frozenset[int] = frozenset()
        if self._scaling.is_elastic:
            if not self._seat(part):
                return False
        elif self._recovery.under_way:
            relieved = self._spares.relieve(workers)
            self._recovery.relieved(relieved)
            self._watch.at("waiting for room for the lost ranks", patient=True)
            placement.wait_for([workers.places[rank] for rank in workers.vacant])
        self._watch.at("starting the ranks' actors")
        try:
            new = workers.fill(setup_timeout_s, lambda: placement.check_places(workers.places))
        except PlaceLost:
            for rank in workers.vacant:
                workers.dismiss(rank)
            return False
        if self._recovery.under_way and not self._scaling.is_elastic:
            self._recovery.replaced(set(new) - relieved)
        return True

    def stand_by(self, task: Any, now: float) -> None:
        """Keep the spares of ranks that train; `task` is a reference to what they do."""
        self._spares.look(self._workers, task, now)

    def paused(self) -> None:
        """Record that all ranks have paused for a change; it may be called off until they train."""
        self._former, self._goes_back = self._workers.places, False

    def call_off(self) -> int:
        """Have the next `fill` undo a change, and return the number of ranks that the run keeps.

        It is 0 where there is no change to take back.
        """
        keeps = self._sizing.call_off() if self._former and not self._goes_back else 0
        self._goes_back = bool(keeps)
        return keeps

    def give_up(self) -> None:
        """Cancel a change that is under way, since ranks were lost."""
        self._former, self._goes_back = (), False

    def part(self) -> None:
        """End the ranks that leave the run, and give their places back."""
        if self._workers.leaving:
            self._workers.part()
            self._placement.ask(self._sizing.wanted, self._workers.places)

    def _seat(self, part: bool) -> bool:
        """Give every rank a place, and end ranks that get none; return False while places lack."""
        placement, workers = self._placement, self._workers
        there, ranks, now = placement.places(), len(workers.places), time.monotonic()
        self._short_since = self._short_since or now
        waited_s, wanted = now - self._short_since, self._sizing.wanted
        if self._goes_back:
            # whatever was asked for since is for later
            wanted = len(self._former)
        # a run that leaves a node in time does not stand still for another one
        at_once = len(there) >= ranks or self._sizing.leaving
        shrink_after_s = 0.0 if at_once else placement.shrink_after_s(ranks)
        seated = seats(ranks, wanted, self._scaling.least, len(there), waited_s, shrink_after_s)
        if seated is None:
            self._watch.at("waiting for room for the ranks", patient=True)
            placement.wait_on(len(there), ranks, waited_s)
            return False
        self._short_since = None
        chosen = choose(there, self._former if self._goes_back else workers.places, seated)
        lost = set(workers.vacant)
        gone = sorted(lost & set(workers.seat(chosen, part=part)))
        # a rank whose place is another one now has not left the run
        dropped = set(gone[: max(0, ranks - seated)])
        if self._recovery.under_way:
            self._recovery.dropped(dropped)
            self._recovery.replaced(lost - dropped)
        # the places of those that leave are needed until they are ended
        placement.ask(wanted, [*chosen, *(place for *_, place in workers.leaving)])
        return True

    def wants_pause(self, ranks: Sequence[Observation], task: Any, now: float) -> int:
        """Return the number of ranks to go on with after a pause; 0 where no pause is needed.

        New ranks come before the pause, and import what `task` needs beside the others.
        """
        sizing, size = self._sizing, len(ranks)
        if not self._scaling.is_elastic or sizing.paused_since is not None:
            return 0
        # An evaluation would be made again, and what is at its end needs no change.
        polls = [rank.poll for rank in ranks]
        if any(p is None or (p.state, p.phase) != ("running", "training") for p in polls):
            return 0
        there: tuple[RankPlace, ...] | None = None
        if sizing.looks(size, now):
            self._placement.ask(sizing.wanted, self._workers.places)
            there = self._placement.seen()
            if sizing.asked:
                self._placement.tell_short(sizing.wanted, len(there), now)
        goal = sizing.goal(size, None if there is None else len(there), now)
        if goal < size:
            self._forget_growth()
            return goal
        if self._growing is None and there is not None and goal > size:
            chosen = choose(there, self._workers.places, goal)
            self._workers.call(
                [place for place in chosen if place not in self._workers.places], task
            )
            self._growing = goal, now + COMING_S
            self._placement.say(
                f"room for {goal} ranks: new ones start, and the {size} go on with them from the "
                "end of a window"
            )
        if self._growing is None:
            return 0
        goal, latest = self._growing
        if sizing.wanted < goal:
            self._forget_growth()
        elif self._workers.have_come() or now > latest:
            self._growing = None
            return goal
        return 0

    def _forget_growth(self) -> None:
        self._growing = None
        self._workers.send_away()
