"""The start of a task on all ranks: they take it, meet at a place that rank 0 makes, and begin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rayrec.driver.commands import At, Begin, Call, Command, Tell, Which
from rayrec.driver.failing import ailing, failed, late
from rayrec.driver.roster import Seat, Stage, numbered
from rayrec.driver.run import Run
from rayrec.driver.states import Handing, Running, Starting
from rayrec.driver.views import View
from rayrec.train.events import Milestone
from rayrec.train.seat import Seat as RankSeat
from rayrec.train.seat import places_on_machines

_WHAT = {"take": "start", "store": "make the rendezvous", "begin": "start"}


def take(run: Run, view: View, *, first: bool) -> Iterator[Command]:
    """Have the ranks take a task: the one in which they pass tables on, or the one after it."""
    where = "starting the ranks, which import torch"
    if first:
        where = "passing tables on to the ranks that follow"
    yield At(where=where)
    # All of them have imported what they need before any waits for the others.
    run.state = Starting(first=first, verb="take", deadline=view.now + run.setup_s)
    yield from _call(run, run.state, _world(run, run.state))


def start(run: Run, view: View) -> Iterator[Command]:
    """Have the ranks begin a task, one part after the other, each within a bound."""
    state = run.state
    assert isinstance(state, Starting)
    world = _world(run, state)
    blame = ailing(run, view, world, state.calls, _WHAT[state.verb])
    port = 0
    for reply in view.replies:
        if reply.call in state.calls and not reply.cause:
            del state.calls[reply.call]
            port = reply.value if isinstance(reply.value, int) else 0
    if blame is None and state.calls and view.now >= state.deadline:
        blame = yield from late(run, world, set(state.calls.values()), _WHAT[state.verb])
    if blame is not None:
        yield from failed(run, view, blame)
    elif state.calls:
        return
    elif state.verb == "take":
        state.verb, state.deadline = "store", view.now + run.setup_s
        yield from _call(run, state, world[:1])
    elif state.verb == "store":
        state.verb, state.deadline = "begin", view.now + run.setup_s
        yield from _begin(run, state, world, port)
    elif state.first:
        run.state = Handing()
    else:
        run.sizing.start()
        yield Tell(event=Milestone("torch on the ranks", at=view.wall))
        run.state, run.handed_over = Running(at_stake=run.handed_over), False


def _world(run: Run, state: Starting) -> list[Seat]:
    return run.joint() if state.first else run.roster.ranks


def _call(run: Run, state: Starting, seats: Sequence[Seat]) -> Iterator[Command]:
    for process, seat in numbered(seats):
        call = next(run.calls)
        state.calls[call] = process
        which: Which = "first" if state.first else "main"
        yield Call(process=process, call=call, verb=state.verb, which=which, host=seat.host)


def _begin(run: Run, state: Starting, world: Sequence[Seat], port: int) -> Iterator[Command]:
    """Have the ranks begin, all at one meeting place."""
    rules, scaling = run.rules, run.rules.scaling
    # Names in the rendezvous carry the generation, so that a second task does not read the first
    # one's.
    run.generation += 1
    addresses = [seat.address for seat in world if seat.address is not None]
    pin = places_on_machines(addresses)
    for rank, (process, seat) in enumerate(numbered(world)):
        seat.stage = Stage.WORKING
        call = next(run.calls)
        state.calls[call] = process
        rank_seat = RankSeat(
            rank=rank,
            world_size=len(world),
            host=addresses[rank].host,
            store_host=addresses[0].host,
            store_port=port,
            # tables that are handed over are on the CPU
            device="cpu" if state.first else scaling.device,
            threads=scaling.threads,
            pin=pin[rank] if scaling.pin_cores else None,
            timeout_s=rules.timeout_s,
            generation=run.generation,
        )
        yield Begin(process=process, call=call, seat=rank_seat)
