"""The rules of recovery: verdicts, counters, and what is replaced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rayrec.driver.blame import Blame
from rayrec.driver.policies import GRACE_S, LEAVE_S, answer, judge, to_replace
from rayrec.driver.recovery import Recovery
from rayrec.driver.views import Observation
from rayrec.errors import CallbackError, ConfigError, InputError, JoinError, SaveError
from rayrec.shards.undo import Point, common_point
from rayrec.train.events import Began
from rayrec.train.progress import RankPoll
from rayrec.train.rank_error import RankError

HEARTBEAT_S = 10.0


def blame(cause: str = "ValueError: x", step: int = 3, **more: object) -> Blame:
    return Blame(rank=1, host="h", cause=cause, step=step, **more)  # type: ignore[arg-type]


def test_the_number_of_failures_is_the_bound() -> None:
    past = [blame(step=1), blame(step=2)]
    assert answer(blame(), past, 3) == "recover"
    assert answer(blame(), past, 2) == "fail"
    assert answer(blame(), [], 0) == "fail"
    assert answer(blame(), past * 50, -1) == "recover"


def test_preemptions_have_a_bound_of_their_own() -> None:
    lost = blame("its node died", kind="died", preempted=True)
    assert answer(lost, [blame(step=1)] * 3, 3, max_preemptions=1) == "recover"
    assert answer(blame(), [lost] * 3, 1) == "recover", "they count as no failures"
    assert answer(lost, [lost], -1, max_preemptions=1) == "fail"
    assert answer(lost, [], 0) == "fail", "the run recovers from nothing"


def test_what_would_fail_again_is_not_tried_again() -> None:
    assert answer(blame(final=True), [], -1) == "fail"
    assert answer(blame(), [blame(), blame(step=9)], -1) == "fail", "the same error, the same step"
    assert answer(blame("OSError: y"), [blame()], -1) == "recover"
    killed = blame("its process died", kind="died")
    assert answer(killed, [killed], -1) == "recover", "two kills at one step are a chance"
    assert answer(killed, [], -1, stopping=True) == "fail"


def test_an_error_is_known_again_by_its_words_without_what_varies() -> None:
    told = [
        (
            "no peer at /rayrec/2/1//cpu//0/0 after 60 s",
            "no peer at /rayrec/3/0//cpu//0/1 after 60 s",
        ),
        ("closed by peer [127.0.0.1]:4471", "closed by peer [127.0.0.1]:39122"),
        ("no rendezvous at 10.0.0.7:4471", "no rendezvous at 10.0.0.8:33"),
        (
            "rank 0 of 2 could not join: reset by [::1]:77",
            "rank 1 of 2 could not join: reset by [::1]:8",
        ),
    ]
    for one, other in told:
        assert blame(one).words == blame(other).words
        assert answer(blame(one), [blame(other)], -1) == "fail"
    assert answer(blame("KeyError: 12"), [blame("KeyError: 15")], -1) == "recover", "another error"
    gone = [blame(one, symptom=True) for one, _ in told[:1] * 4]
    assert [answer(gone[0], gone[:n], -1) for n in (1, 2, 3)] == ["recover", "recover", "fail"]


def test_a_false_alarm_is_not_counted_and_makes_patient() -> None:
    recovery = Recovery()
    for times in (1.0, 2.0, 4.0, 8.0, 8.0):
        assert recovery.patience == times
        recovery.failed(blame("no answer for 9 s", kind="silent"), 1.0)
        recovery.left([])
    assert answer(blame(), recovery.past, 1) == "recover", "rank 1 was alive each time"
    recovery.failed(blame("no answer for 9 s", kind="silent"), 1.0)
    recovery.left([1])
    assert answer(blame(), recovery.past, 1) == "fail", "it was replaced"
    recovery.began(Began(step=3, path=None), 2.0)
    assert recovery.patience == 1.0, "the run trains again"


def test_ranks_that_fail_again_and_again_start_less_often() -> None:
    recovery = Recovery()
    pauses = []
    for _ in range(11):
        recovery.failed(blame("its process died", kind="died"), 1.0)
        pauses.append(recovery.pause_s)
    assert pauses == [0, 0, 0, 1, 2, 4, 8, 16, 32, 60, 60]
    recovery.began(Began(step=3, path=None), 2.0)
    assert recovery.pause_s == 0


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (ConfigError("x"), True),
        (InputError("x"), True),
        (CallbackError("x"), True),
        (SaveError("the disk is full"), False),
        (ValueError("x"), False),
    ],
)
def test_an_error_knows_whether_the_user_is_to_blame(error: Exception, final: bool) -> None:
    assert RankError.of(error, 3).final is final


def test_a_frozen_rank_is_found_by_its_silence_alone() -> None:
    ranks = [
        Observation(rank=0, host="h", poll=RankPoll(state="running", step=7), silent_s=0.4),
        Observation(rank=1, host="h", poll=RankPoll(state="running", step=6), silent_s=9.9),
    ]
    assert judge(ranks, 0.0, 5.0, HEARTBEAT_S) == "wait"
    ranks[1] = replace(ranks[1], silent_s=10.0)
    failure = judge(ranks, 0.0, 5.0, HEARTBEAT_S)
    assert isinstance(failure, Blame)
    assert (failure.rank, failure.kind, failure.step) == (1, "silent", 7)


def test_who_is_replaced() -> None:
    left = Observation(rank=0, host="h", poll=RankPoll(state="failed"))
    dead = Observation(rank=1, host="h", death="gone")
    busy = Observation(rank=2, host="h", poll=RankPoll(state="running"))
    mute = Observation(rank=3, host="h")
    ranks = [left, dead, busy, mute]
    assert to_replace(ranks, 0.2) == ((1,), True)
    assert to_replace(ranks, LEAVE_S) == ((1, 2, 3), False)


def test_who_is_replaced_where_ranks_do_not_meet() -> None:
    error = RankError.of(JoinError("no rendezvous"), 0)
    unmet = [
        Observation(rank=rank, host="h", poll=RankPoll(state="failed", error=error))
        for rank in range(3)
    ]
    failure = judge(unmet, GRACE_S)
    assert isinstance(failure, Blame) and failure.unmet and failure.symptom
    assert to_replace(unmet, 0.2, failure.unmet) == ((0, 1, 2), False), "nothing tells whose fault"
    assert to_replace(unmet, 0.2) == ((), False), "their meeting was cut for another reason"
    dead = Observation(rank=0, host="h", death="gone")
    failure = judge([dead, *unmet[1:]], GRACE_S)
    assert isinstance(failure, Blame) and not failure.unmet and failure.kind == "died"
    assert to_replace([dead, *unmet[1:]], 0.2, True) == ((0,), False), "it kept the meeting place"
    mute = Observation(rank=2, host="h")
    assert to_replace([*unmet[:2], mute], 0.2, True) == ((), True)
    assert to_replace([*unmet[:2], mute], LEAVE_S, True) == ((2,), False)


def test_what_a_failure_cost() -> None:
    recovery = Recovery()
    assert recovery.began(Began(step=0, path=None), 0.0) == ()
    recovery.failed(replace(blame(step=12), kind="died"), 10.0)
    assert recovery.under_way
    recovery.went([1], "replaced")
    # a second failure comes before the run began again
    recovery.failed(replace(blame(step=0), rank=0), 11.0)
    first, second = recovery.began(Began(step=10, path="p"), 13.5)
    assert (first.seconds, second.seconds) == (3.5, 2.5)
    assert first.replaced and not second.replaced
    recovery.at_step(12, 14.0)
    assert recovery.seconds_lost == 0, "step 12 was done before"
    recovery.at_step(13, 14.5)
    recovery.at_step(14, 15.0)
    assert (len(recovery.past), recovery.recoveries, recovery.seconds_lost) == (2, 1, 4.5)
    assert str(first) == (
        "rank 1 on h lost (ValueError: x) at step 12; replaced in 3.5 s; went on from step 10"
    )
    # the driver had not heard of a step of the second one, which had done ten at least
    assert "rank 0 on h failed (ValueError: x) at step 10; all ranks" in str(second)
    assert "began again" in str(replace(first, path=None, step=0))


def test_the_point_that_all_have_is_where_a_run_goes_on() -> None:
    a, b, c = Point(7, 10), Point(7, 20), Point(8, 20)
    assert common_point([[a, b], [b, a]]) == b
    assert common_point([[a, b], [a]]) == a, "one died before it came to the second"
    assert common_point([[a, b], [a]], not_before=11) is None, "a checkpoint is newer"
    assert common_point([[a, b], [a]], not_before=10) == a
    assert common_point([[b], [c]]) is None, "the same step of another past"
    assert common_point([[b], []]) is None, "its host is gone"


def test_what_goes_on_from_memory_says_so() -> None:
    recovery = Recovery()
    recovery.failed(blame(step=12), 1.0)
    (told,) = recovery.began(Began(step=10, path=None, in_memory=True), 2.0)
    assert str(told).endswith("all ranks met again in 1.0 s; went on from step 10, in memory")
