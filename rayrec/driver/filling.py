"""Seats of the ranks: how many there are, at which places, and the processes in them.

One way fills them at the start, after a failure and after a pause. A run of one number of ranks is
one whose smallest and largest numbers are the same; its lost ranks may be replaced by spares.
"""

from __future__ import annotations

from collections.abc import Iterator

from rayrec.driver.commands import Ask, At, Call, Command, EndProcess, GiveBack, Plan, Tell
from rayrec.driver.failing import ailing, end, failed, late
from rayrec.driver.placement import too_much
from rayrec.driver.roster import BASE, Place, Role, Stage, choose, numbered, surplus
from rayrec.driver.run import Run
from rayrec.driver.sizing import seats
from rayrec.driver.spares import relieve, review
from rayrec.driver.states import Ended, Filling, Planning
from rayrec.driver.views import View
from rayrec.driver.waiting import shrink_after_s, stop, wait, waiting_since
from rayrec.errors import ConfigError
from rayrec.train.events import Milestone

# how long a run waits at its start for one more place than it has
SETTLE_S = 2.0
# how long a spare may take to show that it lives, before it takes a place
PROBE_S = 0.5
# places that are asked for beyond those that ranks hold: each is a question at every look
MOST_ASKED = 128


def fill(run: Run, view: View) -> Iterator[Command]:
    """Give a place and a process to every rank that has none."""
    state = run.state
    assert isinstance(state, Filling)
    if state.deadline is not None:
        yield from _await(run, state, view)
        return
    keeps = run.joint() if run.handed_over and not run.goes_back else []
    if lost := ailing(run, view, keeps, (), "pass tables on"):
        # some tables are lost with it, whoever gets a place
        yield from failed(run, view, lost)
    elif not run.roster.groups:
        yield from _begin(run, state, view)
    elif run.roster.of(Role.SPARE) and run.recovery.under_way and not state.probed:
        yield from _probe(run, state, view)
    elif (places := _places(run, state, view)) is not None:
        yield from _seat(run, state, view, places)
    else:
        # a spare may have been busy, and the head need not answer to look at it again
        state.probed = False
    if view.stops and run.state is state and state.deadline is None:
        stop(run, state, view)


def ask(run: Run, view: View, ranks: int) -> Iterator[Command]:
    """Ask the cluster for places for `ranks` ranks in all, and give surplus places back.

    Single places stand in for those that no rank can have.
    """
    roster, rooms = run.roster, view.rooms
    spares = {seat.place.group for seat in roster.of(Role.SPARE)}
    single = [group for group in roster.groups if group not in (BASE, *spares)]
    nodes = rooms.nodes if rooms is not None else {}
    draining = {p.group for p, node in nodes.items() if rooms and node in rooms.draining}
    taken = [seat.place for seat in roster.of(Role.RANK, Role.LEAVER, Role.NEWCOMER)]
    wanted = ranks + _lacking(run, view) - run.rules.scaling.least
    back, more = surplus(single, taken, draining, wanted, MOST_ASKED)
    for group in back:
        roster.groups.remove(group)
        yield GiveBack(group=group)
    for _ in range(more):
        yield Ask(group=roster.new_group())


def there(run: Run, view: View) -> list[Place]:
    """Return the places for ranks that exist; those of the smallest number of ranks come first.

    Nodes that will go have none, where the number of ranks may change.
    """
    assert view.rooms is not None
    nodes = view.rooms.nodes
    if run.rules.scaling.is_elastic:
        nodes = {p: node for p, node in nodes.items() if node not in view.rooms.draining}
    spares = {seat.place for seat in run.roster.of(Role.SPARE)}
    # what the head told last may hold places that were given back since
    groups = set(run.roster.groups)
    return sorted(place for place in nodes if place.group in groups and place not in spares)


def _lacking(run: Run, view: View) -> int:
    """Return the number of places that lie on nodes which will go, of the first group or of ranks.

    Ray itself asks anew for what the first group lost, together or not at all: with single places
    for them an autoscaler would bring two nodes for one.
    """
    rooms = view.rooms
    if not run.rules.scaling.is_elastic or rooms is None:
        return 0
    going = rooms.nodes.keys() - there(run, view)
    return sum(place.group == BASE or place in run.places for place in going)


def _begin(run: Run, state: Filling, view: View) -> Iterator[Command]:
    """Ask for the first places, or refuse ranks that can never have them."""
    scaling, told = run.rules.scaling, view.resources
    state.since = state.since or view.now
    yield At(where="waiting for room on the cluster", patient=True)
    if told is None:
        return
    if why := too_much(scaling, told.total, run.rules.cluster):
        run.state = Ended(error=ConfigError(why))
        return
    group = run.roster.new_group()
    assert group == BASE
    yield Ask(group=BASE, bundles=scaling.least, strategy=scaling.placement_strategy)
    # what was said before knows of no place
    run.state = Filling(since=view.now)


def _probe(run: Run, state: Filling, view: View) -> Iterator[Command]:
    """Ask ready spares for a sign of life; have those that give one replace lost ranks."""
    roster = run.roster
    yield from review(run, view)
    if state.probing_until is None:
        state.probing_until = view.now + PROBE_S
        for seat in roster.of(Role.SPARE):
            if seat.stage is Stage.READY and seat.process is not None:
                call = next(run.calls)
                state.calls[call] = seat.process
                yield Call(process=seat.process, call=call, verb="probe")
    for reply in view.replies:
        if not reply.cause:
            state.calls.pop(reply.call, None)
    if not state.calls or view.now >= state.probing_until:
        mute = set(state.calls.values())
        state.calls.clear()
        state.probed, state.probing_until = True, None
        state.relieved |= relieve(run, view, mute)
        run.recovery.went(state.relieved, "relieved")


