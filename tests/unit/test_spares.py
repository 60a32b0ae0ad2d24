"""Spare ranks without Ray: who takes which place."""

from __future__ import annotations

import pytest

from rayrec.driver.blame import Blame
from rayrec.driver.config import FailureConfig, RunConfig
from rayrec.driver.policies import LONGEST_PAUSE_S, pause_s
from rayrec.driver.recovery import Recovery
from rayrec.driver.roster import Place, Role, Seat, Stage
from rayrec.driver.scaling import ScalingConfig
from rayrec.driver.scaling_checks import check_run
from rayrec.driver.spares import home, substitutes
from rayrec.errors import ConfigError
from rayrec.train.events import Began


def spare(stage: Stage, node: str) -> Seat:
    return Seat(role=Role.SPARE, place=Place(1, 0), stage=stage, node=node)


WARM_A, WARM_B = spare(Stage.READY, "a"), spare(Stage.READY, "b")


def choose(
    lost: dict[int, str],
    spares: list[Seat],
    alive: str = "abc",
    busy: str = "ab",
    roam: bool = True,
) -> dict[int, int]:
    return substitutes(lost, spares, set(alive), set(busy), roam=roam)


def test_a_spare_of_the_same_node_takes_the_place() -> None:
    assert choose({1: "b"}, [WARM_A, WARM_B]) == {1: 1}
    assert choose({1: "b"}, [WARM_A]) == {}, "elsewhere the results would be others"
    starting = spare(Stage.STARTING, "b")
    assert choose({1: "b"}, [starting, WARM_B]) == {1: 1}
    assert choose({1: "b"}, [starting]) == {1: 0}, "it is ahead of a new process"
    assert choose({1: "b"}, [spare(Stage.PLACED, "b")]) == {}
    assert choose({0: "a", 1: "a"}, [WARM_A]) == {0: 0}


def test_a_spare_of_another_node_serves_where_the_node_is_gone() -> None:
    free = spare(Stage.READY, "c")
    assert choose({1: "b"}, [WARM_A, free], alive="ac") == {1: 1}, "as the ranks lay before"
    assert choose({1: "b"}, [WARM_A], alive="a") == {1: 0}
    assert choose({1: "b"}, [spare(Stage.PLACED, "c")], alive="ac") == {1: 0}, "it has room"
    assert choose({1: "b"}, [WARM_B, spare(Stage.ASKED, "")], alive="ac") == {}
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


def test_the_line_of_a_recovery_says_that_a_spare_took_the_place() -> None:
    recovery = Recovery()
    gone = Blame(rank=1, host="h", cause="its process died (x)", step=12, kind="died")
    recovery.failed(gone, 1.0)
    recovery.went([1], "relieved")
    (told,) = recovery.began(Began(step=10, path="p"), 1.6)
    assert told.spare and told.replaced
    assert str(told) == (
        "rank 1 on h lost (its process died) at step 12; a spare took its place in 0.6 s; went on "
        "from step 10"
    )
    recovery.failed(gone, 2.0)
    recovery.went([1], "relieved")
    recovery.went([1], "replaced")
    (told,) = recovery.began(Began(step=10, path="p"), 4.0)
    assert told.replaced and not told.spare, "the spare was lost, too, and got no other"


def test_spares_that_could_never_serve_are_refused() -> None:
    run = RunConfig(global_batch_size=8, steps=1)
    with pytest.raises(ConfigError, match=r"spares=2.*max_failures=0.*Give max_failures") as caught:
        check_run(run, ScalingConfig(num_workers=2, spares=2))
    assert "\n" not in str(caught.value)
    run = RunConfig(global_batch_size=8, steps=1, failure=FailureConfig(max_failures=1))
    check_run(run, ScalingConfig(num_workers=2, spares=2))
