"""What a run does about nodes that will go: the rule, and random schedules of notices."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rayrec.driver.preemption import LAST_S, LEAVE_S, Going, answer_to, going
from rayrec.driver.scaling import ScalingConfig
from rayrec.driver.sizing import seats
from rayrec.train.events import Noticed
from rayrec.train.seat import RankAddress

PATIENCE_S = 30.0


def node(left_s: float | None, ranks: tuple[int, ...] = (1,)) -> Going:
    return Going("n", "10.0.0.7", ranks, left_s)


def answer(where: Going, least: int = 1, **changes: Any) -> str:
    scaling = ScalingConfig(num_workers=(least, 8), shrink_after_s=PATIENCE_S)
    chosen: dict[str, Any] = {
        "scaling": scaling,
        "keeps": True,
        "ranks": 2,
        "elsewhere": 1,
        "waited_s": 0.0,
    }
    return answer_to(where, **{**chosen, **changes})


@pytest.mark.parametrize(
    ("left_s", "changes", "expected"),
    [
        (30.0, {}, "leave"),
        (300.0, {}, "move"),
        (300.0, {"elsewhere": 2}, "leave"),
        (LEAVE_S, {"elsewhere": 0}, "move"),
        (30.0, {"scaling": ScalingConfig(num_workers=2), "elsewhere": 0}, "save"),
        (30.0, {"keeps": False}, "none"),
        (None, {}, "move"),
        (None, {"waited_s": PATIENCE_S}, "leave"),
        (None, {"waited_s": PATIENCE_S, "elsewhere": 0}, "move"),
    ],
)
def test_what_a_run_does(left_s: float | None, changes: dict[str, Any], expected: str) -> None:
    assert answer(node(left_s), **changes) == expected


def test_the_drivers_own_node_is_nothing_to_leave() -> None:
    assert answer(node(30.0, ()), elsewhere=2) == "save"


def test_only_nodes_of_the_run_matter() -> None:
    addresses = [RankAddress(node_id=name, host=f"host-{name}", pid=1) for name in "abb"]
    ends = {"b": 130.0, "c": 101.0, "head": None}
    assert going(ends, addresses, "head", 100.0) == (
        Going("b", "host-b", (1, 2), 30.0),
        Going("head", "", (), None),
    )
    assert going({"a": 90.0}, addresses, "head", 100.0)[0].left_s == 0.0
    assert going({}, addresses, "head", 100.0) == ()


@pytest.mark.parametrize(
    ("told", "line"),
    [
        (
            node(29.6).noticed(5, "leave"),
            "10.0.0.7 with rank 1 will go in 30 s; the ranks save and go on without it",
        ),
        (
            node(None, (0, 3)).noticed(5, "move"),
            "10.0.0.7 with ranks 0, 3 will go; the ranks save, and leave it as soon as there is "
            "room elsewhere",
        ),
        (
            Going("n", "", (), 60.0).noticed(5, "save"),
            "the driver's node will go in 60 s; the ranks save, so that nothing is lost with it",
        ),
        (
            node(60.0).noticed(5, "none"),
            "10.0.0.7 with rank 1 will go in 60 s; the run keeps no checkpoints, so its steps are "
            "lost with it",
        ),
    ],
)
def test_the_user_gets_one_line(told: Noticed, line: str) -> None:
    assert str(told) == line


@pytest.mark.seeds(range(200))
def test_no_rank_goes_with_a_node_that_was_announced_in_time(seed: int) -> None:
    """Places elsewhere come and never go; a pause takes less than the time that the rule keeps."""
    draw = random.Random(seed)
    least = draw.randint(1, 4)
    ranks = draw.randint(least, 6)
    on_it = draw.randint(1, ranks)
    elsewhere = ranks - on_it
    deadline_s = draw.choice([None, draw.uniform(LEAVE_S, 300.0)])
    room_at_s = draw.uniform(0.0, 400.0)
    now_s, saves, left_at_s = 0.0, 0, None
    while left_at_s is None and now_s < (400.0 if deadline_s is None else deadline_s):
        if now_s >= room_at_s:
            elsewhere = max(elsewhere, ranks)
        left_s = None if deadline_s is None else deadline_s - now_s
        told = answer(node(left_s), least=least, ranks=ranks, elsewhere=elsewhere, waited_s=now_s)
        if told == "leave":
            left_at_s = now_s
            goes_on = seats(ranks, ranks, least, elsewhere, 0.0, 0.0)
            assert goes_on is not None and least <= goes_on <= ranks
        else:
            assert told == "move"
            saves += now_s == 0.0
            saves += left_s is not None and LAST_S - 1.0 < left_s <= LAST_S
        now_s += 1.0
    if left_at_s is None:
        assert elsewhere < least and saves >= 1, "it had nowhere to go, and it saved"
        assert deadline_s is None or saves == 2, "and once more before the node went"
    elif deadline_s is not None and elsewhere < ranks:
        assert deadline_s - left_at_s > LEAVE_S - 1.0, "there is time for the pause"