def _places(run: Run, state: Filling, view: View) -> list[Place] | None:
    """Return the places that ranks may have, or None while nobody knows them."""
    ranks, held = run.roster.ranks, list[Place]()
    if not run.rules.scaling.is_elastic or (run.handed_over and view.stops):
        # processes that live keep their places, whatever the cluster says of them
        held = [seat.place for seat in run.joint() if seat.process is not None]
        if len(held) >= run.rules.scaling.least:
            return held
    # places that were told of before may be lost with the rank
    if view.rooms is None or view.rooms.asked_at < state.since:
        return None
    found = held + [place for place in there(run, view) if place not in held]
    if len(found) < run.rules.scaling.least:
        # ranks leave no node that will go while fewer than the smallest number have a place
        # elsewhere
        nodes = view.rooms.nodes
        stay = [s.place for s in ranks if s.is_up and s.place in nodes and s.place not in found]
        run.sizing.leaving = () if stay else run.sizing.leaving
        found += stay
    return found


def _seat(run: Run, state: Filling, view: View, places: list[Place]) -> Iterator[Command]:
    """Choose the number of ranks and their places; wait while places are missing."""
    scaling, roster, sizing = run.rules.scaling, run.roster, run.sizing
    former = len(run.former) if run.goes_back else len(roster.ranks)
    ranks = former or scaling.least
    if not roster.ranks and len(places) >= scaling.least:
        # the smallest number of ranks has its places, so that further ones take none of them
        if len(roster.groups) == 1:
            yield from ask(run, view, scaling.most)
        if not _settled(run, state, view, len(places)):
            return
    since = waiting_since(state, view)
    wanted = len(run.former) if run.goes_back else sizing.wanted
    # a run that leaves a node in time does not stand still for another one, nor one that is to end
    at_once = len(places) >= ranks or sizing.leaving or view.stops
    shrink_s = 0.0 if at_once else shrink_after_s(run, view, ranks)
    found = seats(ranks, wanted, scaling.least, len(places), view.now - since, shrink_s)
    if found is None:
        nodes = view.rooms.nodes if view.rooms is not None else {}
        given = sum(place.group == BASE for place in nodes)
        asked = roster.ranks or given == scaling.least or len(roster.groups) > 1
        if scaling.is_elastic and asked:
            # no rank works until there are more places, and single ones come sooner than those that
            # Ray asks anew; so they leave nodes that will go even where the first group is lost
            yield from ask(run, view, wanted + scaling.least - given)
        # a spare may have been busy, or the lost node counted as alive
        state.probed = False
        yield from wait(run, state, view, len(places), ranks)
        return
    chosen = choose(places, run.former if run.goes_back else run.places, found)
    state.room_since, state.is_told = None, False
    first, lost = not roster.ranks, {r for r, seat in enumerate(roster.ranks) if not seat.is_up}
    for seat in roster.of(Role.NEWCOMER):
        if ailing(run, view, [seat], (), "start"):
            # no rank has worked with it yet, so its seat gets another process
            yield from end(seat)
    gone, unused = roster.reseat(chosen, keep=run.handed_over)
    for process in unused:
        yield EndProcess(process=process)
    if run.recovery.under_way:
        # a rank whose place is another one now has not left the run
        dropped = set(sorted(lost & set(gone))[: max(0, ranks - len(chosen))])
        run.recovery.went(dropped, "dropped")
        state.replaced = lost - dropped - state.relieved
    # those that stood before a change are needed again where no plan is found after it
    yield from ask(run, view, max(wanted, len(run.former)))
    if first and len(chosen) < scaling.most:
        yield Tell(
            event=f"starts with {len(chosen)} of at most {scaling.most} ranks; the cluster is "
            "asked for the rest"
        )
    yield At(where="starting the ranks' actors")
    for seat in roster.ranks:
        if seat.process is None:
            yield run.start_process(seat)
    state.deadline = view.now + run.setup_s


def _await(run: Run, state: Filling, view: View) -> Iterator[Command]:
    """Wait until all processes have come up."""
    roster = run.roster
    ranks = roster.ranks
    assert state.deadline is not None
    if view.rooms is not None and view.rooms.asked_at > state.since:
        known = there(run, view)
        lost = [seat for seat in ranks if not seat.is_up and seat.place not in known]
        if lost:
            for seat in lost:
                yield from end(seat)
            run.state = Filling(since=view.now)
            return
    calls = {reply.call for reply in view.replies if reply.verb == "describe"}
    blame = ailing(run, view, ranks, calls, "start")
    waiting = {seat.process for seat in ranks if not seat.is_up and seat.process is not None}
    if blame is None and waiting and view.now >= state.deadline:
        blame = yield from late(run, ranks, waiting, "start")
    if blame is not None:
        yield from failed(run, view, blame)
    elif not waiting:
        if not run.generation or not roster.are_neighbours:
            roster.sort(run.rules.here)
        if run.recovery.under_way:
            run.recovery.went(state.replaced, "replaced")
        yield Tell(event=Milestone("actors", at=view.wall))
        yield At(where="planning")
        processes = tuple(process for process, _ in numbered(roster.ranks))
        yield Plan(processes=processes, handed_over=run.handed_over)
        run.state = Planning()


def _settled(run: Run, state: Filling, view: View, room: int) -> bool:
    """Return True once all places that were asked for are there, or no more seem to come."""
    if room > state.room:
        state.room, state.grew_at = room, view.now
    return room >= run.rules.scaling.most or view.now >= state.grew_at + SETTLE_S
