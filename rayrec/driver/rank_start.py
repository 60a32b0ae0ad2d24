"""`Crew`: the actors of a world by rank, each on a bundle of a placement group.

Every rank without an actor is given one, at the start and after a failure; the others keep theirs.
The actors are sorted so that the ranks of one host are neighbours, the driver's host first. They
import torch while the caller goes on, and are killed when the block of `started` ends.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

from rayrec.driver.answers import Awakening, answers
from rayrec.driver.config import ScalingConfig
from rayrec.driver.rank_group import RankGroup
from rayrec.train.seat import RankAddress


class Crew:
    """The actors of a world.

    Args:
        placement: the placement group, with a bundle for each rank.
        check: called several times a second while actors start; what it raises ends the wait.
    """

    def __init__(
        self, scaling: ScalingConfig, placement: Any, check: Callable[[], None] = lambda: None
    ) -> None:
        self._scaling, self._placement, self._check = scaling, placement, check
        self._actors: list[Any] = [None] * scaling.num_workers
        self._addresses: list[RankAddress | None] = [None] * scaling.num_workers
        self._bundles = list(range(scaling.num_workers))

    @property
    def actors(self) -> list[Any]:
        """Ray handles by rank; None where there is none."""
        return self._actors

    @property
    def addresses(self) -> tuple[RankAddress, ...]:
        """Where the ranks live; of all ranks, once `fill` is done."""
        return tuple(address for address in self._addresses if address is not None)

    def fill(self, timeout_s: float, heartbeat_s: float = math.inf) -> tuple[int, ...]:
        """Give an actor to every rank that has none; the ranks that got one.

        Args:
            heartbeat_s: one whose process runs and says nothing for so long has failed.
        Raises:
            TrainingFailed: an actor did not come up within `timeout_s` seconds, or fell silent.
        """
        for rank, actor in enumerate(self._actors):
            if actor is None:
                self._actors[rank] = self._hire(self._bundles[rank])
        new = [rank for rank, address in enumerate(self._addresses) if address is None]
        asked = {rank: self._actors[rank].describe.remote() for rank in new}
        pairs = {rank: (self._actors[rank], reference) for rank, reference in asked.items()}
        awakening = Awakening(pairs, len(self._actors), heartbeat_s)

        def check() -> None:
            self._check()
            awakening.check()

        told = answers(asked, (), len(self._actors), "start", timeout_s, check)
        for rank, address in zip(new, told, strict=True):
            self._addresses[rank] = address
        if len(new) == len(self._actors) or not _are_neighbours(self.addresses):
            self._sort()
        return tuple(new)

    def dismiss(self, rank: int) -> None:
        """End the actor of a rank, whatever it does, so that `fill` gives the rank another."""
        import ray

        address, actor = self._addresses[rank], self._actors[rank]
        if actor is None:
            return
        here = ray.get_runtime_context().get_node_id()
        # Ray asks a worker to end before it kills it, and waits five seconds for a stopped one.
        # While Ray still counts the actor, the number of its process is of no other process.
        if address is not None and address.node_id == here and _is_ray_worker(address.pid):
            with suppress(OSError):
                os.kill(address.pid, signal.SIGKILL)
        ray.kill(actor, no_restart=True)
        self._actors[rank] = self._addresses[rank] = None

    def end(self) -> None:
        """End all actors."""
        import ray

        for actor in self._actors:
            if actor is not None:
                ray.kill(actor, no_restart=True)

    def _hire(self, bundle_index: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from actors.rank import RankActor

        threads = str(max(1, math.floor(self._scaling.cpus_per_worker)))
        bundle = self._scaling.bundle
        extra = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
        options = ray.remote(RankActor).options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            resources=extra or None,
            max_restarts=0,
            max_task_retries=0,
            # a poll must pass while another call waits
            max_concurrency=4,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._placement, placement_group_bundle_index=bundle_index
            ),
        )
        # torch's profiler writes to stderr else
        return options.remote({"OMP_NUM_THREADS": threads, "KINETO_LOG_LEVEL": "99"})

    def _sort(self) -> None:
        import ray

        order = neighbours(self.addresses, ray.get_runtime_context().get_node_id())
        self._actors[:] = [self._actors[i] for i in order]
        self._addresses = [self._addresses[i] for i in order]
        self._bundles = [self._bundles[i] for i in order]


@contextmanager
def started(
    scaling: ScalingConfig,
    placement: Any,
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> Iterator[RankGroup]:
    """Actors on the bundles of `placement` inside the block; they are killed at its end.

    They import torch while the caller goes on.

    Args:
        check: called several times a second while the group waits; what it raises ends the wait.
    Raises:
        TrainingFailed: an actor did not come up within `timeout_s` seconds.
    """
    with crew_of(scaling, placement, check) as crew:
        crew.fill(timeout_s)
        yield RankGroup(crew, scaling, check)


@contextmanager
def crew_of(
    scaling: ScalingConfig, placement: Any, check: Callable[[], None] = lambda: None
) -> Iterator[Crew]:
    """A crew without actors, whose actors are killed at the end of the block."""
    crew = Crew(scaling, placement, check)
    try:
        yield crew
    finally:
        crew.end()


def neighbours(addresses: Sequence[RankAddress], here: str) -> list[int]:
    """Order of the actors by node: those of the node `here` first, then by address and node."""

    def key(i: int) -> tuple[bool, str, str, int]:
        address = addresses[i]
        return address.node_id != here, address.host, address.node_id, i

    return sorted(range(len(addresses)), key=key)


def _are_neighbours(addresses: Sequence[RankAddress]) -> bool:
    """Whether the ranks of each node follow each other."""
    nodes = [address.node_id for address in addresses]
    changes = sum(one != other for one, other in pairwise(nodes))
    return changes + 1 == len(set(nodes))


def _is_ray_worker(pid: int) -> bool:
    """Whether a process of this machine is a worker of Ray."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return b"RAY_RAYLET_PID=" in file.read()
    except OSError:
        return False
