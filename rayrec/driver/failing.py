"""What becomes of a run one of whose ranks failed, and how its survivors get ready.

A run recovers, or it ends with an error that names who failed first. Before it goes on, every
process must leave the world that failed; one that does not is ended.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import replace

from rayrec.driver.blame import Blame, Kind
from rayrec.driver.commands import Abort, At, Command, EndProcess, Log, Tell
from rayrec.driver.policies import LEAVE_S, answer, never_came_s, to_replace
from rayrec.driver.roster import Role, Seat, Stage, numbered
from rayrec.driver.run import Run
from rayrec.driver.states import Ended, Filling, Gathering
from rayrec.driver.views import Observation, Reply, View
from rayrec.train.progress import RankPoll


def failed(run: Run, view: View, blame: Blame) -> Iterator[Command]:
    """Recover from a failure, or end the run with it."""
    recovery = run.recovery
    if not blame.step:
        # ranks that had not begun again know of no step
        blame = replace(blame, step=run.progress.step)
    ranks = run.joint()
    if blame.kind == "died" and blame.rank < len(ranks):
        blame = replace(blame, preempted=ranks[blame.rank].node in run.preemption.since)
    rules = run.rules
    most = rules.max_failures, view.stops, rules.max_preemptions
    verdict = answer(blame, recovery.past, *most)
    # the other ranks would wait in a collective until its timeout
    yield from cut(run, ranks)
    if verdict == "fail":
        run.state = Ended(blame=blame, past=tuple(recovery.past))
        return
    yield Log(blame=blame)
    yield Tell(event=recovery.failed(blame, view.now))
    run.handed_over = False
    run.former, run.goes_back = (), False
    yield from dismiss(run, Role.LEAVER)
    where = "waiting for the other ranks to leave the world that failed"
    if recovery.pause_s > LEAVE_S:
        where += f", and {recovery.pause_s:.0f} s, since no step lies between the failures"
    yield At(where=where)
    run.state = Gathering()


def gather(run: Run, view: View) -> Iterator[Command]:
    """Have the survivors leave the failed world, and end the processes that do not in time."""
    state, ranks = run.state, run.roster.ranks
    assert isinstance(state, Gathering)
    if state.since is None:
        # callbacks that were told of the failure may have taken long meanwhile
        state.since = view.now
        # ranks that were lost together may be heard of one look apart
        return
    waited_s = view.now - state.since
    seen = [
        _away(run, one, seat) for one, seat in zip(run.observe(view, ranks), ranks, strict=True)
    ]
    lost, waiting = to_replace(seen, waited_s, run.recovery.past[-1].unmet)
    if waiting or waited_s < run.recovery.pause_s:
        # again and again: a rank may have opened connections since
        yield from cut(run, ranks)
        return
    for rank in lost:
        yield from end(ranks[rank])
    run.recovery.left(lost)
    run.state = Filling(since=view.now)


def _away(run: Run, seen: Observation, seat: Seat) -> Observation:
    """Return an observation in which a process outside of the failed world has left it.

    It is outside if it was in no world, or its task has ended, and it still answers.
    """
    polled = seen.poll is not None
    works = seat.stage is Stage.WORKING
    if seen.death or (works and (seen.poll is None or seen.poll.state == "running")):
        return seen
    last = run.recovery.past[-1]
    limit_s = run.silence_s if polled else never_came_s(run.silence_s)
    if last.is_mute and last.rank == seen.rank:
        # it must answer anew
        limit_s = LEAVE_S
    left = seen.poll or RankPoll(state="idle")
    return replace(seen, poll=left if seen.silent_s < limit_s else None)


def end(seat: Seat) -> Iterator[Command]:
    """End the process of a seat, which keeps its place."""
    if seat.process is not None:
        yield EndProcess(process=seat.process)
    seat.process = seat.address = None
    seat.stage = Stage.PLACED


def dismiss(run: Run, role: Role) -> Iterator[Command]:
    """Remove the seats of a role, and end their processes."""
    for seat in run.roster.of(role):
        run.roster.remove(seat)
        yield from end(seat)


def cut(run: Run, seats: Sequence[Seat]) -> Iterator[Command]:
    """Cut the connections of some seats, so that none hangs in a collective."""
    for process, _ in numbered(seats):
        yield Abort(process=process, generation=run.generation)


def ailing(
    run: Run, view: View, seats: Sequence[Seat], awaited: Collection[int], what: str
) -> Blame | None:
    """Return the blame for the first of some processes that failed before the ranks work.

    Args:
        seats: seats of one world, by rank.
        awaited: numbers of the calls that are waited for.
        what: verb phrase that completes "rank 1 could not ...", such as "start".
    """
    broken = {reply.process: reply for reply in view.replies if reply.call in awaited}
    for rank, seat in enumerate(seats):
        seen = view.processes.get(seat.process) if seat.process is not None else None
        if seat.process is None or seen is None:
            continue
        limit_s = run.silence_s if seen.is_awake else math.inf
        if seen.poll is None:
            limit_s = min(run.setup_s, never_came_s(run.silence_s))
        if (loss := seen.loss(run.rules.heartbeat_s, limit_s)) is not None:
            return _blame(rank, seat, *loss, what if seen.death else "")
        reply = broken.get(seat.process)
        if reply is not None and reply.cause:
            return _told(rank, seat, reply, what)
    return None


def late(
    run: Run, seats: Sequence[Seat], waiting: Collection[int], what: str
) -> Generator[Command, None, Blame]:
    """End the processes that did not answer in time, and return the blame for the first.

    One that still answers polls may hang in its call for good, and the next call would hang, too.

    Args:
        waiting: processes without an answer.
    """
    rank = next(rank for rank, seat in enumerate(seats) if seat.process in waiting)
    blame = _blame(rank, seats[rank], "silent", f"no answer in {run.setup_s:.0f} s", what)
    for seat in seats:
        if seat.process in waiting:
            yield from end(seat)
    return blame


def _blame(rank: int, seat: Seat, kind: Kind, cause: str, what: str) -> Blame:
    return Blame(rank=rank, host=seat.host, cause=cause, what=what, kind=kind)


def _told(rank: int, seat: Seat, reply: Reply, what: str) -> Blame:
    blame = _blame(rank, seat, "error", reply.cause, what)
    return replace(blame, traceback=reply.traceback, mistake=reply.mistake, final=reply.final)
