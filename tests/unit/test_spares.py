"""Spare ranks without Ray: who takes which place, and random worlds of spares and nodes."""

from __future__ import annotations

import random

import pytest

from rayrec.driver.blame import Blame
from rayrec.driver.config import FailureConfig, RunConfig
from rayrec.driver.recovery import Recovery
from rayrec.driver.scaling import ScalingConfig
from rayrec.driver.shape import check_recovery
from rayrec.driver.spares import (
    LONGEST_PAUSE_S,
    NEXT,
    Sign,
    Stage,
    Standby,
    home,
    pause_s,
    substitutes,
)
from rayrec.errors import ConfigError
from rayrec.runs.scaling import scaling_from
from rayrec.train.events import Began

WARM_A, WARM_B = Standby(Stage.WARM, "a"), Standby(Stage.WARM, "b")


def choose(
    lost: dict[int, str],
    spares: list[Standby],
    alive: str = "abc",
    busy: str = "ab",
    roam: bool = True,
) -> dict[int, int]:
    return substitutes(lost, spares, set(alive), set(busy), roam=roam)


def test_a_spare_of_the_same_node_takes_the_place() -> None:
    assert choose({1: "b"}, [WARM_A, WARM_B]) == {1: 1}
    assert choose({1: "b"}, [WARM_A]) == {}, "elsewhere the results would be others"
    starting = Standby(Stage.STARTING, "b")
    assert choose({1: "b"}, [starting, WARM_B]) == {1: 1}
    assert choose({1: "b"}, [starting]) == {1: 0}, "it is ahead of a new process"
    assert choose({1: "b"}, [Standby(Stage.VACANT, "b")]) == {}
    assert choose({0: "a", 1: "a"}, [WARM_A]) == {0: 0}


def test_a_spare_of_another_node_serves_where_the_node_is_gone() -> None:
    free = Standby(Stage.WARM, "c")
    assert choose({1: "b"}, [WARM_A, free], alive="ac") == {1: 1}, "as the ranks lay before"
    assert choose({1: "b"}, [WARM_A], alive="a") == {1: 0}
    assert choose({1: "b"}, [Standby(Stage.VACANT, "c")], alive="ac") == {1: 0}, "it has room"
    assert choose({1: "b"}, [WARM_B, Standby(Stage.ASKED, "")], alive="ac") == {}
    assert choose({1: "b"}, [WARM_A], alive="a", roam=False) == {}
    assert choose({0: "b", 1: "a"}, [WARM_A], alive="a") == {1: 0}, "who lives on first"


def test_spares_are_wanted_where_most_ranks_are() -> None:
    ranks = ["a", "a", "b", "b", "b"]
    wanted: list[str] = []
    for _ in range(5):
        wanted.append(home(ranks, wanted))
    assert wanted == ["b", "a", "b", "a", "b"]


def test_a_spare_that_dies_again_and_again_is_started_less_often() -> None:
    assert [pause_s(deaths) for deaths in (1, 2, 3)] == [1.0, 2.0, 4.0]
    assert pause_s(50) == LONGEST_PAUSE_S


@pytest.mark.seeds(range(50))
def test_no_world_of_spares_leads_astray(seed: int) -> None:
    for number in range(20):
        check_world(random.Random(1000 * seed + number))


def check_world(draw: random.Random) -> None:
    """Spares go any way through their stages, and ranks are lost at random moments."""
    nodes = "abcd"[: draw.randint(1, 4)]
    ranks = [draw.choice(nodes) for _ in range(draw.randint(1, 6))]
    spares = [Standby(Stage.ASKED, "") for _ in range(draw.randint(1, 4))]
    for _ in range(30):
        number = draw.randrange(len(spares))
        stage, node = spares[number]
        signs: list[Sign] = [sign for sign in NEXT[stage] if sign != "taken"]
        sign = draw.choice(signs)
        node = draw.choice(nodes) if sign == "placed" else node
        spares[number] = Standby(NEXT[stage][sign], "" if sign == "unplaced" else node)
        if draw.random() < 0.3:
            alive = set(draw.sample(nodes, draw.randint(0, len(nodes))))
            lose(draw, ranks, spares, alive)


def lose(draw: random.Random, ranks: list[str], spares: list[Standby], alive: set[str]) -> None:
    """Lose the ranks of dead nodes and some more, and swap places with those that relieve them."""
    lost = {r: n for r, n in enumerate(ranks) if n not in alive or draw.random() < 0.3}
    busy = {node for rank, node in enumerate(ranks) if rank not in lost}
    roam = draw.random() < 0.7
    chosen = substitutes(lost, spares, alive, busy, roam=roam)
    assert set(chosen) <= set(lost) and len(set(chosen.values())) == len(chosen)
    for rank, number in chosen.items():
        stage, node = spares[number]
        assert node in alive and "taken" in NEXT[stage]
        same = node == lost[rank]
        assert same or (roam and lost[rank] not in alive)
        assert not same or stage is not Stage.VACANT
    idle = [spare for number, spare in enumerate(spares) if number not in chosen.values()]
    for rank in set(lost) - set(chosen):
        at_hand = [s for s in idle if s.stage in (Stage.WARM, Stage.STARTING)]
        assert not any(s.node == lost[rank] for s in at_hand if s.node in alive)
        if roam and lost[rank] not in alive:
            assert not any(s.node in alive for s in idle if s.stage is not Stage.ASKED)
    for rank, number in chosen.items():
        ranks[rank], before = spares[number].node, ranks[rank]
        spares[number] = Standby(NEXT[spares[number].stage]["taken"], before)


def test_the_line_of_a_recovery_says_that_a_spare_took_the_place() -> None:
    recovery = Recovery()
    gone = Blame(rank=1, host="h", cause="its process died (x)", step=12, kind="died")
    recovery.failed(gone, 1.0)
    recovery.relieved([1])
    (told,) = recovery.began(Began(step=10, path="p"), 1.6)
    assert told.spare and told.replaced
    assert str(told) == (
        "rank 1 on h lost (its process died) at step 12; a spare took its place in 0.6 s; went on "
        "from step 10"
    )
    recovery.failed(gone, 2.0)
    recovery.relieved([1])
    recovery.replaced([1])
    (told,) = recovery.began(Began(step=10, path="p"), 4.0)
    assert told.replaced and not told.spare, "the spare was lost, too, and got no other"


def test_spares_that_could_never_serve_are_refused() -> None:
    run = RunConfig(global_batch_size=8, steps=1)
    with pytest.raises(ConfigError, match=r"spares=2.*max_failures=0.*--max-failures") as caught:
        check_recovery(run, ScalingConfig(num_workers=2, spares=2))
    assert "\n" not in str(caught.value)
    run = RunConfig(global_batch_size=8, steps=1, failure=FailureConfig(max_failures=1))
    check_recovery(run, ScalingConfig(num_workers=2, spares=2))
    given = {"gpu": False, "cpus_per_rank": 1, "pin_cores": False, "placement_timeout": None}
    with pytest.raises(ConfigError, match=r"--spares is about.*--local"):
        scaling_from(ranks=None, local=True, spares=1, **given)  # type: ignore[arg-type]
    assert scaling_from(ranks=3, local=False, spares=1, **given).spares == 1  # type: ignore[arg-type]
