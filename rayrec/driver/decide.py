"""`decide`: from a run and a view of its cluster to the run's next state and its commands.

    while not run.has_ended:
        view = cluster.look()
        commands = decide(run, view)
        cluster.do(commands)

No Ray, no clock and no I/O: every time is in the view, and what shall happen is in the commands. So
a simulated cluster drives this very function through thousands of schedules, and a log of views can
be replayed. Each state has a function that changes the run and yields commands. The seats of ranks
are filled in `filling`, tasks are started in `starting`; ranks at work are watched in `running`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rayrec.driver.commands import Command, Need, Tell
from rayrec.driver.failing import failed, gather
from rayrec.driver.filling import ask, fill
from rayrec.driver.policies import LONGEST_TURN_S
from rayrec.driver.roster import Role, Stage
from rayrec.driver.run import Run
from rayrec.driver.running import hand_over, watch, without
from rayrec.driver.sizing import LOOK_S
from rayrec.driver.spares import lose
from rayrec.driver.starting import start, take
from rayrec.driver.states import (
    FOLLOWS,
    Ended,
    Filling,
    Gathering,
    Handing,
    Planning,
    Running,
    Starting,
    put_off,
)
from rayrec.driver.views import View
from rayrec.driver.waiting import stopped
from rayrec.train.events import Milestone


def decide(run: Run, view: View) -> list[Command]:
    """Return the commands that follow from a view; `run` is changed in place."""
    before = run.state
    run.hurries = False
    # what was answered meanwhile may be heard of one look later
    put_off(before, max(0.0, view.now - run.looked_at - LONGEST_TURN_S))
    run.looked_at = view.now
    commands = list(_decide(run, view))
    run.needs = needs(run, view)
    if run.state is not before:
        assert type(run.state) in FOLLOWS[type(before)], (before, run.state)
        run.hurries = True
    return commands


def _decide(run: Run, view: View) -> Iterator[Command]:
    if view.wish is not None:
        run.sizing.ask(view.wish)
    yield from _hear(run, view)
    if view.signal is not None and _obeys_at_once(run):
        run.state = stopped(run, view)
        return
    act = _ACTS.get(type(run.state))
    if act is not None:
        yield from act(run, view)


def needs(run: Run, view: View) -> frozenset[Need]:
    """Return what the next look shall ask the head of the cluster."""
    if isinstance(run.state, Filling):
        return frozenset({"rooms", "resources"})
    is_due = view.now - run.asked_at >= LOOK_S
    if not isinstance(run.state, Running) or not run.rules.resizes or not is_due:
        return frozenset()
    run.asked_at = view.now
    is_short = run.short_s or run.sizing.asked
    return frozenset({"rooms", "resources"} if is_short else {"rooms"})


def _obeys_at_once(run: Run) -> bool:
    """Return True if a signal ends the run now, since nothing has to be saved."""
    if isinstance(run.state, Running):
        return not run.rules.obeys_stop
    # ranks that keep tables which nobody has saved stop later
    return not run.handed_over


def _hear(run: Run, view: View) -> Iterator[Command]:
    """Take the answers of processes into their seats."""
    for reply in view.replies:
        seat = run.roster.at(reply.process)
        if seat is None:
            continue
        waits = seat.role in (Role.SPARE, Role.NEWCOMER)
        if reply.verb == "describe" and not isinstance(reply.value, int | None):
            seat.address, seat.node = reply.value, reply.value.node_id
            if seat.role is Role.RANK:
                seat.stage = Stage.READY
        elif reply.verb in ("describe", "warm") and waits and reply.cause:
            if seat.role is Role.NEWCOMER:
                yield without(reply.cause)
            yield from lose(seat, view.now)
        elif reply.verb == "warm" and waits:
            seat.stage, seat.deaths = Stage.READY, 0


def _plan(run: Run, view: View) -> Iterator[Command]:
    """Take the outcome of the driver's plan for the ranks."""
    planned, ranks = view.planned, run.roster.ranks
    if planned is None:
        return
    if planned.failed is not None:
        yield from failed(run, view, planned.failed)
    elif planned.given_up:
        run.state = stopped(run, view)
    elif planned.refused:
        # the ranks are as they were, and their tables are still there
        keeps = run.sizing.call_off(len(ranks)) if run.former and not run.goes_back else 0
        run.goes_back = bool(keeps)
        if keeps:
            why = f"cannot go on with {len(ranks)} ranks, and keeps its {keeps}: {planned.refused}"
            yield Tell(event=why)
            run.state = Filling(since=view.now)
        else:
            run.state = Ended(error=planned.error)
    elif not planned.has_task:
        # Only a plan was wanted: the ranks had to exist for it, and have nothing to run.
        run.state = Ended()
    else:
        yield Tell(event=Milestone("plan", at=view.wall))
        yield from ask(run, view, run.sizing.wanted)
        yield from take(run, view, first=planned.has_first)


_ACTS: Mapping[type[Any], Callable[[Run, View], Iterator[Command]]] = {
    Filling: fill,
    Planning: _plan,
    Starting: start,
    Handing: hand_over,
    Running: watch,
    Gathering: gather,
}
