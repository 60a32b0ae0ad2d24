"""Pure decisions over what ranks say: the run goes on, is done, or failed; who failed first; and
whether the run recovers.

When a rank dies the others fail a moment later in a collective, and their error may reach the
driver first. So a symptom (an error that blames the other end of a connection) is held back for a
short grace in which the real cause can arrive: a dead actor beats an error of a rank's own, which
beats a symptom; among equals the earliest wins. A rank that says nothing at all for the heartbeat
timeout has failed, too. No Ray, no clock, no effects here: observations in, verdict out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from rayrec.driver.blame import Blame, silence
from rayrec.driver.views import Observation
from rayrec.train.rank_error import RankError

# a dead process is known after 10-30 ms, a dead node after about 2 s with fast health checks
GRACE_S = 3.0
# how long to wait, after a real cause, for an earlier one
COLLECT_S = 0.5
# how long survivors may take to leave a world that was cut
LEAVE_S = 5.0
# between two attempts to start a process that dies again and again
LONGEST_PAUSE_S = 60.0
# how long a new process may take to give its first answer
COMES_S = 60.0
# a symptom whose cause nobody told of may come again by chance, but not so often
MOST_SYMPTOMS = 3
# largest factor by which the heartbeat timeout is extended
MOST_PATIENCE = 8.0
# what one look counts at most: a driver that slept, or was in a callback, has seen no more of it
LONGEST_TURN_S = 2.0


def judge(
    ranks: Sequence[Observation],
    trouble_s: float,
    silent_limit_s: float = 30.0,
    heartbeat_s: float = math.inf,
) -> Blame | Literal["wait", "finish"]:
    """Decide from the last answers of all ranks: wait, finish, or fail for a cause.

    Args:
        ranks: one observation per rank.
        trouble_s: seconds since the driver first saw any failure; 0 when there is none.
        silent_limit_s: a rank that answers nothing for so long counts as hung once another rank has
            failed or all others ended.
        heartbeat_s: a rank that answers nothing for so long has failed in any case.
    """
    if not any(rank.has_failed and not rank.is_done for rank in ranks):
        frozen = [rank for rank in ranks if rank.silent_s >= heartbeat_s]
        if frozen:
            return _frozen(frozen, ranks)
        return "finish" if all(rank.is_done for rank in ranks) else "wait"
    own = [rank for rank in ranks if rank.death or rank.own_error]
    # When all ranks have failed, no further cause can arrive.
    settled = all(rank.has_failed for rank in ranks)
    if not settled and trouble_s < (COLLECT_S if own else GRACE_S):
        return "wait"
    return first_failure(ranks, silent_limit_s)


def answer(
    blame: Blame,
    past: Sequence[Blame],
    max_failures: int,
    stopping: bool = False,
    max_preemptions: int = -1,
) -> Literal["recover", "fail"]:
    """Decide if the run recovers from a failure or ends with it.

    Args:
        past: the failures that the run recovered from before.
        max_failures: number of failures that it may recover from; -1 for any number.
        max_preemptions: the same of ranks that were lost with nodes that were announced to go. A
            run that recovers from no failure recovers from none of these either.
        stopping: the run was asked to end anyway.
    """
    if blame.final or stopping:
        return "fail"
    alike = [old for old in past if old.preempted == blame.preempted and not old.needless]
    most = max_preemptions if blame.preempted else max_failures
    if max_failures == 0 or 0 <= most <= len(alike):
        return "fail"
    # A process may be killed twice at one step by chance; the same error twice is no chance.
    again = sum((old.words, old.step) == (blame.words, blame.step) for old in past)
    often = MOST_SYMPTOMS if blame.symptom else 1
    return "fail" if again >= often and blame.kind == "error" else "recover"


def patience(unanswered: int) -> float:
    """Return the factor by which the heartbeat timeout is extended after silent ranks.

    A process that starts makes a busy machine busier, so that the next one may seem lost as well.

    Args:
        unanswered: number of ranks lost to silence since the run last trained.
    """
    return min(MOST_PATIENCE, 2.0**unanswered)


def pause_s(deaths: int) -> float:
    """Seconds until a process is started again that has died so often without being ready."""
    return min(LONGEST_PAUSE_S, 2.0 ** (deaths - 1))


def never_came_s(heartbeat_s: float) -> float:
    """Return the seconds that a process may take to give its first answer.

    Ray makes it meanwhile, which a busy machine delays.
    """
    return max(COMES_S, 2 * heartbeat_s)


def to_replace(
    ranks: Sequence[Observation], waited_s: float, unmet: bool = False
) -> tuple[tuple[int, ...], bool]:
    """Return the ranks to replace now, and True if others are still in the world that failed.

    Ranks do not meet where one of them is lost, as the one that keeps their meeting place: the
    others are not at fault, and stay. Where none is, nothing tells which of those that did not meet
    is at fault, and all of them are replaced.

    Args:
        ranks: observations made after their connections were cut.
        waited_s: seconds since the connections were cut.
        unmet: the failure is that the ranks did not meet at the rendezvous.
    """
    replace = []
    waiting = False
    for rank in ranks:
        left = rank.poll is not None and rank.poll.state != "running"
        if rank.death or (not left and waited_s >= LEAVE_S):
            replace.append(rank.rank)
        elif not left:
            waiting = True
    if unmet and not replace and not waiting:
        replace = [rank.rank for rank in ranks if rank.error and rank.error.unmet]
    return tuple(replace), waiting


def first_failure(ranks: Sequence[Observation], silent_limit_s: float = 30.0) -> Blame:
    """Return the root cause among the failed ranks; at least one must have failed."""
    failed = [rank for rank in ranks if rank.has_failed]
    assert failed, "first_failure needs a failed rank"
    first = min(failed, key=_order)
    error = first.error
    if first.death:
        # A death says little of its reason; the error of another rank may tell it.
        told = [(rank.rank, error.cause) for rank in failed if (error := rank.own_error)]
        also = f"rank {told[0][0]} failed with {told[0][1]}" if told else ""
        return Blame(
            rank=first.rank,
            host=first.host,
            cause=first.death,
            step=_last_step(ranks),
            also=also,
            kind="died",
        )
    assert error is not None
    if error.collateral:
        # All failed ranks blame another one. A rank that is silent meanwhile is that other one.
        hung = [rank for rank in ranks if not rank.has_failed and rank.silent_s >= silent_limit_s]
        if hung:
            return _frozen(hung, ranks, f"; others then failed with {error.cause}")
        late = [rank for rank in ranks if not rank.has_failed]
        if len(late) == 1:
            return _late(late[0], ranks, error)
    return Blame(
        rank=first.rank,
        host=first.host,
        cause=error.cause,
        traceback=error.traceback,
        step=error.step,
        mistake=error.mistake,
        final=error.final,
        symptom=error.collateral,
        unmet=error.unmet,
    )


def _frozen(silent: Sequence[Observation], ranks: Sequence[Observation], more: str = "") -> Blame:
    """Blame the rank that has been silent for the longest time."""
    mute = max(silent, key=lambda rank: rank.silent_s)
    cause = silence(mute.silent_s) + more
    step = _last_step(ranks)
    return Blame(rank=mute.rank, host=mute.host, cause=cause, step=step, kind="silent")


def _late(late: Observation, ranks: Sequence[Observation], error: RankError) -> Blame:
    """Blame the straggler: the one rank without an error while all others waited for it."""
    doing = late.poll.phase or late.poll.state if late.poll is not None else "starting"
    return Blame(
        rank=late.rank,
        host=late.host,
        cause=f"it did not come to where the other ranks waited for it, and still is {doing}",
        step=_last_step(ranks),
        # its words differ each time, and the same failure at the same step ends a run
        also=f"others then failed with {error.cause}",
    )


def _order(rank: Observation) -> tuple[int, float, int]:
    error = rank.error
    # before errors: nothing that another rank says can explain a death, but a death explains what
    # others say
    if rank.death:
        return 0, rank.death_at, rank.rank
    assert error is not None
    return (2 if error.collateral else 1), error.at, rank.rank


def _last_step(ranks: Sequence[Observation]) -> int:
    """Return the last step that a silent rank had finished.

    Its own last answer may be half a second old, many steps ago. All ranks finish each step
    together, so the farthest that any of them has told of is true of all, or one step too far.
    """
    told = [rank.poll.step for rank in ranks if rank.poll is not None]
    told += [rank.error.step for rank in ranks if rank.error is not None]
    return max(told, default=0)
