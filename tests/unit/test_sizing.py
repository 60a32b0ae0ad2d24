"""How a run changes its number of ranks: the pure rules, and thousands of random schedules.

The world of `recovery_world` is played with places that come and go, and with people who ask
for other numbers of ranks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from rayrec.driver.blame import Blame
from rayrec.driver.run_placement import RankPlace, choose
from rayrec.driver.scaling import ScalingConfig
from rayrec.driver.sizing import Sizing, seats
from rayrec.driver.states import TRANSITIONS, State, Turn
from rayrec.shards.undo import Point
from rayrec.train.events import Began, Recovered, Resized
from tests.unit.recovery_world import ENDED, STEPS, TURN_S, Rank, World

SHRINK_S = 4.0
LIMIT_S = 30.0
GROW_S = 3.0


@pytest.mark.parametrize(
    ("ranks", "wanted", "room", "waited_s", "goes_on_with"),
    [
        (4, 4, 4, 0.0, 4),
        (4, 4, 6, 0.0, 4),
        (4, 4, 3, 0.0, None),
        (4, 4, 3, SHRINK_S, 3),
        (4, 4, 1, 10 * SHRINK_S, None),
        (3, 4, 4, 0.0, 4),
        (4, 2, 4, 0.0, 2),
        (4, 2, 3, 0.0, 2),
        (2, 4, 3, 0.0, 3),
    ],
)
def test_with_how_many_ranks_a_run_goes_on(
    ranks: int, wanted: int, room: int, waited_s: float, goes_on_with: int | None
) -> None:
    assert seats(ranks, wanted, 2, room, waited_s, SHRINK_S) == goes_on_with


def sizing(least: int = 2, most: int = 4) -> Sizing:
    return Sizing(least=least, most=most, grow_after_s=GROW_S)


def test_a_run_looks_for_room_now_and_then_and_grows_once_no_more_comes() -> None:
    run = sizing()
    assert run.began(Began(step=0, path=None), 2, 10.0, lost=False) is None
    assert not run.looks(2, 12.0) and run.looks(2, 13.0)
    assert run.goal(2, 3, 13.0) == 2, "a node has come, and another one may follow"
    assert not run.looks(2, 15.9) and run.looks(2, 16.0)
    assert run.goal(2, 3, 16.0) == 3
    assert run.goal(2, 4, 17.0) == 4, "all are there"
    assert not run.looks(4, 100.0), "there is nothing to wait for"
    run.pause(17.0)
    run.start()
    told = run.began(Began(step=60, path="p"), 4, 19.5, lost=False)
    assert told == Resized(step=60, ranks_before=2, ranks=4, lost=False, seconds=2.5)
    assert str(told) == "grown from 2 to 4 ranks at step 60"
    assert run.resizes == 1 and run.paused_since is None


def test_a_wish_is_kept_until_the_next_one() -> None:
    run = sizing()
    run.began(Began(step=0, path=None), 4, 0.0, lost=False)
    run.ask(3)
    assert run.goal(4, None, 0.1) == 3
    assert run.goal(3, 4, 5.0) == 3, "a run that was told to be smaller does not grow back"
    told = run.began(Began(step=9, path="p"), 3, 6.0, lost=False)
    assert str(told) == "shrunk from 4 to 3 ranks at step 9"
    run.ask(4)
    assert run.looks(3, 6.1) and run.goal(3, 4, 6.1) == 4, "asked for, it looks at once"


def test_what_was_asked_for_is_looked_for_until_it_comes() -> None:
    """A cluster has no room in the moment in which it is asked, and a second later it has."""
    run = Sizing(least=2, most=4, grow_after_s=3600.0)
    run.began(Began(step=0, path=None), 2, 0.0, lost=False)
    assert not run.looks(2, 50.0), "nobody asked"
    run.ask(4)
    assert run.looks(2, 50.0) and run.goal(2, 2, 50.0) == 2
    assert not run.looks(2, 50.9) and run.looks(2, 51.0)
    assert run.goal(2, 3, 51.0) == run.goal(2, 3, 52.0) == 2, "half of it is worth no pause"
    assert run.goal(2, 4, 53.0) == 4
    run.began(Began(step=9, path=None), 3, 60.0, lost=False)
    assert run.looks(3, 61.0), "one is still to come"
    run.began(Began(step=9, path=None), 4, 70.0, lost=False)
    run.began(Began(step=9, path=None), 3, 80.0, lost=True)
    assert not run.looks(3, 3000.0), "it came; what was lost since comes back at its time"


def test_ranks_that_are_lost_are_told_of_as_such() -> None:
    run = sizing()
    run.began(Began(step=0, path=None), 4, 0.0, lost=False)
    told = run.began(Began(step=5200, path="p"), 2, 9.0, lost=True)
    assert str(told) == "2 of 4 ranks are left; goes on with 2 from step 5200"
    lost = Recovered(
        step=5200, path="p", failed_step=5210, rank=3, host="h", cause="its process died (x)",
        seconds=2.0, replaced=False, dropped=True,
    )  # fmt: skip
    assert str(lost) == (
        "rank 3 on h lost (its process died) at step 5210; the others met again in 2.0 s; went on "
        "from step 5200"
    )


def test_ranks_keep_their_places_and_give_back_those_of_their_own_first() -> None:
    base, one, two = (RankPlace(name, 0) for name in ("base", "one", "two"))
    both = RankPlace("base", 1)
    there = [base, both, one, two]
    assert choose(there, [two, base, both], 3) == [two, base, both]
    assert choose(there, [two, base, both], 2) == [base, both]
    assert choose(there, [two, base, both], 4) == [two, base, both, one]
    assert choose([base, one, two], [base, both, one], 3) == [base, one, two]


@dataclass
class ElasticWorld(World):
    """A world whose places come and go."""

    sizing: Sizing = field(default_factory=sizing)
    there: list[RankPlace] = field(default_factory=list)
    places: list[RankPlace] = field(default_factory=list)
    born: int = 0
    short_since: float | None = None
    no_room: bool = False
    told: list[Resized] = field(default_factory=list)
    # how many failures there had been at each of them
    failures: list[int] = field(default_factory=list)
    paused_at: int | None = None
    # the step of tables that no storage has, and the ranks that keep them
    handed_at: int | None = None
    holders: list[Rank] = field(default_factory=list)
    # who is where when the ranks pause, until they train again
    former: dict[RankPlace, Rank] = field(default_factory=dict)
    goes_back: bool = False
    called_off: int = 0

    def __post_init__(self) -> None:
        least = self.draw.randint(1, 4)
        self.sizing = sizing(least, self.draw.randint(least + 1, 6))
        for _ in range(self.draw.randint(least, self.sizing.most)):
            self.add_place()
        self.places = list(self.there)
        self.ranks = [Rank() for _ in self.places]
        self.forget_points()

    def add_place(self) -> None:
        self.born += 1
        self.there.append(RankPlace("node", self.born))

    def harm(self) -> None:
        super().harm()
        if self.draw.random() < self.hazard and self.there:
            lost = self.there.pop(self.draw.randrange(len(self.there)))
            if lost in self.places:
                self.ranks[self.places.index(lost)].alive = False
        if self.draw.random() < 2 * self.hazard and len(self.there) < self.sizing.most:
            self.add_place()
        if self.draw.random() < self.hazard:
            self.sizing.ask(self.draw.randint(self.sizing.least, self.sizing.most))

    def fill(self) -> Turn:
        if self.short_since is None:
            self.short_since = self.now
        ranks, room = len(self.ranks), len(self.there)
        wanted = len(self.former) if self.goes_back else self.sizing.wanted
        waited_s = self.now - self.short_since
        seated = seats(ranks, wanted, self.sizing.least, room, waited_s, SHRINK_S)
        if seated is None:
            assert room < min(ranks, wanted) and waited_s < max(SHRINK_S, LIMIT_S + TURN_S)
            if room < self.sizing.least and waited_s >= LIMIT_S:
                self.no_room, self.ended_by = True, Blame(rank=0, host="h", cause="no room")
                return "fail"
            return "stay"
        assert self.sizing.least <= seated <= wanted
        self.short_since = None
        taken = list(self.former) if self.goes_back else self.places
        self.seat(choose(self.there, taken, seated))
        return super().fill()

    def seat(self, chosen: list[RankPlace]) -> None:
        """Have ranks at these places; survivors whose place is there keep their process."""
        alive = [n for n, r in enumerate(self.ranks) if r.alive and self.places[n] in self.there]
        held = [place for place in self.places if place in self.there]
        if len(chosen) >= len(held):
            assert all(self.places[number] in chosen for number in alive)
        # those that had left for a change that is called off come back
        at = {**self.former, **dict(zip(self.places, self.ranks, strict=True))}
        moved = chosen != self.places
        self.places = chosen
        self.ranks = [at.get(place, Rank()) for place in chosen]
        if moved:
            # Memory is called by the arrangement of the ranks, and another one begins without any.
            self.forget_points()

    def plan(self) -> Turn:
        if self.former and not self.goes_back and self.draw.random() < 5 * self.hazard:
            keeps = self.sizing.call_off()
            assert keeps in (0, len(self.former))
            self.goes_back = bool(keeps)
            self.called_off += self.goes_back
            return "resize" if keeps else "on"
        if self.goes_back and all(place in self.there for place in self.former):
            assert set(self.places) == set(self.former), "the ranks are where they were"
        return "on"

    def hand_over(self) -> Turn:
        if self.handed_at is None:
            return "on"
        everyone = [*self.holders, *self.ranks]
        if self.draw.random() < self.hazard:
            self.draw.choice(everyone).alive = False
        if all(rank.alive for rank in everyone):
            return "on"
        return self.failed(Blame(rank=0, host="h", cause="its process died", kind="died"))

    def failed(self, failure: Blame) -> Turn:
        self.handed_at, self.holders = None, []
        self.former, self.goes_back = {}, False
        return super().failed(failure)

    def look_for_point(self) -> int:
        if self.handed_at is None:
            return super().look_for_point()
        self.forget_points()
        self.line += 1
        self.all_had = Point(self.line, self.handed_at)
        for points in self.kept:
            points[:] = [self.all_had]
        self.handed_at, self.holders = None, []
        return self.all_had.step

    def start(self) -> Turn:
        self.sizing.start()
        lost = self.recovery.under_way
        turn = super().start()
        if turn != "on":
            return turn
        if not lost and self.paused_at is not None:
            assert self.ranks[0].step == self.paused_at, "a pause loses no step"
        self.paused_at = None
        self.former, self.goes_back = {}, False
        began = Began(step=self.ranks[0].step, path=None)
        told = self.sizing.began(began, len(self.ranks), self.now, lost=lost)
        if told is not None:
            self.told.append(told)
            self.failures.append(len(self.recovery.past))
        return turn

    def run(self) -> Turn:
        whole = all(r.alive and not r.frozen and r.state == "running" for r in self.ranks)
        paused = self.sizing.paused_since is not None
        if paused and whole and self.draw.random() < 0.5:
            self.paused_at = self.ranks[0].step
            self.former = dict(zip(self.places, self.ranks, strict=True))
            if self.draw.random() < 0.5:
                self.handed_at, self.holders = self.paused_at, list(self.ranks)
            else:
                self.saved = self.paused_at
            for rank in self.ranks:
                rank.state = "done"
            return "resize"
        turn = super().run()
        if turn == "stay" and whole and not paused:
            size = len(self.ranks)
            looks = self.sizing.looks(size, self.now)
            goal = self.sizing.goal(size, len(self.there) if looks else None, self.now)
            if goal != size:
                self.sizing.pause(self.now)
        return turn


@pytest.mark.seeds(range(100))
def test_no_schedule_of_places_leads_astray(seed: int) -> None:
    """Each seed is a hundred schedules, which end for one of the reasons that there are."""
    for number in range(100):
        check_schedule(random.Random(1000 * seed + number))


def check_schedule(draw: random.Random) -> None:
    """Play one world to its end, and look at its numbers of ranks."""
    bound = draw.choice([0, 2, -1])
    world = ElasticWorld(draw, bound, hazard=draw.choice([0.0, 0.01, 0.03, 0.06]))
    turns = 0
    while world.state not in ENDED:
        world.turn()
        turns += 1
        if turns == 2000:
            world.hazard = 0.0
        assert turns < 3000, f"no end in sight in {world.state}"
    recovery, changes = world.recovery, world.told
    assert world.sizing.resizes == len(changes)
    for (told, before), (after, then) in pairwise(zip(changes, world.failures, strict=True)):
        assert told.ranks == after.ranks_before
        # a change saves nothing, so a failure after it may take it back
        assert told.step <= after.step or before < then
    for told in changes:
        assert told.ranks != told.ranks_before
        assert world.sizing.least <= told.ranks <= world.sizing.most
    assert bound < 0 or len(recovery.past) <= bound
    if world.state is State.FINISHED:
        assert not recovery.under_way and all(rank.step == STEPS for rank in world.ranks)
        return
    last = world.ended_by
    assert last is not None
    again = any((old.cause, old.step) == (last.cause, last.step) for old in recovery.past)
    spent = 0 <= bound == len(recovery.past)
    assert world.no_room or last.final or spent or (again and last.kind == "error")


def test_a_world_left_in_peace_gets_the_ranks_that_are_wanted() -> None:
    world = ElasticWorld(random.Random(3), -1, hazard=0.0)
    world.sizing = sizing(1, 3)
    world.there = [RankPlace("node", 1)]
    world.places, world.ranks = list(world.there), [Rank()]
    seen = []
    for turn in range(36):
        if turn in (8, 16):
            world.add_place()
        world.turn()
        seen.append(len(world.ranks))
    assert seen[0] == 1 and seen[-1] == 3 and sorted(seen) == seen
    assert [told.ranks for told in world.told][-1] == 3
    world.sizing.ask(2)
    while world.state not in ENDED:
        world.turn()
    assert len(world.ranks) == 2 and world.state is State.FINISHED


def test_a_change_is_called_off_once_and_not_tried_again() -> None:
    run = sizing()
    assert run.call_off() == 0, "no rank has trained"
    run.began(Began(step=0, path=None), 3, 0.0, lost=False)
    run.pause(1.0)
    assert run.call_off() == 3 and run.wanted == 3
    assert run.call_off() == 0, "with as many as before it fails as well"
    run.start()
    assert run.began(Began(step=9, path=None), 3, 2.0, lost=False) is None
    assert not run.looks(3, 1e9) and run.resizes == 0
    run.ask(4)
    assert run.goal(3, 4, 3.0) == 4
    run.pause(4.0, leaving=True)
    assert run.call_off() == 0, "a node that goes is left"


def test_schedules_call_changes_off() -> None:
    called_off = 0
    for seed in range(60):
        world = ElasticWorld(random.Random(seed), -1, hazard=0.03)
        while world.state not in ENDED and world.now < 1000:
            world.turn()
        called_off += world.called_off
    assert called_off > 5


def test_the_table_knows_the_new_ways() -> None:
    assert TRANSITIONS[State.PLANNING]["resize"] is State.FILLING
    assert TRANSITIONS[State.RUNNING]["resize"] is State.FILLING
    assert TRANSITIONS[State.FILLING]["stay"] is State.FILLING
    fixed = Sizing.of(ScalingConfig(num_workers=3))
    assert not fixed.looks(3, 1e9) and fixed.goal(3, None, 0.0) == 3
