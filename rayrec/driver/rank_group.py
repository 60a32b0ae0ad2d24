"""`RankGroup`: the actors of one world, which live and die together.

Started on the bundles of a placement group, then sorted so that ranks of one host are neighbours (the driver's host first). The group
turns what Ray says into observations: an answer to `poll`, or one line about a death. Every wait is bounded; a rank that does not answer
is only observed as silent, since a stopped process gives no other sign.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rayrec.driver.config import ScalingConfig
from rayrec.driver.policies import Failure, Observation
from rayrec.errors import TrainingFailed
from rayrec.train.progress import Event, RankPoll
from rayrec.train.seat import RankAddress, RankTask, Seat

T = TypeVar("T")


class RankGroup:
    """Actors by rank; see `started`.

    Args:
        actors: Ray handles, in rank order.
        addresses: where each of them lives.
    """

    def __init__(self, actors: Sequence[Any], addresses: Sequence[RankAddress], scaling: ScalingConfig) -> None:
        self._actors, self.addresses, self._scaling = list(actors), tuple(addresses), scaling
        self._polls: list[RankPoll | None] = [None] * len(actors)
        self._deaths: list[tuple[str, float]] = [("", 0.0)] * len(actors)
        self._answered = [time.monotonic()] * len(actors)
        self._pending: dict[Any, int] = {}
        self._seen = 0
        self._generation = 0
        self.events: list[Event] = []

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._actors)

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Ranks by node, in order."""
        nodes: dict[str, list[int]] = {}
        for rank, address in enumerate(self.addresses):
            nodes.setdefault(address.node_id, []).append(rank)
        return tuple(tuple(ranks) for ranks in nodes.values())

    def start(self, task: RankTask, timeout_s: float, setup_timeout_s: float) -> None:
        """Give every rank the task; it begins when all have met at rank 0's rendezvous.

        Args:
            timeout_s: bound on every collective of the task.
            setup_timeout_s: bound on this call.
        Raises:
            TrainingFailed: a rank did not answer or died.
        """
        import ray

        host = self.addresses[0].host
        port = self._answers([self._actors[0].create_store.remote(host)], "make the rendezvous", setup_timeout_s)[0]
        shared = ray.put(task)
        self._generation += 1
        self._polls, self._seen, self.events = [None] * self.world_size, 0, []
        self._answered = [time.monotonic()] * self.world_size
        threads = max(1, math.floor(self._scaling.cpus_per_worker))
        pin = places_on_machines(self.addresses)
        starts = [
            actor.start.remote(
                shared,
                Seat(
                    rank=rank,
                    world_size=self.world_size,
                    host=self.addresses[rank].host,
                    store_host=host,
                    store_port=port,
                    device="cuda" if self._scaling.use_gpu else "cpu",
                    threads=threads,
                    pin=pin[rank] if self._scaling.pin_cores else None,
                    timeout_s=timeout_s,
                    generation=self._generation,
                ),
            )
            for rank, actor in enumerate(self._actors)
        ]
        self._answers(starts, "start", setup_timeout_s)

    def observe(self, timeout_s: float, answer_s: float) -> tuple[Observation, ...]:
        """Ask all ranks that have not ended how they are, unless they still owe an answer.

        Args:
            timeout_s: wait at most so long for answers of all that owe one.
            answer_s: ranks answer when they have news, or after so many seconds: what runs beside a rank holds up all of them.
        """
        import ray

        asked = set(self._pending.values())
        for rank, actor in enumerate(self._actors):
            if rank not in asked and not self._ended(rank):
                self._pending[actor.poll.remote(self._seen if rank == 0 else 0, answer_s)] = rank
        if self._pending:
            for reference in ray.wait(list(self._pending), num_returns=len(self._pending), timeout=timeout_s)[0]:
                self._take(self._pending.pop(reference), reference)
        else:
            time.sleep(timeout_s)
        now = time.monotonic()
        return tuple(
            Observation(
                rank=rank,
                host=self.addresses[rank].host,
                poll=self._polls[rank],
                death=self._deaths[rank][0],
                death_at=self._deaths[rank][1],
                silent_s=0.0 if self._ended(rank) else now - self._answered[rank],
            )
            for rank in range(self.world_size)
        )

    def request_stop(self) -> None:
        """Ask all ranks to stop at their next agreed point."""
        for rank, actor in enumerate(self._actors):
            if not self._ended(rank):
                actor.request_stop.remote()

    def abort(self) -> None:
        """Cut the connections of all ranks, so that none hangs in a collective."""
        for actor in self._actors:
            actor.abort.remote()

    def gpu_memory(self, timeout_s: float) -> tuple[int, ...]:
        """Free bytes of each rank's GPU."""
        return tuple(self._answers([actor.gpu_memory.remote() for actor in self._actors], "look at its GPU", timeout_s))

    def _take(self, rank: int, reference: Any) -> None:
        import ray

        try:
            poll: RankPoll = ray.get(reference)
        except ray.exceptions.RayActorError as error:
            self._deaths[rank] = death_line(error), time.time()
            return
        self._polls[rank] = poll
        self._answered[rank] = time.monotonic()
        if rank == 0:
            self.events += poll.events
            self._seen += len(poll.events)

    def _ended(self, rank: int) -> bool:
        poll = self._polls[rank]
        return bool(self._deaths[rank][0]) or (poll is not None and poll.state in ("done", "failed"))

    def _answers(self, references: list[Any], what: str, timeout_s: float) -> list[Any]:
        """Their values, or a failure that names the first rank that gave none."""
        return answers(references, self.addresses, what, timeout_s)


