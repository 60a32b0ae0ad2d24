"""Ranks at work: their health, their events, requests to stop, and the changes that come due.

A change of the ranks begins with a wish: of a caller, of a cluster that has more room, or of a node
that will go. New ranks come up beside the others first; then all are asked to pause, get other
places, are given another plan, and train again.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Literal

from rayrec.driver.blame import Blame
from rayrec.driver.commands import Command, Keep, Stop, Tell
from rayrec.driver.failing import ailing, dismiss, failed
from rayrec.driver.filling import ask, there
from rayrec.driver.placement import NOTICE_AFTER_S, crowding, shortage
from rayrec.driver.policies import judge
from rayrec.driver.preemption import notice
from rayrec.driver.roster import Role, Seat, Stage, choose
from rayrec.driver.run import SILENT_S, Run
from rayrec.driver.spares import keep, warm
from rayrec.driver.starting import take
from rayrec.driver.states import Ended, Filling, Handing, Running
from rayrec.driver.views import Observation, View
from rayrec.driver.waiting import stopped
from rayrec.errors import TrainingFailed
from rayrec.train.events import Began, Milestone


def hand_over(run: Run, view: View) -> Iterator[Command]:
    """Watch the ranks before and after a change pass tables on."""
    state = run.state
    assert isinstance(state, Handing)
    verdict = _verdict(run, state, view, run.observe(view, run.joint()))
    if isinstance(verdict, Blame):
        yield from failed(run, view, verdict)
    elif verdict == "finish":
        if run.roster.of(Role.LEAVER):
            yield from dismiss(run, Role.LEAVER)
            yield from ask(run, view, run.sizing.wanted)
        yield Tell(event=Milestone("tables passed on", at=view.wall))
        yield from take(run, view, first=False)


def watch(run: Run, view: View) -> Iterator[Command]:
    """Watch the ranks train, or do any other task."""
    state, now = run.state, view.now
    assert isinstance(state, Running)
    if view.stops and state.stop_at is None:
        state.stop_at = now
        yield Tell(event="asked to stop; the ranks finish their window and save what the run keeps")
        yield from _ask_to_stop(run, view, 0)
    ranks = run.observe(view, run.roster.ranks)
    yield from _tell(run, state, view)
    yield from run.progress.see(ranks)
    run.recovery.at_step(run.progress.step, now)
    verdict = _verdict(run, state, view, ranks)
    if verdict == "finish":
        yield from _finish(run, view)
    elif isinstance(verdict, Blame):
        yield from failed(run, view, verdict)
    elif state.stop_at is not None:
        _end_late(run, state, state.stop_at, view)
    elif run.rules.resizes:
        yield from _look_ahead(run, state, view, ranks)


def _verdict(
    run: Run, state: Handing | Running, view: View, ranks: Sequence[Observation]
) -> Blame | Literal["wait", "finish"]:
    """Judge the health of ranks that do one task."""
    # the cause may be heard of after its symptoms, so the verdict waits for it a moment
    if state.trouble_at is None and any(r.has_failed and not r.is_done for r in ranks):
        state.trouble_at = view.now
    trouble_s = 0.0 if state.trouble_at is None else view.now - state.trouble_at
    return judge(ranks, trouble_s, min(SILENT_S, run.rules.timeout_s / 2), run.silence_s)


def _end_late(run: Run, state: Running, asked_at: float, view: View) -> None:
    """End a run whose ranks have not obeyed for too long; those that have ended are judged first.

    The driver may have slept, or run a callback for long, and they have saved meanwhile.
    """
    limit_s = run.rules.stop_timeout_s
    if view.now - asked_at > limit_s and not state.at_stake:
        run.state = stopped(run, view)
    elif view.now - asked_at > limit_s:
        why = f"the ranks were asked to stop and did not in {limit_s:.0f} s; they were killed."
        run.state = Ended(error=TrainingFailed(why))


def _ask_to_stop(run: Run, view: View, going_to: int) -> Iterator[Command]:
    """Ask all ranks to stop at their next agreed point; 0 has them end, else so many go on."""
    ranks = run.roster.ranks
    for seat, seen in zip(ranks, run.observe(view, ranks), strict=True):
        ended = seen.poll is not None and seen.poll.state in ("done", "failed")
        if seat.process is not None and not ended and not seen.death:
            yield Stop(process=seat.process, going_to=going_to)


def _tell(run: Run, state: Running, view: View) -> Iterator[Command]:
    """Pass on the events of the ranks since the last look."""
    for event in view.events:
        if isinstance(event, Began):
            state.at_stake = True
            lost = run.recovery.under_way
            for recovered in run.recovery.began(event, view.now):
                yield Tell(event=recovered)
            size, hosts = len(run.roster.ranks), ", ".join(run.sizing.left)
            if changed := run.sizing.began(event, size, view.now, lost=lost):
                yield Tell(event=changed)
            elif hosts and not lost:
                yield Tell(event=f"left {hosts} at step {event.step}; all ranks go on elsewhere")
            run.progress.go_back(event.step)
        yield Tell(event=event)


def _finish(run: Run, view: View) -> Iterator[Command]:
    """End the run, or begin the change for which its ranks have paused."""
    first = run.roster.ranks[0].process
    result = view.processes[first].pause if first is not None else None
    if run.rules.resizes and result is not None:
        paused = run.sizing.paused_since is not None and result.stopped
        # ranks that were to end meanwhile, and have not saved, do so in the next life
        if paused and (not view.stops or result.handed_over):
            run.former, run.goes_back = tuple(run.places), False
            run.handed_over = result.handed_over
            run.has_result = not result.handed_over
            if run.has_result:
                yield Keep()
            run.state = Filling(since=view.now)
            return
    run.has_result = False
    run.recovery.caught_up(view.now)
    run.state = Ended()


def _look_ahead(
    run: Run, state: Running, view: View, ranks: Sequence[Observation]
) -> Iterator[Command]:
    """Keep spares, and have the ranks pause for a change that is due, or save."""
    leaving: tuple[str, ...] = ()
    if run.needs:
        # a process that starts beside ranks on their way slows them
        if run.rules.scaling.spares and run.progress.trains and not run.recovery.under_way:
            yield from keep(run, view)
        if run.sizing.paused_since is None:
            leaving = yield from notice(run, view, ranks)
    if run.sizing.paused_since is not None:
        return
    goal = 0 if leaving else (yield from _goal(run, state, view, ranks))
    if leaving or goal:
        run.sizing.pause(view.now, leaving=leaving)
        # tables that lie on a node which goes are safe only in a checkpoint
        yield from _ask_to_stop(run, view, goal)


def _goal(
    run: Run, state: Running, view: View, ranks: Sequence[Observation]
) -> Generator[Command, None, int]:
    """Return the number of ranks to go on with after a pause; 0 where no pause is needed.

    New ranks come before the pause, and import what their task needs beside the others.
    """
    sizing, size, now, scaling = run.sizing, len(ranks), view.now, run.rules.scaling
    if not scaling.is_elastic:
        return 0
    # An evaluation would be made again, and what is at its end needs no change.
    polls = [rank.poll for rank in ranks]
    if any(p is None or (p.state, p.phase) != ("running", "training") for p in polls):
        return 0
    places = None
    if sizing.looks(size, now) and view.rooms is not None:
        yield from ask(run, view, sizing.wanted)
        places = there(run, view)
        if sizing.asked:
            yield from _tell_short(run, view, len(places))
    goal = sizing.goal(size, None if places is None else len(places), now)
    if goal < size:
        state.growing = 0
        yield from dismiss(run, Role.NEWCOMER)
        return goal
    if not state.growing and places is not None and goal > size:
        held = run.places
        for place in choose(places, held, goal):
            if place not in held:
                seat = Seat(role=Role.NEWCOMER, place=place)
                run.roster.seats.append(seat)
                yield run.start_process(seat)
        # they come up, and import
        state.growing, state.deadline = goal, now + 2 * run.setup_s
        yield Tell(
            event=f"room for {goal} ranks: new ones start, and the {size} go on with them from the "
            "end of a window"
        )
    if not state.growing:
        return 0
    goal = state.growing
    all_live = yield from _newcomers(run, state, view)
    if sizing.wanted < goal or not all_live:
        if not all_live:
            sizing.put_off(now)
        state.growing = 0
        yield from dismiss(run, Role.NEWCOMER)
        return 0
    if all(seat.stage is Stage.READY for seat in run.roster.of(Role.NEWCOMER)):
        state.growing = 0
        return goal
    return 0


def _newcomers(run: Run, state: Running, view: View) -> Generator[Command, None, bool]:
    """Have newcomers import what they need; return False if one of them is lost, or too late."""
    seats = run.roster.of(Role.NEWCOMER)
    if view.now >= state.deadline and any(seat.stage is not Stage.READY for seat in seats):
        yield without(f"it was not ready in {2 * run.setup_s:.0f} s")
        return False
    if lost := ailing(run, view, seats, (), "start"):
        yield without(lost.cause)
        return False
    for seat in seats:
        yield from warm(run, seat)
    # one that could not import has no process any more
    return all(seat.process is not None for seat in seats)


def without(cause: str) -> Tell:
    """Return the line about a new rank that is lost before any rank has paused for it."""
    return Tell(event=f"a new rank could not start, and the run goes on without it: {cause}")


def _tell_short(run: Run, view: View, room: int) -> Iterator[Command]:
    """Tell the user once, after some seconds, why requested ranks have no place."""
    wanted, scaling, told = run.sizing.wanted, run.rules.scaling, view.resources
    if room >= wanted or run.wanted_since[0] != wanted:
        run.wanted_since = (wanted, view.now)
    since = run.wanted_since[1]
    if since is None or view.now - since < NOTICE_AFTER_S or told is None:
        return
    run.wanted_since = (wanted, None)
    why = shortage(scaling, told.total, wanted)
    why = why or crowding(scaling, told.free, wanted - room) or "Ray gives no more."
    yield Tell(
        event=f"{wanted} ranks are asked for, and {room} have room: {why} The run goes on "
        "meanwhile, and grows when there is room."
    )
