"""Spare ranks: their upkeep beside the ranks, and the choice of a spare for each lost rank.

A spare is a process of a rank that has imported torch and waits for a rank to be lost. It holds
room on the cluster as a rank does. On the node of the lost rank it changes nothing but the process,
so the run goes on with the same plan, and with what the node keeps in memory. On another node it is
taken only where the lost rank's node is gone, since the ranks then lie otherwise on the nodes.

Every spare asks the cluster for a place of its own, near the ranks. Its process is made once the
ranks train, so that it slows neither their start nor a recovery. When it takes the place of a lost
rank, the two swap places: the rank goes on where the spare was, and a new spare begins where the
rank was. A spare that dies, or that gives no answer, is replaced and nothing is said of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from rayrec.driver.commands import Ask, Call, Command, Tell
from rayrec.driver.failing import end
from rayrec.driver.placement import NOTICE_AFTER_S, amounts_of
from rayrec.driver.policies import pause_s
from rayrec.driver.roster import Place, Role, Seat, Stage
from rayrec.driver.run import Run
from rayrec.driver.sizing import LOOK_S
from rayrec.driver.views import View

# a spare that waits answers so often; it hardly wakes for it
BEAT_S = 5.0
# places that are asked for at a time: each is a question at every look
MOST_ASKED = 8

# the best first; also without a process, a place saves the wait for one
_USEFUL = (Stage.READY, Stage.WARMING, Stage.STARTING, Stage.PLACED)


def substitutes(
    lost: Mapping[int, str],
    spares: Sequence[Seat],
    alive: Collection[str],
    busy: Collection[str],
    *,
    roam: bool,
) -> dict[int, int]:
    """Return the number of the spare that replaces each lost rank; a rank may get none.

    Args:
        lost: ranks without a process, and the node that each one was on.
        spares: spares that are alive.
        alive: nodes that live. busy: nodes with ranks that live.
        roam: a spare of another node may serve where the lost rank's node is gone.
    """
    free = dict(enumerate(spares))
    chosen: dict[int, int] = {}
    # A rank whose node lives can only use the spares there, so it comes before the others.
    for rank in sorted(lost, key=lambda rank: (lost[rank] not in alive, rank)):
        node = lost[rank]
        if node in alive:
            fit = [n for n, s in free.items() if s.node == node and s.stage is not Stage.PLACED]
        else:
            fit = [n for n, s in free.items() if roam and s.node in alive]
        fit = [n for n in fit if free[n].stage in _USEFUL]
        if fit:
            # A node without ranks comes first: the ranks may then be spread as before.
            best = min(fit, key=lambda n: (_USEFUL.index(free[n].stage), free[n].node in busy))
            chosen[rank] = best
            del free[best]
    return chosen


def home(ranks: Sequence[str], spares: Sequence[str]) -> str:
    """Return the node for the next spare: the one with the most ranks for each of its spares.

    Args:
        ranks: the node of every rank. spares: the nodes that earlier spares are wanted on.
    """
    return max(dict.fromkeys(ranks), key=lambda node: ranks.count(node) / (1 + spares.count(node)))


def relieve(run: Run, view: View, mute: Collection[int]) -> set[int]:
    """Replace lost ranks by spares, and return the ranks that got the process of a spare.

    A rank whose node is gone may also get the room of a spare that has no process.

    Args:
        mute: processes of spares that gave no sign of life.
    """
    ranks, spares = run.roster.ranks, run.roster.of(Role.SPARE)
    usable = [s for s in spares if s.process not in mute]
    lost = {rank: seat.node for rank, seat in enumerate(ranks) if seat.process is None}
    alive = view.rooms.alive if view.rooms is not None else frozenset(s.node for s in ranks)
    chosen = substitutes(
        lost,
        usable,
        alive,
        {seat.node for rank, seat in enumerate(ranks) if rank not in lost},
        roam=not run.rules.scaling.placement_strategy.startswith("STRICT"),
    )
    relieved = set()
    for rank, number in chosen.items():
        if usable[number].process is not None:
            relieved.add(rank)
        ranks[rank].take(usable[number])
    return relieved


def keep(run: Run, view: View) -> Iterator[Command]:
    """Keep the spares up beside ranks that train; called about every `LOOK_S` seconds."""
    roster, wanted = run.roster, run.rules.scaling.spares
    spares = roster.of(Role.SPARE)
    waiting = sum(seat.stage is Stage.ASKED for seat in spares)
    near, nodes = [seat.near for seat in spares], [seat.node for seat in roster.ranks]
    for _ in range(min(wanted - len(spares), MOST_ASKED - waiting)):
        near.append(home(nodes, near))
        group = roster.new_group()
        place = Place(group, 0)
        roster.seats.append(Seat(role=Role.SPARE, place=place, near=near[-1]))
        yield Ask(group=group, strategy="STRICT_PACK", near=near[-1])
    yield from review(run, view)
    for seat in roster.of(Role.SPARE):
        if seat.stage is Stage.PLACED and view.now >= seat.not_before:
            yield run.start_process(seat)
        else:
            yield from warm(run, seat)
    yield from _tell_shortage(run, view)


def review(run: Run, view: View) -> Iterator[Command]:
    """Follow the places of spares without a process, and give up the processes that are lost."""
    nodes: Mapping[Place, str] = view.rooms.nodes if view.rooms is not None else {}
    for seat in run.roster.of(Role.SPARE):
        if seat.process is None:
            seat.node = nodes.get(seat.place, "")
            seat.stage = Stage.PLACED if seat.node else Stage.ASKED
        elif (seen := view.processes.get(seat.process)) is not None:
            ready = seat.stage is Stage.READY
            limit_s = BEAT_S + run.rules.heartbeat_s if ready else run.rules.setup_timeout_s
            if seen.loss(run.rules.heartbeat_s, limit_s) is not None:
                yield from lose(seat, view.now)


def warm(run: Run, seat: Seat) -> Iterator[Command]:
    """Have the process of a seat import what a task needs, once it has come up."""
    if seat.is_up and seat.stage is Stage.STARTING and seat.process is not None:
        seat.stage = Stage.WARMING
        yield Call(process=seat.process, call=next(run.calls), verb="warm")


def lose(seat: Seat, now: float) -> Iterator[Command]:
    """End the process of a spare, which gets another one after a pause."""
    seat.deaths += 1
    seat.not_before = now + pause_s(seat.deaths)
    yield from end(seat)


def _tell_shortage(run: Run, view: View) -> Iterator[Command]:
    """Tell the user once that spares have no room, which the run does not wait for."""
    if run.short_s is None:
        return
    spares, scaling = run.roster.of(Role.SPARE), run.rules.scaling
    short = scaling.spares - sum(seat.stage is not Stage.ASKED for seat in spares)
    # seconds in which the driver slept are none of them
    run.short_s = run.short_s + LOOK_S if short else 0.0
    if run.short_s < NOTICE_AFTER_S or view.resources is None:
        return
    run.short_s = None
    nodes = view.resources.free
    free = {name: sum(node.get(name, 0.0) for node in nodes) for name in scaling.bundle}
    yield Tell(
        event=f"no room for {short} of {scaling.spares} spares of "
        f"{amounts_of(scaling.bundle, scaling.bundle)} each (free now: "
        f"{amounts_of(scaling.bundle, free)}); the run goes on without, and takes the room when it "
        "comes"
    )
