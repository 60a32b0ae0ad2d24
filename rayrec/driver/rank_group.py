"""`RankGroup`: the ranks that exist and have nothing to do yet; `Prepared`: the task made for them.

Whoever plans looks at their nodes and their memory, and has them look at folders and files. Every
wait is bounded, and a rank that dies or falls silent meanwhile ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayrec.driver.blame import Blame, Kind, RankTrouble
from rayrec.driver.failing import ailing
from rayrec.driver.policies import LONGEST_TURN_S
from rayrec.driver.processes import Processes
from rayrec.driver.rank_process import death_line, told
from rayrec.driver.recovery import Recovery
from rayrec.driver.roster import numbered
from rayrec.driver.run import Run
from rayrec.driver.views import View
from rayrec.errors import ConfigError
from rayrec.layout import ShardingPlan
from rayrec.layout.estimates import RankEstimate
from rayrec.train.callbacks import RunInfo
from rayrec.train.seat import RankTask

WAIT_TURN_S = 0.25


class RankGroup:
    """Ranks of one world before it works.

    Args:
        run: the run as it stands, all of whose ranks have a process.
        processes: all processes of the run.
        check: called several times a second while the group waits; its error ends the wait.
    Attributes:
        addresses, actors: address of each rank's process, and Ray's handle of it.
        handed_over: the ranks keep the tables of a world that has ended.
    """

    def __init__(self, run: Run, processes: Processes, check: Callable[[], None]) -> None:
        self._run, self._processes, self.check = run, processes, check
        self.scaling, self.handed_over = run.rules.scaling, run.handed_over
        self.addresses = run.roster.addresses
        self.actors = [processes[number].actor for number, _ in numbered(run.roster.ranks)]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.actors)

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
        asked = {rank: actor.gpu_memory.remote() for rank, actor in enumerate(self.actors)}
        return tuple(self._replies(asked, "look at its GPU").values())

    def see_folder(self, path: str, token: str) -> None:
        """Check that every rank can write to a folder and sees there what the driver wrote.

        Args:
            path: absolute folder or URI.
            token: name of a file that the driver left in it.
        Raises:
            ConfigError: a rank cannot; names the rank and its host.
            RankTrouble: a rank died or did not answer.
        """
        asked = {
            rank: actor.folder_trouble.remote(path, token) for rank, actor in enumerate(self.actors)
        }
        for rank, trouble in self._replies(asked, f"look at {path}").items():
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
        asked = {
            rank: self.actors[rank].missing_file.remote(list(files)) for rank, *_ in self.hosts
        }
        for rank, trouble in self._replies(asked, f"look for the {what}").items():
            if trouble:
                raise ConfigError(
                    f"the {what} are not on every host: {self._who(rank)} {trouble}. Put them on a "
                    "disk that all hosts mount under the same path, or into S3 or GCS."
                )

    def _who(self, rank: int) -> str:
        return f"rank {rank} of {self.world_size} on {self.addresses[rank].host}"

    def _replies(self, asked: Mapping[int, Any], what: str) -> dict[int, Any]:
        """Return what ranks answer, by the references of their answers.

        Args:
            what: verb phrase that completes "rank 1 could not ...".
        Raises:
            RankTrouble: names the first rank that died, raised, or gave no answer in time.
            RayrecError: a rank found a user's mistake.
        """
        import ray

        timeout_s = self._run.rules.setup_timeout_s
        waiting, waited_s = [*asked.values()], 0.0
        while waiting and waited_s < timeout_s:
            began = time.monotonic()
            self.check()
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=WAIT_TURN_S)
            self._processes.look(0.0)
            self._find_trouble(what)
            waited_s += min(time.monotonic() - began, LONGEST_TURN_S)
        values = {}
        for rank, reference in asked.items():
            if reference in waiting:
                raise self._trouble(rank, "silent", f"no answer in {timeout_s:.0f} s", what)
            try:
                values[rank] = ray.get(reference)
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
        view = View(now=time.monotonic(), processes=self._processes.views)
        blame = ailing(self._run, view, self._run.roster.ranks, (), what)
        if blame is not None:
            raise RankTrouble(blame)

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
