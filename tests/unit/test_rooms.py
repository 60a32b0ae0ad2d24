"""Places of a run on a Ray cluster, asked for and given back while calls are lost or unanswered."""

from __future__ import annotations

import importlib
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from rayrec.driver import head as module
from rayrec.driver.commands import Ask
from rayrec.driver.head import Head
from rayrec.driver.rank_group import Prepared
from rayrec.driver.ray_cluster import RayCluster
from rayrec.driver.rooms import PlacementGroups, remove_group
from rayrec.driver.roster import Place
from rayrec.driver.run import Rules, Run
from rayrec.driver.scaling import ScalingConfig
from rayrec.machine.signals import Signals

# a function of Ray has the name of its module
module_of_places = importlib.import_module("ray.util.placement_group")


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    # a head that answers is waited for as long as it takes
    monkeypatch.setattr(module, "SOON_S", 30.0)
    head = Head()
    monkeypatch.setattr("rayrec.driver.rooms.head", head)
    monkeypatch.setattr("rayrec.driver.rooms.alive_nodes", lambda: frozenset({"here"}))
    monkeypatch.setattr("rayrec.driver.rooms.draining", dict)
    monkeypatch.setattr("rayrec.driver.rooms.bundles", lambda group: ("CREATED", {0: "here"}))
    yield head
    head.begin()


@pytest.mark.parametrize("kind", ["RpcError", "GetTimeoutError"])
def test_a_place_is_asked_for_again_where_the_call_is_lost(
    head: Head, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    import ray.exceptions

    asked: list[str] = []

    def ask(bundles: object, strategy: str, name: str, _soft_target_node_id: str) -> object:
        asked.append(_soft_target_node_id)
        if len(asked) == 2:
            raise getattr(ray.exceptions, kind)("connection reset")
        return object()

    def none(name: str) -> object:
        raise ValueError("no such group")

    monkeypatch.setattr(module_of_places, "placement_group", ask)
    monkeypatch.setattr(module_of_places, "get_placement_group", none)
    groups = PlacementGroups({"CPU": 1.0})
    for number in (0, 1):
        groups.ask(Ask(group=number, near="here"))
    rooms = groups.rooms()
    assert asked == ["here"] * 3 and rooms is not None
    assert rooms.nodes == {Place(0, 0): "here", Place(1, 0): "here"} and rooms.base == "CREATED"


@pytest.mark.parametrize("seed", range(60))
def test_no_place_is_made_twice_or_kept_whatever_calls_are_lost(
    head: Head, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A lost call may have been carried out, or not; of the two rounds of the end one is whole."""
    import ray.exceptions

    chance = random.Random(seed)
    there: set[str] = set()
    loses = [True]

    def call(do: Callable[[], None]) -> None:
        loss = chance.random() if loses[0] else 1.0
        if loss > 0.3:
            do()
        if loss < 0.6:
            raise ray.exceptions.RpcError("connection reset")

    def make(bundles: object, strategy: str, name: str, **near: object) -> str:
        assert name not in there
        call(partial(there.add, name))
        return name

    def get(name: str) -> str:
        call(lambda: None)
        if name not in there:
            raise ValueError("no such group")
        return name

    monkeypatch.setattr(module_of_places, "placement_group", make)
    monkeypatch.setattr(module_of_places, "get_placement_group", get)
    monkeypatch.setattr(
        module_of_places, "remove_placement_group", lambda g: call(partial(there.discard, g))
    )
    groups = PlacementGroups({"CPU": 1.0})
    kept: set[int] = set()
    for number in range(6):
        groups.ask(Ask(group=number))
        kept.add(number)
        if chance.random() < 0.5:
            groups.rooms()
        if chance.random() < 0.5:
            kept.remove(gone := chance.choice(sorted(kept)))
            groups.give_back(gone)
    if chance.random() < 0.5:
        loses[0] = False
        for _ in range(2):
            rooms = groups.rooms()
        assert rooms is not None and {place.group for place in rooms.nodes} == kept
        assert {name.rpartition("-")[2] for name in there} == {str(number) for number in kept}
    loses[0] = False
    groups.close()
    assert not there


def test_a_lost_call_may_make_its_place_late(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.exceptions

    asked, looked = (iter(one) for one in (["lost", "name taken"], ["none", "there"]))

    def make(*args: object, **near: object) -> object:
        if next(asked) == "lost":
            raise ray.exceptions.RpcError("connection reset")
        raise ray.exceptions.RaySystemError("its name already exists")

    def get(name: str) -> str:
        if next(looked) == "none":
            raise ValueError("no such group")
        return name

    monkeypatch.setattr(module_of_places, "placement_group", make)
    monkeypatch.setattr(module_of_places, "get_placement_group", get)
    groups = PlacementGroups({"CPU": 1.0})
    groups.ask(Ask(group=0))
    for wanted in ({}, {Place(0, 0): "here"}):
        rooms = groups.rooms()
        assert rooms is not None and rooms.nodes == wanted


@pytest.mark.parametrize("ends", [True, False])
def test_a_place_is_given_back_once_ray_is_not_placing_it(
    monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """Ray would lose its room; a head that goes on placing it for long does not hold a run up."""
    states = iter(["QUEUED", "SCHEDULING_STARTED", *(["FINISHED"] if ends else [])])
    seen: list[str] = []

    def state(group: object) -> tuple[str, dict[int, str]]:
        seen.append(next(states, "SCHEDULING_STARTED"))
        return seen[-1], {}

    monkeypatch.setattr("rayrec.driver.rooms.bundles", state)
    # a machine under load may take as long as that for one look
    monkeypatch.setattr("rayrec.driver.rooms.PLACED_S", 30.0 if ends else 0.1)
    monkeypatch.setattr(module_of_places, "remove_placement_group", seen.append)
    remove_group("the group")
    assert seen[-1] == "the group"
    assert ("FINISHED" in seen) == ends


def test_a_place_that_was_told_last_is_not_lost_while_the_head_is_silent(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    run = Run.of(Rules(scaling=ScalingConfig()))
    run.needs = frozenset({"rooms"})
    cluster = RayCluster(run, lambda group: Prepared(None), Signals(), threading.Event(), print)
    told = cluster.look().rooms
    assert told is not None
    monkeypatch.setattr(module, "SOON_S", 0.01)
    head.aside(partial(answers.wait, 30.0))
    assert cluster.look().rooms is cluster.look().rooms is told
    answers.set()
