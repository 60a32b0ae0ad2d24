"""`RankGroup`: the world of all ranks, which do one task together, and after a failure another.

The group turns what Ray says into observations: an answer to `poll`, or one line about a death.
Every wait is bounded; a rank that does not answer is only observed as silent, since a stopped
process gives no other sign. The actors are those of a `WorkerGroup`, which replaces the lost ones.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rayrec.driver.blame import Observation
from rayrec.driver.ray_replies import LONGEST_TURN_S, Heartbeat, death_line, get_replies, stacks_of
from rayrec.driver.scaling import ScalingConfig
from rayrec.errors import ConfigError
from rayrec.train.events import Event
from rayrec.train.progress import RankPoll
from rayrec.train.seat import RankAddress, RankTask, Seat, places_on_machines

if TYPE_CHECKING:
    from rayrec.driver.table_transfer import JointWorld
    from rayrec.driver.worker_group import WorkerGroup


class RankGroup:
    """Ranks of one world, started by `worker_group.started`, as a group that runs tasks.

    Args:
        workers: the actors; they may be replaced between two tasks.
        check: called several times a second while the group waits; its error ends the wait.
        silence_s: returns the seconds that a rank may be silent meanwhile.
    Attributes:
        task: Ray reference of the newest task of the ranks.
        handed_over: the ranks keep the tables of a world that has ended.
    """

    task: Any = None
    handed_over = False

    def __init__(
        self,
        workers: WorkerGroup | JointWorld,
        scaling: ScalingConfig,
        check: Callable[[], None] = lambda: None,
        silence_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._workers, self._scaling, self.check = workers, scaling, check
        self._silence_s = silence_s
        self._awake: set[Any] = set()  # actors that have finished their imports
        self.forget()

    def forget(self) -> None:
        """Drop all pending calls and old answers, since a task begins or has failed."""
        self._polls: list[RankPoll | None] = [None] * self.world_size
        self._deaths: list[tuple[str, float]] = [("", 0.0)] * self.world_size
        self._silent_s = [0.0] * self.world_size
        self._looked_at = time.monotonic()
        self._pending: dict[Any, int] = {}
        self._seen = 0
        self.events: list[Event] = []

    @property
    def _actors(self) -> list[Any]:
        return self._workers.actors

    @property
    def addresses(self) -> tuple[RankAddress, ...]:
        """Address of each rank's process."""
        return self._workers.addresses

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

    def keep_memory(self) -> None:
        """Record that hosts keep the memory of ranks, so that the end of the run frees it."""
        self._workers.keeps_memory = True

    def start(
        self, task: RankTask, timeout_s: float, setup_timeout_s: float, *, on_gpu: bool = True
    ) -> None:
        """Give every rank the task; it begins when all have met at rank 0's rendezvous.

        Args:
            timeout_s: bound on every collective of the task.
            setup_timeout_s: bound on this call.
            on_gpu: ranks with a GPU use it.
        Raises:
            TrainingFailed: a rank did not answer or died.
        """
        import ray

        host = self.addresses[0].host
        # The task holds the model function and the plan; it goes into the object store once for all
        # ranks.
        self.task = ray.put(task)
        # All of them have imported what they need before any waits for the others.
        taken = [actor.take.remote([self.task]) for actor in self._actors]
        self._replies(taken, "start", setup_timeout_s)
        made = [self._actors[0].create_store.remote(host)]
        (port,) = self._replies(made, "make the rendezvous", setup_timeout_s)
        # Names in the rendezvous carry the generation, so that a second task does not read the
        # first one's.
        self._workers.generation += 1
        self.forget()
        threads = max(1, math.floor(self._scaling.cpus_per_worker))
        pin = places_on_machines(self.addresses)
        starts = []
        for rank, actor in enumerate(self._actors):
            seat = Seat(
                rank=rank,
                world_size=self.world_size,
                host=self.addresses[rank].host,
                store_host=host,
                store_port=port,
                device="cuda" if self._scaling.use_gpu and on_gpu else "cpu",
                threads=threads,
                pin=pin[rank] if self._scaling.pin_cores else None,
                timeout_s=timeout_s,
                generation=self._workers.generation,
            )
            starts.append(actor.start.remote(seat))
        self._replies(starts, "start", setup_timeout_s)

    def observe(
        self, timeout_s: float, answer_s: float, *, events: bool = True
    ) -> tuple[Observation, ...]:
        """Poll all ranks that have not ended and have no pending poll, and return what is known.

        Args:
            timeout_s: longest wait for the answers of all polled ranks.
            answer_s: seconds after which a rank without news answers; not sooner, since work beside
                a rank holds up all of them.
            events: collect the events of rank 0, too; otherwise only the states of the ranks.
        """
        import ray

        asked = set(self._pending.values())
        for rank, actor in enumerate(self._actors):
            if actor is None:
                self._deaths[rank] = "it was not started", time.time()
            elif rank not in asked and not self._ended(rank):
                # Rank 0 reports for all: its windows are merged over the ranks.
                seen = self._seen if rank == 0 and events else sys.maxsize
                self._pending[actor.poll.remote(seen, answer_s)] = rank
        if self._pending:
            asked_now = list(self._pending)
            ready, _ = ray.wait(asked_now, num_returns=len(asked_now), timeout=timeout_s)
            for reference in ready:
                self._take(self._pending.pop(reference), reference)
        else:
            time.sleep(timeout_s)
        now = time.monotonic()
        turn_s = min(now - self._looked_at, LONGEST_TURN_S)
        self._looked_at = now
        for rank in self._pending.values():
            self._silent_s[rank] += turn_s
        return tuple(
            Observation(
                rank=rank,
                host=self._host(rank),
                poll=self._polls[rank],
                death=self._deaths[rank][0],
                death_at=self._deaths[rank][1],
                silent_s=self._silent_s[rank],
            )
            for rank in range(self.world_size)
        )

    def request_stop(self, going_to: int = 0) -> None:
        """Ask all ranks to stop at their next agreed point.

        Args:
            going_to: number of ranks after the pause, for which the ranks keep their tables; 0 has
                them save.
        """
        for rank, actor in enumerate(self._actors):
            if not self._ended(rank):
                actor.request_stop.remote(going_to)

    def request_save(self) -> None:
        """Ask the ranks to save at their next agreed point and to go on; one says so for all."""
        if not self._ended(0):
            self._actors[0].request_save.remote()

    def abort(self) -> None:
        """Cut the connections of all ranks, so that none hangs in a collective."""
        for actor in self._actors:
            if actor is not None:
                actor.abort.remote(self._workers.generation)

    def gpu_memory(self, timeout_s: float) -> tuple[int, ...]:
        """Free bytes of each rank's GPU."""
        asked = [actor.gpu_memory.remote() for actor in self._actors]
        return tuple(self._replies(asked, "look at its GPU", timeout_s))

    def _take(self, rank: int, reference: Any) -> None:
        import ray

        try:
            poll: RankPoll = ray.get(reference)
        except ray.exceptions.RayActorError as error:
            self._deaths[rank] = death_line(error), time.time()
            return
        self._polls[rank] = poll
        self._silent_s[rank] = 0.0
        if rank == 0:
            self.events += poll.events
            self._seen += len(poll.events)

    def _ended(self, rank: int) -> bool:
        poll = self._polls[rank]
        ended = poll is not None and poll.state in ("done", "failed")
        return ended or bool(self._deaths[rank][0])

    def see_folder(self, path: str, token: str, timeout_s: float) -> None:
        """Check that every rank can write to a folder and sees there what the driver wrote.

        Args:
            path: absolute folder or URI.
            token: name of a file that the driver left in it.
        Raises:
            ConfigError: a rank cannot; names the rank and its host.
            TrainingFailed: a rank died or did not answer.
        """
        asked = [actor.folder_trouble.remote(path, token) for actor in self._actors]
        for rank, trouble in enumerate(self._replies(asked, f"look at {path}", timeout_s)):
            if trouble:
                raise ConfigError(
                    f"the run's folder {path} is not shared by all hosts: {self._who(rank)} "
                    f"{trouble}. Name a folder on a disk that all hosts mount, or a URI such as "
                    "s3://bucket/runs, as storage_path (--checkpoint-dir)."
                )

    def see_files(self, files: Sequence[tuple[str, int]], what: str, timeout_s: float) -> None:
        """Check that every host sees local files as the driver does; one rank of each host looks.

        Args:
            files: path and size in bytes of each.
            what: content of the files, for the message, such as "data".
        Raises:
            ConfigError: a host does not; names the host and the first such file.
            TrainingFailed: a rank died or did not answer.
        """
        if not files:
            return
        first = [ranks[0] for ranks in self.hosts]
        asked = [self._actors[rank].missing_file.remote(list(files)) for rank in first]
        troubles = self._replies(asked, f"look for the {what}", timeout_s, first)
        for rank, trouble in zip(first, troubles, strict=True):
            if trouble:
                raise ConfigError(
                    f"the {what} are not on every host: {self._who(rank)} {trouble}. Put them on a "
                    "disk that all hosts mount under the same path, or into S3 or GCS."
                )

    def stacks(self, timeout_s: float) -> str:
        """Return the stacks of all ranks as text; ranks without an answer are named in it."""
        if len(self.addresses) < self.world_size:
            return "-- ranks are being replaced"
        return stacks_of(self._actors, self.addresses, timeout_s)

    def _host(self, rank: int) -> str:
        # while ranks are replaced, fewer have a known address
        known = self.addresses
        return known[rank].host if len(known) == self.world_size else ""

    def _who(self, rank: int) -> str:
        return f"rank {rank} of {self.world_size} on {self.addresses[rank].host}"

    def _replies(
        self, references: list[Any], what: str, timeout_s: float, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Wait for the answers of `ranks`, by default of all ranks, in the order of `references`.

        A rank that gives none within `timeout_s` is a failure, which says that it was asked to do
        `what`; see `get_replies`.
        """
        asked = dict(zip(ranks or range(len(references)), references, strict=True))
        heartbeat = Heartbeat(self._actors, self.addresses, self._silence_s(), self._awake)

        def check() -> None:
            self.check()
            heartbeat.check()

        return get_replies(asked, self.addresses, self.world_size, what, timeout_s, check)
