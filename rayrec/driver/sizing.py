"""How many ranks a run goes on with, decided from how much room there is.

No Ray and no clock: places are counted by the caller, and every time is handed in as seconds of a
steady clock. A run that grows or shrinks on purpose pauses for it: its ranks end their task, and
the run goes on from there with another number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayrec.driver.scaling import ScalingConfig
from rayrec.train.events import Began, Resized

# the cluster needs a moment to make room that is asked for
LOOK_S = 1.0


def seats(
    ranks: int, wanted: int, least: int, room: int, waited_s: float, shrink_after_s: float
) -> int | None:
    """With how many ranks a run goes on that has to fill its ranks; None while it waits for room.

    Args:
        ranks: how many there are, also those that were lost just now.
        wanted: how many the run would have if there were room.
        least: the smallest number that it may have.
        room: places that the cluster has for them, also those that ranks hold.
        waited_s: how long it has waited.
        shrink_after_s: how long it waits for as many places as it has ranks.
    """
    if room >= min(ranks, wanted):
        return min(room, wanted)
    return room if room >= least and waited_s >= shrink_after_s else None


@dataclass(kw_only=True, slots=True)
class Sizing:
    """The number of ranks of one run.

    Attributes:
        least, most: the smallest and the largest number of ranks.
        grow_after_s: seconds between two looks for more room.
        wanted: ranks that the run would have if there were room: `most`, until somebody asks for
            another number.
        asked: somebody asked for `wanted`, and it has not come: the run looks each second.
        paused_since: when the ranks were asked to pause for a change, or None.
        leaving: they pause to leave nodes, and go on with the places that there are.
        resizes: how often the run went on with another number of ranks.
    """

    least: int
    most: int
    grow_after_s: float
    wanted: int = 0
    asked: bool = False
    paused_since: float | None = None
    leaving: bool = False
    resizes: int = 0
    # the ranks and the time when training last began
    _ranks: int = 0
    _next_look: float = 0.0
    _next_asked: float = 0.0
    # the room at the last look but those for what was asked, or 0
    _room: int = 0
    _paused_at: float | None = None

    def __post_init__(self) -> None:
        self.wanted = self.wanted or self.most

    @classmethod
    def of(cls, scaling: ScalingConfig) -> Sizing:
        """The sizing of a run that has just begun."""
        return cls(least=scaling.least, most=scaling.most, grow_after_s=scaling.grow_after_s)

    def ask(self, ranks: int) -> None:
        """Wish for a number of ranks between least and most; any thread may do so."""
        self.wanted, self.asked = ranks, True
        self._next_asked = 0.0

    def looks(self, ranks: int, now: float) -> bool:
        """Whether a run of so many ranks should look for more room now."""
        at = min(self._next_asked, self._next_look) if self.asked else self._next_look
        return self.wanted > ranks and now >= at

    def goal(self, ranks: int, room: int | None, now: float) -> int:
        """With how many ranks a run of `ranks` should go on after its next save.

        Args:
            room: places for ranks, also those that ranks hold; None where nobody has looked.
        """
        if room is None:
            return min(ranks, self.wanted)
        goal = min(room, self.wanted)
        settled = goal == self.wanted
        self._next_asked = now + LOOK_S
        if now >= self._next_look:
            # nodes come one after another, and each growth costs a pause
            settled = settled or room == self._room
            self._room, self._next_look = room, now + self.grow_after_s
        return goal if goal > ranks and settled else ranks

    def pause(self, now: float, *, leaving: bool = False) -> None:
        """Note that the ranks were asked to pause."""
        self.paused_since, self.leaving = now, leaving

    def call_off(self) -> int:
        """Take back a change before the ranks train again; the number that the run keeps to.

        It is 0 where there is nothing to take back: nodes that will go are left in any case.
        """
        if self.leaving or self.wanted == self._ranks:
            return 0
        self.wanted, self.asked = self._ranks, False
        return self._ranks

    def start(self) -> None:
        """Note that the ranks are given a task: whatever they were asked before is over."""
        self._paused_at, self.paused_since, self.leaving = self.paused_since, None, False

    def began(self, began: Began, ranks: int, now: float, *, lost: bool) -> Resized | None:
        """Note that so many ranks train; what there is to tell, if they are more or fewer.

        Args:
            lost: they begin after a failure.
        """
        before, self._ranks = self._ranks, ranks
        since, self._paused_at = self._paused_at, None
        self._room, self._next_look = 0, now + self.grow_after_s
        self.asked = self.asked and ranks != self.wanted
        if not before or before == ranks:
            return None
        self.resizes += 1
        return Resized(
            step=began.step,
            ranks_before=before,
            ranks=ranks,
            lost=lost and ranks < before,
            seconds=0.0 if since is None else now - since,
        )
