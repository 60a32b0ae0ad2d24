"""A small world that plays the ranks of a run against the real transitions, verdicts and counters.

It kills its ranks, freezes them, lets them raise, and answers the controller's questions late.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from rayrec.driver.blame import Blame, Observation
from rayrec.driver.policies import LEAVE_S, answer, judge, to_replace
from rayrec.driver.recovery import Recovery
from rayrec.driver.states import TRANSITIONS, State, Turn
from rayrec.errors import InputError, JoinError
from rayrec.shards.undo import Point, common_point
from rayrec.train.events import Began
from rayrec.train.progress import RankPoll
from rayrec.train.rank_error import RankError

HEARTBEAT_S = 10.0
TURN_S = 0.5
STEPS = 40
SYNC_EVERY = 3
ENDED = (State.FINISHED, State.ERRORED)


@dataclass
class Rank:
    """A rank of the played world; `stuck_until` has it hear nothing until then."""

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
    line: int = 0
    from_memory: int = 0

    def __post_init__(self) -> None:
        self.ranks = [Rank() for _ in range(self.draw.randint(1, 5))]
        self.forget_points()

    def forget_points(self) -> None:
        """Have no host keep a sync point."""
        # By rank, the sync points that its host keeps; they outlive the rank's process.
        self.kept: list[list[Point]] = [[] for _ in self.ranks]
        self.all_had: Point | None = None

    def turn(self) -> None:
        self.now += TURN_S
        self.harm()
        for rank in self.ranks:
            quiet = not rank.alive or rank.frozen
            rank.silent_s = rank.silent_s + TURN_S if quiet else 0.0
        turn = {
            State.FILLING: self.fill,
            State.PLANNING: self.plan,
            State.HANDING: self.hand_over,
            State.STARTING: self.start,
            State.RUNNING: self.run,
            State.GATHERING: self.gather,
            State.SHUTTING_DOWN: lambda: "end" if self.ended_by is None else "fail",
        }[self.state]()
        self.state = TRANSITIONS[self.state][turn]  # type: ignore[index]

    def harm(self) -> None:
        for number, rank in enumerate(self.ranks):
            if rank.alive and self.draw.random() < self.hazard:
                kinds = ["kill", "kill", "freeze", "raise", "mistake", "stuck", "host"]
                what = self.draw.choice(kinds)
                if what == "kill":
                    rank.alive = False
                elif what == "host":
                    rank.alive = False
                    self.kept[number].clear()
                    self.all_had = None
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

    def plan(self) -> Turn:
        return "on"

    def hand_over(self) -> Turn:
        return "on"

    def start(self) -> Turn:
        for number, rank in enumerate(self.ranks):
            if not rank.alive:
                died = Blame(rank=number, host="h", cause="its process died", kind="died")
                return self.failed(died)
        begin = self.look_for_point()
        for rank in self.ranks:
            assert rank.state != "running", "nobody may still be in the world that failed"
            rank.state, rank.step, rank.error = "running", begin, None
        self.trouble = None
        if self.draw.random() < self.hazard:
            # nobody is dead, and one cannot reach the others
            for rank in self.ranks:
                self.fail(rank, RankError.of(JoinError(f"no one at :{self.now:.0f}00"), begin))
            return "on"
        self.recovery.began(Began(step=begin, path=None), self.now)
        return "on"

    def look_for_point(self) -> int:
        """The step where all ranks begin: a sync point that all of them have, or the checkpoint."""
        point = common_point(self.kept, self.saved)
        had = self.all_had
        if had is not None and had.step >= self.saved:
            assert point is not None and point.step >= had.step, "what all had is not lost"
        if point is None:
            self.line += 1
            point = Point(self.line, self.saved)
        else:
            assert point.line == self.line, "of another past"
            self.from_memory += 1
        assert point.step >= self.saved
        # a rank that dies here leaves others with one point less
        for points in self.kept:
            points[:] = [point]
        self.all_had = point
        return point.step

    def sync(self) -> bool:
        """Have ranks set the sync point of their step, some of them late; whether all have."""
        step = self.ranks[0].step
        if step % SYNC_EVERY:
            return True
        point = Point(self.line, step)
        for points in self.kept:
            if point not in points and self.draw.random() < 0.8:
                points[:] = [*points[-1:], point]
        if all(point in points for points in self.kept):
            self.all_had = point
            return True
        return False

    def run(self) -> Turn:
        whole = all(r.alive and not r.frozen and r.state == "running" for r in self.ranks)
        hear = whole and all(r.stuck_until <= self.now for r in self.ranks)
        if hear and self.sync():
            for rank in self.ranks:
                rank.step += 1
                rank.state = "done" if rank.step == STEPS else "running"
            if self.ranks[0].step % 5 == 0:
                self.saved = self.ranks[0].step
        elif not hear and self.draw.random() < 0.5:
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
        verdict = judge(ranks, since, 5.0, HEARTBEAT_S * self.recovery.patience)
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
        unmet = self.recovery.past[-1].unmet
        lost, waiting = to_replace(self.observe(), self.now - self.cut, unmet)
        if waiting:
            return "stay"
        for number in lost:
            self.ranks[number] = Rank(alive=False)
        assert lost or not unmet, "the same processes would not meet again"
        self.recovery.left(lost)
        return "on"

    def failed(self, failure: Blame) -> Turn:
        if answer(failure, self.recovery.past, self.max_failures) == "fail":
            self.ended_by = failure
            return "fail"
        self.recovery.failed(failure, self.now)
        self.cut = self.now
        return "recover"