def answers(references: Sequence[Any], addresses: Sequence[RankAddress], what: str, timeout_s: float) -> list[Any]:
    """Wait for one answer per rank.

    Raises:
        TrainingFailed: names the first rank that died, raised, or did not answer in `timeout_s` seconds.
    """
    import ray

    ready, late = ray.wait(list(references), num_returns=len(references), timeout=timeout_s)
    values = {}
    for rank, reference in enumerate(references):
        host = addresses[rank].host if rank < len(addresses) else ""
        failure = None
        if reference in ready:
            try:
                values[rank] = ray.get(reference)
            except ray.exceptions.RayActorError as error:
                failure = Failure(rank=rank, host=host, cause=death_line(error), traceback=str(error))
            except ray.exceptions.RayTaskError as error:
                cause = error.cause if error.cause is not None else error
                lines = str(cause).strip().splitlines() or [""]
                failure = Failure(rank=rank, host=host, cause=f"{type(cause).__name__}: {lines[0]}", traceback=str(error))
        elif reference in late:
            failure = Failure(rank=rank, host=host, cause=f"no answer in {timeout_s:.0f} s")
        if failure is not None:
            where = f"rank {rank} of {len(references)} on {host or 'an unknown host'}"
            raise TrainingFailed(f"{where} could not {what}: {failure.cause}", failure.rank, failure.host, failure.cause, failure.traceback)
    return [values[rank] for rank in range(len(references))]


@contextmanager
def started(scaling: ScalingConfig, placement: Any, timeout_s: float) -> Iterator[RankGroup]:
    """Actors on the bundles of `placement` inside the block; they import torch while the caller goes on. Killed at the end.

    Raises:
        TrainingFailed: an actor did not come up within `timeout_s` seconds.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from actors.rank import RankActor

    threads = str(max(1, math.floor(scaling.cpus_per_worker)))
    bundle = scaling.bundle
    extra = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    actors = []
    try:
        for index in range(scaling.num_workers):
            options = ray.remote(RankActor).options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                resources=extra or None,
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=4,  # a poll must pass while another call waits
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=index),
            )
            actors.append(options.remote({"OMP_NUM_THREADS": threads, "KINETO_LOG_LEVEL": "99"}))  # torch's profiler writes to stderr else
        addresses = answers([actor.describe.remote() for actor in actors], (), "start", timeout_s)
        order = neighbours(addresses, ray.get_runtime_context().get_node_id())
        yield RankGroup([actors[i] for i in order], [addresses[i] for i in order], scaling)
    finally:
        for actor in actors:
            ray.kill(actor, no_restart=True)


def neighbours(addresses: Sequence[RankAddress], here: str) -> list[int]:
    """Order of the actors that makes those of one node neighbours: the node `here` first, then by address and node."""
    key: Callable[[int], tuple[bool, str, str, int]] = lambda i: (  # noqa: E731
        addresses[i].node_id != here,
        addresses[i].host,
        addresses[i].node_id,
        i,
    )
    return sorted(range(len(addresses)), key=key)


def places_on_machines(addresses: Sequence[RankAddress]) -> list[tuple[int, int]]:
    """Per rank its number among the ranks of its machine, and how many they are; two Ray nodes may share a machine."""
    machines = [[rank for rank, other in enumerate(addresses) if other.host == address.host] for address in addresses]
    return [(ranks.index(rank), len(ranks)) for rank, ranks in enumerate(machines)]


def death_line(error: BaseException) -> str:
    """One line about why an actor is gone, from Ray's long message."""
    text = str(error)
    if "node has died" in text or "node was terminated" in text or "node failure" in text.lower():
        return "its node died or lost its connection"
    if "OutOfMemory" in type(error).__name__ or "memory monitor" in text.lower() or "low memory" in text.lower():
        return "its process was killed because the node ran out of memory"
    for line in text.splitlines():
        if "Worker unexpectedly exits" in line or "exit_detail" in line or "worker process has died" in line.lower():
            return "its process died without a word (killed by SIGKILL or the kernel's OOM killer, or crashed in native code)"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"its process died: {lines[-1] if lines else type(error).__name__}"
