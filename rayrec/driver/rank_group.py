"""`RankGroup`: the ranks that exist and have nothing to do yet; `Prepared`: the task made for them.

Whoever plans looks at their nodes and their memory, and has them look at folders and files. Every
wait is bounded, and a rank that dies or falls silent meanwhile ends it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayrec.driver.blame import Blame, Kind, RankTrouble
from rayrec.driver.commands import Plan
from rayrec.driver.processes import Processes
from rayrec.driver.rank_process import death_line, told
from rayrec.driver.recovery import Recovery
from rayrec.driver.run import Run
from rayrec.errors import ConfigError
from rayrec.layout import ShardingPlan
from rayrec.layout.estimates import RankEstimate
from rayrec.train.callbacks import RunInfo
from rayrec.train.seat import RankAddress, RankTask

WAIT_TURN_S = 0.25


class RankGroup:
    """Ranks of one world before it works.

    Args:
        run: the run, whose rules bound every wait.
        plan: which processes the ranks are, and whether they keep the tables of a world that ended.
        processes: all processes of the run.
        check: called several times a second while the group waits; its error ends the wait.
    """

    def __init__(
        self, run: Run, plan: Plan, processes: Processes, check: Callable[[], None]
    ) -> None:
        self._processes, self._numbers, self.check = processes, plan.processes, check
        self._silence_s, self.rules = run.silence_s, run.rules
        self.handed_over = plan.handed_over

    @property
    def addresses(self) -> tuple[RankAddress, ...]:
        """Address of each rank's process."""
        known = (self._processes[number].address for number in self._numbers)
        return tuple(address for address in known if address is not None)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._numbers)

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Ranks by node, in order."""
        nodes: dict[str, list[int]] = {}
        for rank, address in enumerate(self.addresses):
            nodes.setdefault(address.node_id, []).append(rank)
        return tuple(tuple(ranks) for ranks in nodes.values())

    def keep_memory(self) -> None:
        """Record that hosts keep the memory of ranks, so that the end of the run frees it."""
        self._processes.keeps_memory = True

    def gpu_memory(self) -> tuple[int, ...]:
        """Free bytes of each rank's GPU."""
        asked = [actor.gpu_memory.remote() for actor in self.actors]
        return tuple(self._replies(asked, "look at its GPU"))

    def see_folder(self, path: str, token: str) -> None:
        """Check that every rank can write to a folder and sees there what the driver wrote.

        Args:
            path: absolute folder or URI.
            token: name of a file that the driver left in it.
        Raises:
            ConfigError: a rank cannot; names the rank and its host.
            RankTrouble: a rank died or did not answer.
        """
        asked = [actor.folder_trouble.remote(path, token) for actor in self.actors]
        for rank, trouble in enumerate(self._replies(asked, f"look at {path}")):
            if trouble:
                raise ConfigError(
                    f"the run's folder {path} is not shared by all hosts: {self._who(rank)} "
                    f"{trouble}. Name a folder on a disk that all hosts mount, or a URI such as "
                    "s3://bucket/runs, as storage_path."
                )

    def see_files(self, files: Sequence[tuple[str, int]], what: str) -> None:
        """Check that every host sees local files as the driver does; one rank of each host looks.

        Args:
            files: path and size in bytes of each.
            what: content of the files, for the message, such as "data".
        Raises:
            ConfigError: a host does not; names the host and the first such file.
            RankTrouble: a rank died or did not answer.
        """
        if not files:
            return
        first = [ranks[0] for ranks in self.hosts]
        asked = [self.actors[rank].missing_file.remote(list(files)) for rank in first]
        troubles = self._replies(asked, f"look for the {what}", first)
        for rank, trouble in zip(first, troubles, strict=True):
            if trouble:
                raise ConfigError(
                    f"the {what} are not on every host: {self._who(rank)} {trouble}. Put them on a "
                    "disk that all hosts mount under the same path, or into S3 or GCS."
                )

    @property
    def actors(self) -> list[Any]:
        """Ray's handle of each rank."""
        return [self._processes[number].actor for number in self._numbers]

    def _who(self, rank: int) -> str:
        return f"rank {rank} of {self.world_size} on {self.addresses[rank].host}"

    def _replies(
        self, references: list[Any], what: str, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Return the answers of `ranks`, by default of all ranks, in the order of `references`.

        Args:
            what: verb phrase that completes "rank 1 could not ...".
        Raises:
            RankTrouble: names the first rank that died, raised, or gave no answer in time.
            RayrecError: a rank found a user's mistake.
        """
        import ray

        asked = dict(zip(ranks or range(len(references)), references, strict=True))
        timeout_s = self.rules.setup_timeout_s
        waiting, deadline = list(references), time.monotonic() + timeout_s
        while waiting:
            self.check()
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=WAIT_TURN_S)
            self._processes.look(0.0)
            self._find_trouble(what)
            if time.monotonic() >= deadline:
                break
        values = []
        for rank, reference in asked.items():
            if reference in waiting:
                raise self._trouble(rank, "silent", f"no answer in {timeout_s:.0f} s", what)
            try:
                values.append(ray.get(reference))
            except ray.exceptions.RayTaskError as error:
                raised = told(error)
                if raised["mistake"] is not None:
                    raise raised["mistake"] from error
                raise self._trouble(rank, "error", raised["cause"], what) from error
            except ray.exceptions.RayError as error:
                # it died after the last look
                raise self._trouble(rank, "died", death_line(error), what) from error
        return values

    def _find_trouble(self, what: str) -> None:
        for rank, number in enumerate(self._numbers):
            view = self._processes[number].view
            loss = view.loss(self._silence_s, self._silence_s if view.is_awake else math.inf)
            if loss is not None:
                raise self._trouble(rank, *loss, what if view.death else "")

    def _trouble(self, rank: int, kind: Kind, cause: str, what: str) -> RankTrouble:
        host = self.addresses[rank].host
        return RankTrouble(Blame(rank=rank, host=host, cause=cause, what=what, kind=kind))


@dataclass(frozen=True, slots=True)
class Prepared:
    """Task for the ranks, with its plan.

    Attributes:
        task: task of every rank; None ends the run at once.
        plan: sharding plan of the task's tables, or None.
        predicted: seconds of a step that the cost model expects, by rank; may be empty.
        first: task to run before it, together with ranks that leave the run, or None.
        info: facts that callbacks receive when the task begins, or None.
    """

    task: RankTask | None
    plan: ShardingPlan | None = None
    predicted: tuple[RankEstimate, ...] = ()
    info: RunInfo | None = None
    first: RankTask | None = None


@dataclass(frozen=True, slots=True)
class Ran:
    """Outcome of a task.

    Attributes:
        prepared: task that the ranks ran.
        results: the task's result by rank; empty without a task.
        signal_number: the signal that ended the run early, or None.
        recovery: the account of its failures.
        resizes: number of times it went on with another number of ranks.
    """

    prepared: Prepared
    results: tuple[Any, ...] = ()
    signal_number: int | None = None
    recovery: Recovery = field(default_factory=Recovery)
    resizes: int = 0
