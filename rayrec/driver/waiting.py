"""What a run does while its ranks have no room: how long it waits, what it says, how it ends."""

from __future__ import annotations

from collections.abc import Iterator
from signal import SIGTERM

from rayrec.driver.blame import Blame
from rayrec.driver.commands import At, Command, Tell
from rayrec.driver.placement import NOTICE_AFTER_S, refusal, shortage, too_much, why_waiting
from rayrec.driver.policies import LONGEST_TURN_S
from rayrec.driver.run import Run
from rayrec.driver.scaling import PLACEMENT_TIMEOUT_S, SHRINK_AFTER_S
from rayrec.driver.states import Ended, Filling
from rayrec.driver.views import View
from rayrec.errors import ConfigError, RayrecError, RunInterrupted


def shrink_after_s(run: Run, view: View, ranks: int) -> float:
    """Return the seconds that a run of `ranks` waits for a lost place before it shrinks."""
    scaling, told = run.rules.scaling, view.resources
    if scaling.shrink_after_s is not None:
        return scaling.shrink_after_s
    # no waiting for a node that nobody will add
    never = run.rules.cluster.fixed and told is not None and shortage(scaling, told.total, ranks)
    return 0.0 if never else SHRINK_AFTER_S


def waiting_since(state: Filling, view: View) -> float:
    """Return since when places are missing, without the time in which the head of the cluster was
    silent and then answered: room that it gave meanwhile is known from now on.
    """
    since = view.now if state.room_since is None else state.room_since
    if view.rooms is not None:
        heard_at, state.heard_at = state.heard_at, view.rooms.asked_at
        if heard_at is not None:
            silent_s = max(0.0, view.rooms.asked_at - heard_at - LONGEST_TURN_S)
            since = min(view.now, since + silent_s)
    state.room_since = since
    return since


def wait(run: Run, state: Filling, view: View, room: int, ranks: int) -> Iterator[Command]:
    """Spend a look waiting for more places than there are."""
    scaling, told, least = run.rules.scaling, view.resources, run.rules.scaling.least
    assert state.room_since is not None
    waited_s = view.now - state.room_since
    limit_s = scaling.placement_timeout_s or PLACEMENT_TIMEOUT_S
    shrinks = scaling.is_elastic and bool(run.roster.ranks)
    if run.generation:
        lost = "the ranks" if shrinks else "the lost ranks"
        yield At(where=f"waiting for room for {lost}", patient=True)
    if told is None:
        return
    if room < least or not shrinks:
        why = too_much(scaling, told.total, run.rules.cluster)
        if why and (shrinks or waited_s == 0.0):
            run.state = _no_room(run, ConfigError(why))
            return
        if waited_s >= limit_s:
            base = view.rooms.base if view.rooms is not None else "unknown"
            run.state = _no_room(run, refusal(scaling, base, told, waited_s))
            return
    if waited_s < NOTICE_AFTER_S or state.is_told:
        return
    state.is_told = True
    if not shrinks:
        what = why_waiting(scaling, told) or "Ray has not given it yet"
        yield Tell(event=f"waiting for room: {what} (up to {limit_s:.0f} s)")
        return
    until = f"at least {least} are needed, up to {limit_s:.0f} s"
    if room >= least:
        until = f"goes on with {room} after {shrink_after_s(run, view, ranks):.0f} s"
    yield Tell(event=f"waiting for room: {room} of {ranks} ranks have a place ({until})")


def stop(run: Run, state: Filling, view: View) -> None:
    """End a run that was asked to, and whose ranks cannot save since they get no room."""
    if not run.handed_over and view.now - state.since >= NOTICE_AFTER_S:
        run.state = stopped(run, view, "while it waited for room")


def stopped(run: Run, view: View, when: str = "before it went on") -> Ended:
    """Return the end of a run that was asked to stop, and whose ranks hold nothing unsaved.

    It ends as it would have if it had been asked a moment sooner: ranks that paused have saved, and
    a failure is not recovered from.
    """
    first = run.recovery.first_cause
    if first is None and run.has_result:
        run.recovery.caught_up(view.now)
        return Ended()
    if first is not None and view.signal is None:
        return _end_with(run, first, f"the run was asked to stop {when}")
    return Ended(error=RunInterrupted(view.signal or SIGTERM))


def _no_room(run: Run, error: RayrecError) -> Ended:
    """Return the end of a run whose ranks, new or lost, found no place."""
    first = run.recovery.first_cause
    if first is None or not isinstance(error, ConfigError):
        return Ended(error=error)
    return _end_with(run, first, f"it could not be replaced: {error}")


def _end_with(run: Run, first: Blame, more: str) -> Ended:
    past = tuple(old for old in run.recovery.past if old is not first)
    return Ended(blame=first, past=past, more=more)
