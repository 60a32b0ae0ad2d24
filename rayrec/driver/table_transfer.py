"""Verdict on the health of the ranks, and the transfer of tables from one world to the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rayrec.driver.blame import Observation
from rayrec.driver.policies import Decision, judge
from rayrec.driver.progress import SILENT_S
from rayrec.driver.rank_group import RankGroup
from rayrec.driver.recovery import Recovery
from rayrec.driver.scaling import ScalingConfig
from rayrec.driver.worker_group import WorkerGroup
from rayrec.train.seat import RankAddress, RankTask

POLL_S = 0.2
# a rank without news says so after as long
ANSWER_S = 0.5


class Judging:
    """Judges looks at ranks that do one task; see `policies.judge`.

    Args:
        timeout_s: bound on every collective.
        heartbeat_s: seconds without an answer after which a rank counts as lost.
        recovery: account of failures; its patience lengthens `heartbeat_s`.
    """

    def __init__(self, timeout_s: float, heartbeat_s: float, recovery: Recovery) -> None:
        self._recovery = recovery
        self._silent_s, self._heartbeat_s = min(SILENT_S, timeout_s / 2), heartbeat_s
        self._trouble_since: float | None = None

    def begin(self) -> None:
        """Forget earlier trouble, since the ranks begin another task."""
        self._trouble_since = None

    def of(self, ranks: Sequence[Observation]) -> Decision:
        """Return the verdict on the observations of all ranks."""
        now = time.monotonic()
        # the cause may be heard of after its symptoms, so the verdict waits for it a moment
        if self._trouble_since is None and any(
            rank.death or (rank.poll and rank.poll.error) for rank in ranks
        ):
            self._trouble_since = now
        trouble_s = 0.0 if self._trouble_since is None else now - self._trouble_since
        return judge(ranks, trouble_s, self._silent_s, self.silence_s())

    def silence_s(self) -> float:
        """Return the seconds without an answer after which a rank counts as lost now."""
        return self._heartbeat_s * self._recovery.patience


class JointWorld:
    """Actors of a group and those that leave it, as one world; the group's ranks come first."""

    keeps_memory = False

    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers

    @property
    def actors(self) -> list[Any]:
        """Ray handles by rank."""
        return self._workers.actors + [actor for actor, *_ in self._workers.leaving]

    @property
    def addresses(self) -> tuple[RankAddress, ...]:
        """Addresses of the ranks, those that stay first."""
        return (*self._workers.addresses, *(address for _, address, _ in self._workers.leaving))

    @property
    def generation(self) -> int:
        """Counts the worlds of the group."""
        return self._workers.generation

    @generation.setter
    def generation(self, value: int) -> None:
        self._workers.generation = value


class TableTransfer:
    """Transfer of tables between the ranks before and after a change of their number.

    Args:
        workers: actors of the ranks after the change, and those that leave.
        check: called several times a second; its error ends the wait.
        judging: judges the health of the ranks meanwhile.
    Attributes:
        joint: both sets of ranks as one world during the transfer, else None.
    """

    joint: RankGroup | None = None

    def __init__(
        self,
        workers: WorkerGroup,
        scaling: ScalingConfig,
        check: Callable[[], None],
        judging: Judging,
    ) -> None:
        self._workers, self._scaling, self._check = workers, scaling, check
        self._judging = judging

    def look(self, task: RankTask, timeout_s: float, setup_timeout_s: float) -> Decision:
        """Begin the transfer `task`, or poll it, and return the verdict.

        Raises:
            TrainingFailed: a rank did not begin.
        """
        if self.joint is None:
            joint = JointWorld(self._workers)
            self.joint = RankGroup(joint, self._scaling, self._check, self._judging.silence_s)
            self._judging.begin()
            # the tables are on the CPU
            self.joint.start(task, timeout_s, setup_timeout_s, on_gpu=False)
        verdict = self._judging.of(self.joint.observe(POLL_S, ANSWER_S, events=False))
        if verdict.action == "finish":
            self.joint = None
        return verdict

    def give_up(self) -> None:
        """End the ranks that leave: the run goes on from what was saved."""
        self.joint = None
        self._workers.part()
