"""What the failures of a run were, and what they cost.

No Ray and no clock: every time is handed in.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from rayrec.driver.blame import Blame
from rayrec.driver.policies import patience
from rayrec.driver.spares import pause_s
from rayrec.train.events import Began, Failure, Recovered

# so many failures before the run trains again may be chance
_AT_ONCE = 3


@dataclass(kw_only=True, slots=True)
class Recovery:
    """The account of one run.

    Attributes:
        past: the failures that the run recovered from, or tries to.
        recoveries: how often the run went on after failures.
        seconds_lost: from the notice of a failure until the run was again where it had been.
    """

    past: list[Blame] = field(default_factory=list)
    recoveries: int = 0
    seconds_lost: float = 0.0
    # failures after which the run has not begun again, and when they were noticed
    _open: list[tuple[Blame, float]] = field(default_factory=list)
    _replaced: set[int] = field(default_factory=set)
    _relieved: set[int] = field(default_factory=set)
    _dropped: set[int] = field(default_factory=set)
    _behind: int = 0
    _behind_since: float | None = None

    @property
    def under_way(self) -> bool:
        """Whether the run has not begun again since its last failure."""
        return bool(self._open)

    @property
    def first_cause(self) -> Blame | None:
        """The first failure since the run last trained, or None."""
        return self._open[0][0] if self._open else None

    @property
    def patience(self) -> float:
        """How many times the usual bound silence is borne now; see `policies.patience`."""
        return patience(sum(blame.kind == "silent" for blame, _ in self._open))

    @property
    def pause_s(self) -> float:
        """Seconds to wait before ranks start again, of which one fails again and again."""
        more = len(self._open) - _AT_ONCE
        return pause_s(more) if more > 0 else 0.0

    def left(self, lost: Collection[int]) -> None:
        """Note that all ranks but the lost ones have left the world that failed last."""
        blame = self.past[-1]
        if blame.kind == "silent" and blame.rank not in lost:
            self.past[-1] = replace(blame, needless=True)

    def failed(self, blame: Blame, now: float) -> Failure:
        """Note a failure that the run recovers from; `now` is in seconds of any steady clock."""
        self.past.append(blame)
        self._open.append((blame, now))
        self._behind = max(self._behind, blame.step)
        if self._behind_since is None:
            self._behind_since = now
        return Failure(step=blame.step, rank=blame.rank, host=blame.host, cause=blame.cause)

    def replaced(self, ranks: Collection[int]) -> None:
        """Note which ranks have a new process."""
        self._replaced |= set(ranks)
        self._relieved -= set(ranks)

    def relieved(self, ranks: Collection[int]) -> None:
        """Note which ranks go on in the process of a spare."""
        self._replaced |= set(ranks)
        self._relieved |= set(ranks)

    def dropped(self, ranks: Collection[int]) -> None:
        """Note which ranks the run goes on without."""
        self._dropped |= set(ranks)

    def began(self, began: Began, now: float) -> tuple[Recovered, ...]:
        """Note that all ranks train again; what there is to tell, one for each failure."""
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
                replaced=blame.rank in self._replaced,
                spare=blame.rank in self._relieved,
                dropped=blame.rank in self._dropped - self._replaced,
                in_memory=began.in_memory,
            )
            for blame, since in self._open
        )
        self.recoveries += 1 if told else 0
        self._open.clear()
        self._replaced.clear()
        self._relieved.clear()
        self._dropped.clear()
        return told

    def at_step(self, step: int, now: float) -> None:
        """Note how far the run is: the loss ends with the first step that is new."""
        if self._behind_since is not None and not self._open and step > self._behind:
            self.caught_up(now)

    def caught_up(self, now: float) -> None:
        """Note that the run is where it was before the failure, or that it ended."""
        if self._behind_since is not None:
            self.seconds_lost += now - self._behind_since
            self._behind_since = None
