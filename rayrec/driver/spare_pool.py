"""`SparePool`: the spare ranks of a run, which wait beside its ranks; `spares` says which is taken.

Every spare asks the cluster for a place of its own, near the ranks. Its process is made once the
ranks train, so that it slows neither their start nor a recovery. When it takes the place of a lost
rank, the two swap places: the rank goes on where the spare was, and a new spare begins where the
rank was. A spare that dies, or that gives no answer, is replaced and nothing is said of it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from rayrec.driver.facts import alive_nodes, node_of
from rayrec.driver.head import head, lost_calls
from rayrec.driver.placement import NOTICE_AFTER_S, give_back
from rayrec.driver.rank_process import end_process
from rayrec.driver.ray_replies import LONGEST_TURN_S
from rayrec.driver.run_placement import RankPlace
from rayrec.driver.scaling import ScalingConfig
from rayrec.driver.spares import NEXT, Sign, Stage, Standby, home, pause_s, substitutes
from rayrec.driver.worker_group import WorkerGroup
from rayrec.train.seat import RankAddress

LOOK_S = 1.0
# a spare that waits answers so often; it hardly wakes for it
BEAT_S = 5.0
# how long a spare may take to say that it lives, before it takes a place
PROBE_S = 0.5
# places that are asked for at a time: each is a question at every look
MOST_ASKED = 8


@dataclass(kw_only=True, slots=True)
class _Spare:
    """One spare worker; `asked` is the reference of its pending call, or None."""

    place: RankPlace
    wanted_on: str
    stage: Stage = Stage.ASKED
    node: str = ""
    actor: Any = None
    address: RankAddress | None = None
    asked: Any = None
    silent_s: float = 0.0
    deaths: int = 0
    not_before: float = 0.0

    def see(self, sign: Sign) -> None:
        self.stage = NEXT[self.stage][sign]


class SparePool:
    """The spares of one run; see `spare_pool`.

    Args:
        heartbeat_s: seconds without an answer after which a spare is replaced.
        setup_timeout_s: bound on the start of a spare.
        say: receives one line where the cluster has no room for spares.
    """

    def __init__(
        self,
        scaling: ScalingConfig,
        heartbeat_s: float,
        setup_timeout_s: float,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._scaling, self._say = scaling, say
        self._heartbeat_s, self._setup_timeout_s = heartbeat_s, setup_timeout_s
        self._spares: list[_Spare] = []
        self._groups: list[Any] = []
        self._asked: Future[None] | None = None
        self._looked_at = 0.0
        self._short_s = 0.0
        self._told = False

    def look(self, workers: WorkerGroup, task: Any, now: float) -> None:
        """Keep the spares up, about once a second; it waits for nothing.

        Args:
            workers: the ranks, which train.
            task: reference of the ranks' task; spares import the modules that it names.
            now: seconds of a steady clock.
        """
        if not self._scaling.spares or now - self._looked_at < LOOK_S:
            return
        turn_s, self._looked_at = min(now - self._looked_at, LONGEST_TURN_S), now
        self._ask(workers)
        waiting = [s.place for s in self._spares if s.stage in (Stage.ASKED, Stage.VACANT)]
        nodes: dict[RankPlace, str] = {}
        if waiting:
            nodes = head.recent((self, "places"), partial(_nodes_of, waiting), nodes)
        for spare in self._spares:
            if spare.stage in (Stage.ASKED, Stage.VACANT):
                self._place(spare, nodes.get(spare.place, ""), workers, now)
            else:
                self._hear(spare, task, turn_s, now)
        self._tell_shortage(turn_s)

    def relieve(self, workers: WorkerGroup) -> frozenset[int]:
        """Replace lost ranks by spares, and return the ranks that got the process of a spare.

        A rank whose node is gone may also get the room of a spare that has no process.
        """
        nodes = workers.nodes
        lost = {rank: nodes[rank] for rank in workers.vacant}
        if not lost or not self._spares:
            return frozenset()
        there = self._usable()
        chosen = substitutes(
            lost,
            [Standby(spare.stage, spare.node) for spare in there],
            # no waiting for a head that does not answer: a spare needs nothing of it
            head.recent("nodes that live", alive_nodes, frozenset(workers.nodes)),
            {node for rank, node in enumerate(nodes) if rank not in lost},
            roam=not self._scaling.placement_strategy.startswith("STRICT"),
        )
        relieved = set()
        for rank, number in chosen.items():
            spare = there[number]
            if spare.actor is not None:
                relieved.add(rank)
            warm = spare.stage is Stage.WARM
            address = spare.address if warm else None
            spare.place = workers.relieve(rank, spare.place, spare.node, spare.actor, address)
            spare.actor = spare.address = spare.asked = None
            spare.node, spare.not_before = lost[rank], 0.0
            spare.see("taken")
        return frozenset(relieved)

    def close(self) -> None:
        """End all spares, and give back every place that spares ever had."""
        import ray

        for spare in self._spares:
            if spare.actor is not None:
                ray.kill(spare.actor, no_restart=True)
        give_back(self._groups)

    def _ask(self, workers: WorkerGroup) -> None:
        """Ask the cluster for places, some at a time, which `look` finds later."""
        if self._asked is not None:
            if not self._asked.done():
                return
            # the next look asks again where a call was lost
            with suppress(*lost_calls()):
                self._asked.result()
            self._asked = None
        waiting = sum(spare.stage is Stage.ASKED for spare in self._spares)
        more = min(self._scaling.spares - len(self._spares), MOST_ASKED - waiting)
        wanted_on = [spare.wanted_on for spare in self._spares]
        for _ in range(more):
            wanted_on.append(home(workers.nodes, wanted_on))
        if more > 0:
            self._asked = head.aside(partial(self._ask_near, wanted_on[-more:]))

    def _ask_near(self, nodes: Sequence[str]) -> None:
        """Ask the cluster for the places of new spares near some nodes."""
        from ray.util.placement_group import placement_group

        for node in nodes:
            # Ray takes the wish for a node with this strategy alone; for one bundle all are alike
            group = placement_group(
                [dict(self._scaling.bundle)], strategy="STRICT_PACK", _soft_target_node_id=node
            )
            self._groups.append(group)
            # at once: the next call may be lost, and this place be held for nobody
            self._spares.append(_Spare(place=RankPlace(group, 0), wanted_on=node))

    def _place(self, spare: _Spare, node: str, workers: WorkerGroup, now: float) -> None:
        """Follow the place of a spare without a process, and make its process."""
        spare.node = node
        if spare.stage is Stage.ASKED and spare.node:
            spare.see("placed")
        elif spare.stage is Stage.VACANT and not spare.node:
            spare.see("unplaced")
        if spare.stage is Stage.VACANT and now >= spare.not_before:
            spare.actor = workers.start_process(spare.place)
            spare.asked = spare.actor.describe.remote()
            spare.silent_s = 0.0
            spare.see("started")

    def _hear(self, spare: _Spare, task: Any, turn_s: float, now: float) -> None:
        """Take the answer of a spare with a process, and ask it again."""
        import ray

        if not ray.wait([spare.asked], timeout=0)[0]:
            spare.silent_s += turn_s
            starts = spare.stage is Stage.STARTING
            limit_s = self._setup_timeout_s if starts else BEAT_S + self._heartbeat_s
            if spare.silent_s >= limit_s:
                self._lost(spare, now)
            return
        try:
            told = ray.get(spare.asked)
        except ray.exceptions.RayError:
            self._lost(spare, now)
            return
        spare.silent_s = 0.0
        if spare.address is None:
            spare.address = told
            spare.asked = spare.actor.stand_by.remote([task])
            return
        if spare.stage is Stage.STARTING:
            spare.deaths = 0
            spare.see("told")
        spare.asked = spare.actor.poll.remote(sys.maxsize, BEAT_S)

    def _usable(self) -> list[_Spare]:
        """Return the spares that are alive; an idle one must answer a probe."""
        import ray

        for spare in self._spares:
            dead = spare.actor is not None and ray.wait([spare.asked], timeout=0)[0]
            if dead and _raises(spare.asked):
                self._lost(spare, time.monotonic())
        probes = {}
        for spare in self._spares:
            if spare.stage is Stage.WARM:
                probes[spare.actor.poll.remote(sys.maxsize, 0.0)] = spare
        silent = []
        if probes:
            asked = list(probes)
            ready, _ = ray.wait(asked, num_returns=len(asked), timeout=PROBE_S)
            silent = [probes[ref] for ref in asked if ref not in ready or _raises(ref)]
        return [s for s in self._spares if not any(s is other for other in silent)]

    def _lost(self, spare: _Spare, now: float) -> None:
        end_process(spare.actor, spare.address)
        spare.actor = spare.address = spare.asked = None
        spare.deaths += 1
        spare.not_before = now + pause_s(spare.deaths)
        spare.see("died")

    def _tell_shortage(self, turn_s: float) -> None:
        """Tell the user once that spares have no room, which the run does not wait for."""
        import ray

        wanted = self._scaling.spares
        short = wanted - sum(spare.stage is not Stage.ASKED for spare in self._spares)
        self._short_s = self._short_s + turn_s if short else 0.0
        if self._told or self._short_s < NOTICE_AFTER_S:
            return
        left = head.recent((self, "free"), ray.available_resources)
        if left is None:
            return
        self._told = True
        bundle = self._scaling.bundle
        each = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
        free = ", ".join(f"{left.get(name, 0.0):g} {name}" for name in bundle)
        self._say(
            f"no room for {short} of {wanted} spares (--spares) of {each} each (free now: {free}); "
            "the run goes on without, and takes the room when it comes"
        )


def _nodes_of(places: Sequence[RankPlace]) -> dict[RankPlace, str]:
    """Return the node of each place, without places on dead nodes."""
    alive = alive_nodes()
    nodes = {place: node_of(*place) for place in places}
    return {place: node for place, node in nodes.items() if node in alive}


def _raises(reference: Any) -> bool:
    """Return True if a finished call raised an error."""
    import ray

    try:
        ray.get(reference)
    except ray.exceptions.RayError:
        return True
    return False


@contextmanager
def spare_pool(
    scaling: ScalingConfig,
    heartbeat_s: float,
    setup_timeout_s: float,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[SparePool]:
    """Yield the spares of a run, at first without spares; they end with the block."""
    pool = SparePool(scaling, heartbeat_s, setup_timeout_s, say)
    try:
        yield pool
    finally:
        pool.close()
