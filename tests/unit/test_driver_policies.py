"""The choice of the first failing rank, over observations written by hand and drawn at random."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace

import pytest

from rayrec.driver.blame import Blame
from rayrec.driver.policies import COLLECT_S, GRACE_S, answer, first_failure, judge
from rayrec.driver.views import Observation
from rayrec.errors import (
    CommError,
    ConfigError,
    DamagedCheckpointError,
    InputError,
    PlanError,
    RayrecError,
    SaveError,
    TrainingFailed,
)
from rayrec.train.progress import RankPoll
from rayrec.train.rank_error import RankError, is_collateral


def running(rank: int, silent_s: float = 0.0) -> Observation:
    return Observation(
        rank=rank, host="h", poll=RankPoll(state="running", step=7), silent_s=silent_s
    )


def done(rank: int) -> Observation:
    return Observation(rank=rank, host="h", poll=RankPoll(state="done", step=9, result=rank))


def failed(rank: int, cause: str, at: float, collateral: bool = False) -> Observation:
    error = RankError(
        cause=cause, traceback=f"Traceback of {rank}", at=at, step=7, collateral=collateral
    )
    return Observation(
        rank=rank, host=f"h{rank}", poll=RankPoll(state="failed", step=7, error=error)
    )


def dead(rank: int, at: float) -> Observation:
    return Observation(
        rank=rank,
        host=f"h{rank}",
        poll=RankPoll(state="running", step=5),
        death="its process died",
        death_at=at,
    )


def test_all_done_finishes_and_one_running_waits() -> None:
    assert judge([done(0), done(1)], 0.0) == "finish"
    assert judge([done(0), running(1)], 0.0) == "wait"
    assert judge([Observation(rank=0, host="h")], 0.0) == "wait"


def test_a_rank_that_dies_once_its_task_is_done_is_no_failure() -> None:
    """It has done its part of all that the others do."""
    gone = replace(done(1), death="its process died", death_at=1.0)
    assert judge([running(0), gone], 60.0) == "wait"
    assert judge([done(0), gone], 60.0) == "finish"
    blame = judge([failed(0, "CommError: reset", 2.0, collateral=True), gone], GRACE_S)
    assert isinstance(blame, Blame) and blame.rank == 1 and blame.kind == "died"


def test_a_symptom_waits_for_its_cause() -> None:
    ranks = [failed(0, "CommError: reset", 1.0, collateral=True), running(1)]
    assert judge(ranks, GRACE_S / 2) == "wait"
    later = judge([ranks[0], dead(1, at=1.2)], COLLECT_S)
    assert isinstance(later, Blame) and later.rank == 1 and "died" in later.cause


def test_a_symptom_without_cause_is_reported_after_the_grace() -> None:
    symptom = failed(0, "CommError: timed out", 1.0, collateral=True)
    verdict = judge([symptom, running(1), running(2)], GRACE_S + 0.1)
    assert isinstance(verdict, Blame) and verdict.rank == 0


def test_the_one_rank_that_the_others_wait_for_is_blamed() -> None:
    """It hangs in its forward, say, and answers the driver all the while."""
    ranks = [
        failed(0, "CommError: timed out", 1.0, collateral=True),
        running(1),
        failed(2, "CommError: timed out", 1.1, collateral=True),
    ]
    failure = judge(ranks, GRACE_S + 0.1)
    assert isinstance(failure, Blame) and (failure.rank, failure.step) == (1, 7)
    assert str(failure.error(3)) == (
        "rank 1 of 3 on h failed after step 7: it did not come to where the other ranks waited for "
        "it, and still is running; others then failed with CommError: timed out"
    )
    assert answer(failure, [replace(failure, also="others then failed otherwise")], -1) == "fail"


def test_a_silent_rank_is_blamed_for_the_symptoms_of_others() -> None:
    ranks = [
        failed(0, "CommError: timed out", 1.0, collateral=True),
        running(1, silent_s=40.0),
        running(2, silent_s=0.1),
    ]
    failure = first_failure(ranks, silent_limit_s=10.0)
    assert (
        failure.rank == 1 and "no answer for 40 s" in failure.cause and "timed out" in failure.cause
    )


def test_a_death_comes_before_an_error_and_still_tells_it() -> None:
    failure = first_failure([failed(1, "ValueError: x", 1.0), dead(2, at=2.0)])
    assert failure.rank == 2 and failure.step == 7, "the other rank had told of step 7"
    assert "rank 1 failed with ValueError: x" in str(failure.error(3))


def test_a_frozen_rank_is_placed_at_the_step_that_the_others_reached() -> None:
    ranks = [failed(0, "CommError: timed out", 1.0, collateral=True), running(1, silent_s=40.0)]
    assert "failed after step 7: no answer for 40 s" in str(
        first_failure(ranks, silent_limit_s=10.0).error(2)
    )
    behind = Observation(rank=1, host="h", poll=RankPoll(state="running", step=0), silent_s=40.0)
    assert "failed after step 7: no answer" in str(
        first_failure([ranks[0], behind], silent_limit_s=10.0).error(2)
    )


@pytest.mark.parametrize("kind", [InputError, ConfigError, PlanError, DamagedCheckpointError])
def test_a_users_mistake_keeps_its_class_across_pickling(kind: type[RayrecError]) -> None:
    said = RankError.of(kind("id 7 is bad"), step=3)
    error = pickle.loads(pickle.dumps(said))
    observed = Observation(rank=1, host="h1", poll=RankPoll(state="failed", step=3, error=error))
    raised = first_failure([running(0), observed]).error(2)
    assert (
        type(raised) is kind
        and str(raised) == "id 7 is bad (found by rank 1 of 2 on h1 after step 3)"
    )


@pytest.mark.parametrize(
    "error", [ValueError("x"), SaveError("the disk is full"), CommError("gone")]
)
def test_what_the_user_did_not_cause_is_a_failed_run(error: Exception) -> None:
    said = RankError.of(error, step=3)
    observed = Observation(rank=0, host="h0", poll=RankPoll(state="failed", step=3, error=said))
    assert type(first_failure([observed]).error(1)) is TrainingFailed


@pytest.mark.seeds(range(50))
def test_the_earliest_own_error_wins_whatever_the_symptoms_say(seed: int) -> None:
    draw = random.Random(seed)
    ranks = [
        failed(rank, "CommError: reset", draw.random(), collateral=True)
        for rank in range(draw.randint(2, 9))
    ]
    own = draw.sample(range(len(ranks)), draw.randint(1, len(ranks)))
    times = {rank: 5 + draw.random() for rank in own}  # later than every symptom
    for rank, at in times.items():
        ranks[rank] = failed(rank, f"ValueError: of {rank}", at)
    draw.shuffle(ranks)
    verdict = judge(ranks, 0.0)  # all have failed: nothing more to wait for
    assert isinstance(verdict, Blame)
    assert verdict.rank == min(times, key=times.__getitem__)
    assert verdict.traceback == f"Traceback of {verdict.rank}"


@pytest.mark.parametrize(
    "text",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer "
        "[10.0.0.1]:3245",
        "[enforce fail at gloo/transport/tcp/buffer.cc:72] Timed out waiting 1800000ms for send "
        "operation to complete",
        "Broken pipe",
        "NCCL communicator was aborted on rank 1",
    ],
)
def test_trouble_at_the_other_end_is_collateral(text: str) -> None:
    assert is_collateral(RuntimeError(text))
    try:
        try:
            raise RuntimeError(text)
        except RuntimeError as inner:
            raise ValueError("wrapped") from inner
    except ValueError as outer:
        assert is_collateral(outer)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad label"),
        RuntimeError("shape mismatch"),
        MemoryError(),
        FileNotFoundError("no file x"),
    ],
)
def test_trouble_of_its_own_is_not_collateral(error: Exception) -> None:
    assert not is_collateral(error)
