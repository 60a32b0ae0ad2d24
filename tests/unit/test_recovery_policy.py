"""The pure part of recovery against thousands of random schedules of events.

A small world plays the ranks: it kills them, freezes them, lets them raise, and answers the
controller's questions late. What drives it are the real transitions, verdicts and counters.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from rayrec.driver.policies import (
    COLLECT_S,
    GRACE_S,
    LEAVE_S,
    Blame,
    Observation,
    answer,
    judge,
    to_replace,
)
from rayrec.driver.recovery import Recovery
from rayrec.driver.states import TRANSITIONS, State, Turn, can_recover
from rayrec.errors import CallbackError, ConfigError, InputError, SaveError, TrainingFailed
from rayrec.train.progress import Began, RankPoll
from rayrec.train.rank_error import RankError

HEARTBEAT_S = 10.0
TURN_S = 0.5
STEPS = 40
ENDED = (State.FINISHED, State.ERRORED)


def blame(cause: str = "ValueError: x", step: int = 3, **more: object) -> Blame:
    return Blame(rank=1, host="h", cause=cause, step=step, **more)  # type: ignore[arg-type]


def test_the_number_of_failures_is_the_bound() -> None:
    past = [blame(step=1), blame(step=2)]
    assert answer(blame(), past, 3) == "recover"
    assert answer(blame(), past, 2) == "fail"
    assert answer(blame(), [], 0) == "fail"
    assert answer(blame(), past * 50, -1) == "recover"


def test_what_would_fail_again_is_not_tried_again() -> None:
    assert answer(blame(final=True), [], -1) == "fail"
    assert answer(blame(), [blame(), blame(step=9)], -1) == "fail", "the same error, the same step"
    assert answer(blame("OSError: y"), [blame()], -1) == "recover"
    killed = blame("its process died", kind="died")
    assert answer(killed, [killed], -1) == "recover", "two kills at one step are a chance"
    assert answer(killed, [], -1, stopping=True) == "fail"


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


def test_an_error_of_a_wait_keeps_its_kind() -> None:
    error = TrainingFailed("rank 1 could not start", 1, "h", "its process died")
    error.kind = "died"
    assert Blame.of(error, 7) == blame("its process died", 7, kind="died")


def test_a_frozen_rank_is_found_by_its_silence_alone() -> None:
    ranks = [
        Observation(rank=0, host="h", poll=RankPoll(state="running", step=7), silent_s=0.4),
        Observation(rank=1, host="h", poll=RankPoll(state="running", step=6), silent_s=9.9),
    ]
    assert judge(ranks, 0.0, 5.0, HEARTBEAT_S).action == "wait"
    ranks[1] = replace(ranks[1], silent_s=10.0)
    failure = judge(ranks, 0.0, 5.0, HEARTBEAT_S).failure
    assert failure is not None
    assert (failure.rank, failure.kind, failure.step) == (1, "silent", 7)


def test_who_is_replaced() -> None:
    left = Observation(rank=0, host="h", poll=RankPoll(state="failed"))
    dead = Observation(rank=1, host="h", death="gone")
    busy = Observation(rank=2, host="h", poll=RankPoll(state="running"))
    mute = Observation(rank=3, host="h")
    ranks = [left, dead, busy, mute]
    assert to_replace(ranks, 0.2) == ((1,), True)
    assert to_replace(ranks, LEAVE_S) == ((1, 2, 3), False)
    frozen = replace(blame(kind="silent"), rank=3)
    assert to_replace([left, dead, mute], 0.0, frozen) == ((1, 3), False), "at once"
    assert to_replace([left, busy], 0.0, frozen) == ((), True)


def test_every_state_has_a_way_to_the_end() -> None:
    reached = set(ENDED)
    while True:
        more = {s for s, turns in TRANSITIONS.items() if set(turns.values()) & reached} - reached
        if not more:
            break
        reached |= more
    assert reached == set(State)
    assert all("fail" in turns for turns in TRANSITIONS.values())
    assert not can_recover(State.SCHEDULING) and can_recover(State.GATHERING)


def test_what_a_failure_cost() -> None:
    recovery = Recovery()
    assert recovery.began(Began(step=0, path=None), 0.0) == ()
    recovery.failed(replace(blame(step=12), kind="died"), 10.0)
    assert recovery.under_way
    recovery.replaced([1])
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
    assert "rank 0 on h failed (ValueError: x)" in str(second)
    assert "began again" in str(replace(first, path=None, step=0))


@dataclass
class Rank:
    """A rank of the played world; `quiet_until` has it answer nothing until then."""

    alive: bool = True
    frozen: bool = False
    state: str = "idle"
    step: int = 0
    error: RankError | None = None
    silent_s: float = 0.0
    stuck_until: float = 0.0


@dataclass
class World:
    """Plays ranks against the real policy; every draw comes from the seed."""

    draw: random.Random
    max_failures: int
    hazard: float
    now: float = 0.0
    state: State = State.FILLING
    saved: int = 0
    trouble: float | None = None
    cut: float = 0.0
    recovery: Recovery = field(default_factory=Recovery)
    ended_by: Blame | None = None
    mistakes: int = 0

    def __post_init__(self) -> None:
        self.ranks = [Rank() for _ in range(self.draw.randint(1, 5))]

    def turn(self) -> None:
        self.now += TURN_S
        self.harm()
        for rank in self.ranks:
            quiet = not rank.alive or rank.frozen
            rank.silent_s = rank.silent_s + TURN_S if quiet else 0.0
        turn = {
            State.FILLING: self.fill,
            State.PLANNING: lambda: "on",
            State.STARTING: self.start,
            State.RUNNING: self.run,
            State.GATHERING: self.gather,
            State.SHUTTING_DOWN: lambda: "end" if self.ended_by is None else "fail",
        }[self.state]()
        self.state = TRANSITIONS[self.state][turn]  # type: ignore[index]

    def harm(self) -> None:
        for rank in self.ranks:
            if rank.alive and self.draw.random() < self.hazard:
                what = self.draw.choice(["kill", "kill", "freeze", "raise", "mistake", "stuck"])
                if what == "kill":
                    rank.alive = False
                elif what == "freeze":
                    rank.frozen = True
                elif what == "stuck":
                    rank.stuck_until = self.now + self.draw.random() * 2 * LEAVE_S
                elif rank.state == "running":
                    mistake = what == "mistake" and self.draw.random() < 0.1
                    error: Exception = InputError("bad id") if mistake else ValueError("cursed")
                    self.mistakes += mistake
                    self.fail(rank, RankError.of(error, rank.step))

    def fail(self, rank: Rank, error: RankError) -> None:
        rank.state, rank.error = "failed", replace(error, at=self.now)

    def observe(self) -> list[Observation]:
        told = []
        for number, rank in enumerate(self.ranks):
            poll = RankPoll(state=rank.state, step=rank.step, error=rank.error)  # type: ignore[arg-type]
            known = None if rank.frozen else poll
            death = "" if rank.alive else "its process died"
            told.append(
                Observation(
                    rank=number,
                    host="h",
                    poll=known,
                    death=death,
                    death_at=self.now,
                    silent_s=rank.silent_s,
                )
            )
        return told

    def fill(self) -> Turn:
        for number, rank in enumerate(self.ranks):
            if not rank.alive:
                self.ranks[number] = Rank()
        if self.draw.random() < self.hazard:
            lost = self.draw.randrange(len(self.ranks))
            self.ranks[lost].alive = False
            return self.failed(Blame(rank=lost, host="h", cause="its process died", kind="died"))
        return "on"

    def start(self) -> Turn:
        for number, rank in enumerate(self.ranks):
            if not rank.alive:
                died = Blame(rank=number, host="h", cause="its process died", kind="died")
                return self.failed(died)
        for rank in self.ranks:
            assert rank.state != "running", "nobody may still be in the world that failed"
            rank.state, rank.step, rank.error = "running", self.saved, None
        self.trouble = None
        self.recovery.began(Began(step=self.saved, path=None), self.now)
        return "on"

    def run(self) -> Turn:
        whole = all(r.alive and not r.frozen and r.state == "running" for r in self.ranks)
        if whole and all(r.stuck_until <= self.now for r in self.ranks):
            for rank in self.ranks:
                rank.step += 1
                rank.state = "done" if rank.step == STEPS else "running"
            if self.ranks[0].step % 5 == 0:
                self.saved = self.ranks[0].step
        elif self.draw.random() < 0.5:
            for rank in self.ranks:
                gone = any(not r.alive or r.state == "failed" for r in self.ranks)
                if rank.alive and not rank.frozen and rank.state == "running" and gone:
                    symptom = ConnectionResetError("closed by peer")
                    self.fail(rank, RankError.of(symptom, rank.step))
        ranks = self.observe()
        step = max(rank.step for rank in self.ranks)
        self.recovery.at_step(step, self.now)
        if self.trouble is None and any(r.death or (r.poll and r.poll.error) for r in ranks):
            self.trouble = self.now
        since = 0.0 if self.trouble is None else self.now - self.trouble
        verdict = judge(ranks, since, 5.0, HEARTBEAT_S)
        if verdict.action == "finish":
            assert all(rank.step == STEPS for rank in self.ranks)
            self.recovery.caught_up(self.now)
            return "end"
        return "stay" if verdict.failure is None else self.failed(verdict.failure)

    def gather(self) -> Turn:
        for rank in self.ranks:
            hears = rank.alive and not rank.frozen and rank.stuck_until <= self.now
            if hears and rank.state == "running":
                self.fail(rank, RankError.of(ConnectionResetError("cut"), rank.step))
        lost, waiting = to_replace(self.observe(), self.now - self.cut, self.recovery.past[-1])
        if waiting:
            return "stay"
        for number in lost:
            self.ranks[number] = Rank(alive=False)
        return "on"

    def failed(self, failure: Blame) -> Turn:
        if answer(failure, self.recovery.past, self.max_failures) == "fail":
            self.ended_by = failure
            return "fail"
        self.recovery.failed(failure, self.now)
        self.cut = self.now
        return "recover"


@pytest.mark.seeds(range(100))
def test_no_schedule_of_faults_leads_astray(seed: int) -> None:
    """Each seed is a hundred schedules, which end in one of two ways and for a reason."""
    for number in range(100):
        check_schedule(random.Random(1000 * seed + number))


def check_schedule(draw: random.Random) -> None:
    """Play one world to its end, and look at why it ended."""
    bound = draw.choice([0, 1, 3, -1])
    world = World(draw, bound, hazard=draw.choice([0.0, 0.005, 0.02, 0.06]))
    turns = 0
    while world.state not in ENDED:
        world.turn()
        turns += 1
        if turns == 2000:
            world.hazard = 0.0
        assert turns < 3000, f"no end in sight in {world.state}"
    recovery = world.recovery
    assert bound < 0 or len(recovery.past) <= bound
    assert not any(old.final for old in recovery.past)
    if world.state is State.FINISHED:
        assert not recovery.under_way and world.ended_by is None
        assert recovery.recoveries <= len(recovery.past)
        assert (recovery.seconds_lost > 0) == bool(recovery.past)
        return
    last = world.ended_by
    assert last is not None
    again = any((old.cause, old.step) == (last.cause, last.step) for old in recovery.past)
    spent = 0 <= bound == len(recovery.past)
    assert last.final or spent or (again and last.kind == "error")
    if last.final:
        assert world.mistakes


def test_a_failure_is_answered_in_bounded_time() -> None:
    """A killed rank costs the moment for an earlier cause; a frozen one the heartbeat timeout."""
    assert COLLECT_S < GRACE_S < HEARTBEAT_S
    for freeze in (False, True):
        world = World(random.Random(1), -1, hazard=0.0)
        world.ranks = [Rank(), Rank(), Rank()]
        while world.ranks[0].step < 7:
            world.turn()
        world.ranks[1].frozen, world.ranks[1].alive = freeze, freeze
        since = world.now
        while world.state is State.RUNNING:
            world.turn()
        bound = HEARTBEAT_S if freeze else GRACE_S
        assert world.state is State.GATHERING and world.now - since <= bound + 2 * TURN_S
        while world.state not in ENDED:
            world.turn()
        assert world.state is State.FINISHED and world.recovery.past[0].rank == 1
