"""Decisions on the number of ranks of a run, from the number of places.

No Ray and no clock: places are counted by the caller, and every time is handed in as seconds of a
steady clock. A run that grows or shrinks on purpose pauses for it: its ranks end their task, and
the run goes on from there with another number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayrec.train.events import Began, Resized

# between two looks at the places of the cluster, which needs a moment to make room
LOOK_S = 1.0
# bound on the factor by which a growth that was called off waits longer
MOST_PUT_OFF = 64


def seats(
    ranks: int, wanted: int, least: int, room: int, waited_s: float, shrink_after_s: float
) -> int | None:
    """Return the number of ranks for the next attempt; None while the run waits for places.

    Args:
        ranks: current number of ranks, lost ones included.
        wanted: number of ranks that the run would have with room for all.
        least: smallest number of ranks that it may have.
        room: number of places for ranks, those that ranks hold included.
        waited_s: seconds that it has waited.
        shrink_after_s: seconds that it waits for as many places as it has ranks.
    """
    if room >= min(ranks, wanted):
        return min(room, wanted)
    return room if room >= least and waited_s >= shrink_after_s else None


@dataclass(kw_only=True, slots=True)
class Sizing:
    """Current and wanted number of ranks of one run.

    Attributes:
        grow_after_s: seconds between two looks for more room.
        wanted: ranks that the run would have if there were room: the largest number, until
            somebody asks for another one.
        asked: somebody asked for `wanted`, and it has not come: the run looks each second.
        paused_since: time when the ranks were asked to pause for a change, or None.
        leaving: hosts of draining nodes that the ranks pause to leave, for the other places.
        left: those that they have left, until they train again.
        resizes: number of times the run went on with another number of ranks.
    """

    grow_after_s: float
    wanted: int
    asked: bool = False
    paused_since: float | None = None
    leaving: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    resizes: int = 0
    # the ranks and the time when training last began
    _ranks: int = 0
    _next_look: float = 0.0
    _next_asked: float = 0.0
    # the room at the last look but those for what was asked, or 0
    _room: int = 0
    _paused_at: float | None = None
    # growths that new ranks were lost for since training began
    _missed: int = 0

    def ask(self, ranks: int) -> None:
        """Request a number of ranks between least and most; any thread may do so."""
        self.wanted, self.asked = ranks, True
        self._next_asked = 0.0

    def looks(self, ranks: int, now: float) -> bool:
        """Return True if a run of `ranks` ranks should look for more places now."""
        at = min(self._next_asked, self._next_look) if self.asked else self._next_look
        return self.wanted > ranks and now >= at

    def goal(self, ranks: int, room: int | None, now: float) -> int:
        """Return the number of ranks for a run of `ranks` after its next save.

        Args:
            room: number of places, those that ranks hold included; None where nobody has looked.
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

    def put_off(self, now: float) -> None:
        """Record that a growth is called off, since new ranks were lost; it is tried again later.

        Each one in a row doubles the seconds until then, up to `MOST_PUT_OFF` times.
        """
        later = self.grow_after_s * min(MOST_PUT_OFF, 2**self._missed)
        self._missed += 1
        self._next_look = self._next_asked = now + later

    def pause(self, now: float, *, leaving: tuple[str, ...] = ()) -> None:
        """Record that the ranks were asked to pause."""
        self.paused_since, self.leaving = now, leaving

    def call_off(self, ranks: int) -> int:
        """Cancel a change to `ranks` ranks, and return the number of ranks that stays.

        It is 0 where there is nothing to take back: nodes that will go are left in any case.
        """
        if self.leaving or ranks == self._ranks:
            return 0
        self.wanted, self.asked = self._ranks, False
        return self._ranks

    def start(self) -> None:
        """Record that the ranks are given a new task, which ends an earlier request.

        They may be asked to pause again before they train.
        """
        self._paused_at, self.paused_since = self.paused_since, None
        self.left, self.leaving = self.leaving, ()

    def began(self, began: Began, ranks: int, now: float, *, lost: bool) -> Resized | None:
        """Record that `ranks` ranks train, and return an event if their number has changed.

        Args:
            lost: the ranks begin again after a failure.
        """
        before, self._ranks = self._ranks, ranks
        since, self._paused_at, self.left = self._paused_at, None, ()
        self._room, self._next_look, self._missed = 0, now + self.grow_after_s, 0
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
