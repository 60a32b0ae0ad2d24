"""Account of the failures of a run, and of the time that they cost.

No Ray and no clock: every time is handed in.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Literal

from rayrec.driver.blame import Blame
from rayrec.driver.policies import patience, pause_s
from rayrec.train.events import Began, Failure, Recovered

# a lost rank gets a new process, or that of a spare, or the run goes on without it
Way = Literal["replaced", "relieved", "dropped"]

# number of failures before the run trains again that may be chance
_AT_ONCE = 3


@dataclass(kw_only=True, slots=True)
class Recovery:
    """Account of the failures of one run.

    Attributes:
        past: the failures that the run recovered from, or tries to.
        recoveries: number of times the run went on after failures.
        seconds_lost: seconds from a failure until the run was again at the step of the failure.
    """

    past: list[Blame] = field(default_factory=list)
    recoveries: int = 0
    seconds_lost: float = 0.0
    # failures after which the run has not begun again, and when they were noticed
    _open: list[tuple[Blame, float]] = field(default_factory=list)
    # what became of lost ranks since
    _ways: dict[int, Way] = field(default_factory=dict)
    _behind: int = 0
    _behind_since: float | None = None

    @property
    def under_way(self) -> bool:
        """True from a failure until the run trains again."""
        return bool(self._open)

    @property
    def first_cause(self) -> Blame | None:
        """The first failure since the run last trained, or None."""
        return self._open[0][0] if self._open else None

    @property
    def patience(self) -> float:
        """Factor by which the heartbeat timeout is extended now, by `policies.patience`."""
        return patience(sum(blame.kind == "silent" for blame, _ in self._open))

    @property
    def pause_s(self) -> float:
        """Back-off in seconds before the next start, after repeated failures."""
        more = len(self._open) - _AT_ONCE
        return pause_s(more) if more > 0 else 0.0

    def left(self, lost: Collection[int]) -> None:
        """Record that all ranks but `lost` have left the world that failed last."""
        blame = self.past[-1]
        if blame.is_mute and blame.rank not in lost:
            self.past[-1] = replace(blame, needless=True)

    def failed(self, blame: Blame, now: float) -> Failure:
        """Record a failure that the run recovers from, at `now` on any steady clock."""
        self.past.append(blame)
        self._open.append((blame, now))
        self._behind = max(self._behind, blame.step)
        if self._behind_since is None:
            self._behind_since = now
        return Failure(
            step=blame.step,
            rank=blame.rank,
            host=blame.host,
            cause=blame.cause,
            pause_s=self.pause_s,
        )

    def went(self, ranks: Collection[int], way: Way) -> None:
        """Record what became of lost ranks; a run without one may find a place for it later."""
        for rank in ranks:
            if way != "dropped" or rank not in self._ways:
                self._ways[rank] = way

    def began(self, began: Began, now: float) -> tuple[Recovered, ...]:
        """Record that all ranks train again, and return one event for each failure."""
        told = tuple(
            Recovered(
                step=began.step,
                path=began.path,
                # the driver may have looked last before the step that the run goes on from
                failed_step=max(blame.step, began.step),
                rank=blame.rank,
                host=blame.host,
                cause=blame.cause,
                seconds=now - since,
                replaced=self._ways.get(blame.rank) in ("replaced", "relieved"),
                spare=self._ways.get(blame.rank) == "relieved",
                dropped=self._ways.get(blame.rank) == "dropped",
                in_memory=began.in_memory,
            )
            for blame, since in self._open
        )
        self.recoveries += 1 if told else 0
        self._open.clear()
        self._ways.clear()
        return told

    def at_step(self, step: int, now: float) -> None:
        """Record the newest step; the time lost ends once the step of the failure is passed."""
        if self._behind_since is not None and not self._open and step > self._behind:
            self.caught_up(now)

    def caught_up(self, now: float) -> None:
        """Record that the run has reached the step of the failure again, or has ended."""
        if self._behind_since is not None:
            self.seconds_lost += now - self._behind_since
            self._behind_since = None
