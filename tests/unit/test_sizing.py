"""How a run changes its number of ranks: the pure rules."""

from __future__ import annotations

import pytest

from rayrec.driver.roster import Place, choose
from rayrec.driver.sizing import Sizing, seats
from rayrec.train.events import Began, Recovered, Resized

SHRINK_S = 4.0
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


def sizing() -> Sizing:
    return Sizing(wanted=4, grow_after_s=GROW_S)


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
    run = Sizing(wanted=4, grow_after_s=3600.0)
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
    base, one, two = (Place(group, 0) for group in range(3))
    both = Place(0, 1)
    there = [base, both, one, two]
    assert choose(there, [two, base, both], 3) == [two, base, both]
    assert choose(there, [two, base, both], 2) == [base, both]
    assert choose(there, [two, base, both], 4) == [two, base, both, one]
    assert choose([base, one, two], [base, both, one], 3) == [base, one, two]


def test_a_change_is_called_off_once_and_not_tried_again() -> None:
    run = sizing()
    assert run.call_off(0) == 0, "no rank has trained"
    run.began(Began(step=0, path=None), 3, 0.0, lost=False)
    run.pause(1.0)
    assert run.call_off(4) == 3 and run.wanted == 3
    assert run.call_off(3) == 0, "with as many as before it fails as well"
    run.start()
    assert run.began(Began(step=9, path=None), 3, 2.0, lost=False) is None
    assert not run.looks(3, 1e9) and run.resizes == 0
    run.ask(4)
    assert run.goal(3, 4, 3.0) == 4
    run.pause(4.0, leaving=("10.0.0.7",))
    assert run.call_off(4) == 0, "a node that goes is left"


def test_a_run_of_one_number_of_ranks_looks_for_no_more() -> None:
    fixed = Sizing(wanted=3, grow_after_s=GROW_S)
    assert not fixed.looks(3, 1e9) and fixed.goal(3, None, 0.0) == 3
