"""Questions to Ray's head, which may not answer: who asks goes on, and hears of it."""

from __future__ import annotations

import importlib
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from rayrec.command import run_command
from rayrec.driver import head as module
from rayrec.driver import reaper
from rayrec.driver.cluster import connected
from rayrec.driver.commands import Ask
from rayrec.driver.head import Head
from rayrec.driver.rooms import PlacementGroups
from rayrec.driver.roster import Place
from rayrec.errors import ClusterError

# a function of Ray has the name of its module
module_of_places = importlib.import_module("ray.util.placement_group")


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    # a head that answers is waited for as long as it takes
    monkeypatch.setattr(module, "SOON_S", 30.0)
    head = Head()
    yield head
    head.begin()


@pytest.fixture
def silent(head: Head, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The head owes an answer, until the event is set."""
    answers = threading.Event()
    monkeypatch.setattr(module, "SOON_S", 0.01)
    head.aside(partial(answers.wait, 30.0))
    monkeypatch.setattr(module, "SILENT_S", 1e-6)
    yield answers
    answers.set()


def number(answer: int) -> Callable[[], int]:
    return lambda: answer


def look(head: Head, said: list[str]) -> None:
    """As the loop of a run does, whenever it was."""
    head._beat_at = 0.0
    head.look(said.append)


def test_a_question_has_its_newest_answer(head: Head) -> None:
    assert [head.recent("nodes", number(n), 0) for n in (3, 4)] == [3, 4]
    assert head.recent("places", number(5)) == 5 and head.answer(number(6)) == 6


def test_while_the_head_is_silent_its_last_answer_is_taken(
    head: Head, silent: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    head._last["nodes"] = 3
    assert head.recent("nodes", number(4), 0) == 3
    assert head.recent("places", number(4), 0) == 0
    silent.set()
    assert head.answer(number(5)) == 5
    monkeypatch.setattr(module, "SOON_S", 30.0)
    assert (head.recent("nodes", number(6)), head.recent("places", number(6))) == (6, 6)


def test_a_signal_ends_the_wait_for_an_answer(head: Head, silent: threading.Event) -> None:
    looks: list[int] = []

    def check() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        head.answer(number(1), check)


def test_silence_and_its_end_are_told_once(head: Head, silent: threading.Event) -> None:
    said: list[str] = []
    look(head, said)
    look(head, said)
    assert len(said) == 1 and said[0].startswith("the driver does not hear from Ray: ")
    silent.set()
    head.answer(number(1))
    look(head, said)
    look(head, said)
    assert len(said) == 2 and said[1].startswith("the driver hears from Ray again, after ")


def test_a_head_that_is_gone_ends_the_run_before_ray_ends_the_process(
    head: Head, silent: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "alive_nodes", frozenset)
    monkeypatch.setenv(module.RECONNECT, "1e-6")
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        head.address = f"127.0.0.1:{listening.getsockname()[1]}"
        for _ in range(3):
            look(head, said)
    assert len(said) == 1, "it is overloaded, and there"
    look(head, said)
    with pytest.raises(ClusterError, match=rf"cluster at {head.address} is gone"):
        look(head, said)
    assert run_command(lambda argv: look(head, said) or 0) == 3


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Exception("The current node timed out during startup."), 3),
        (ValueError("the object store needs 75 MB"), 2),
        (OSError("AF_UNIX path length cannot exceed 107 bytes"), 2),
    ],
)
def test_a_machine_on_which_ray_does_not_start_is_no_mistake_of_the_users(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray waits for 30 s before it says so, which a test cannot."""
    import ray

    def fails(**options: object) -> None:
        raise error

    def main(argv: object) -> int:
        with connected():
            return 0

    monkeypatch.setattr(ray, "init", fails)
    # The tests of tests/ray have one cluster for all, which may be that of this process. It is not
    # what is left of the one that did not start, and Ray ends a process that has lost its head.
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(reaper, "files_of", lambda driver: "/no cluster")
    for name in ("RAY_AUTH_MODE", "RAY_worker_niceness"):
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert run_command(main, []) == code
    said = capsys.readouterr().err
    assert "Ray does not start on this machine" in said and ("try again" in said) == (code == 3)


def test_what_a_question_raises_is_raised_where_its_answer_is_wanted(head: Head) -> None:
    def broken() -> int:
        raise ValueError("no such group")

    for ask in (head.answer, partial(head.recent, "nodes")):
        with pytest.raises(ValueError, match="no such group"):
            ask(broken)
    assert head.recent("nodes", number(1)) == 1


@pytest.mark.parametrize("kind", ["RpcError", "GetTimeoutError"])
def test_a_lost_call_is_silence_and_no_error(head: Head, kind: str) -> None:
    import ray.exceptions

    def lost() -> int:
        raise getattr(ray.exceptions, kind)("connection reset")

    assert head.recent("nodes", number(3)) == 3
    assert head.recent("nodes", lost) == 3 and head.silent_s > 0
    with pytest.raises(ClusterError, match="does not answer: connection reset"):
        head.answer(lost)
    assert head.recent("nodes", number(4)) == 4 and head.silent_s == 0


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
    monkeypatch.setattr("rayrec.driver.rooms.head", head)
    monkeypatch.setattr("rayrec.driver.rooms.alive_nodes", lambda: frozenset({"here"}))
    monkeypatch.setattr("rayrec.driver.rooms.draining", dict)
    monkeypatch.setattr("rayrec.driver.rooms.bundles", lambda group: ("CREATED", {0: "here"}))
    groups = PlacementGroups({"CPU": 1.0})
    for number in (0, 1):
        groups.ask(Ask(group=number, near="here"))
    rooms = groups.rooms(None)
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
    monkeypatch.setattr("rayrec.driver.rooms.head", head)
    monkeypatch.setattr("rayrec.driver.rooms.alive_nodes", lambda: frozenset({"here"}))
    monkeypatch.setattr("rayrec.driver.rooms.draining", dict)
    monkeypatch.setattr("rayrec.driver.rooms.bundles", lambda group: ("CREATED", {0: "here"}))
    groups = PlacementGroups({"CPU": 1.0})
    kept: set[int] = set()
    for number in range(6):
        groups.ask(Ask(group=number))
        kept.add(number)
        if chance.random() < 0.5:
            groups.rooms(None)
        if chance.random() < 0.5:
            kept.remove(gone := chance.choice(sorted(kept)))
            groups.give_back(gone)
    if chance.random() < 0.5:
        loses[0] = False
        for _ in range(2):
            rooms = groups.rooms(None)
        assert rooms is not None and {place.group for place in rooms.nodes} == kept
        assert {name.rpartition("-")[2] for name in there} == {str(number) for number in kept}
    loses[0] = False
    groups.close()
    assert not there


def test_a_place_that_was_told_last_is_not_lost_while_the_head_is_silent(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr("rayrec.driver.rooms.head", head)
    monkeypatch.setattr("rayrec.driver.rooms.alive_nodes", frozenset)
    monkeypatch.setattr("rayrec.driver.rooms.draining", dict)
    groups = PlacementGroups({"CPU": 1.0})
    told = groups.rooms(None)
    assert told is not None
    monkeypatch.setattr(module, "SOON_S", 0.01)
    head.aside(partial(answers.wait, 30.0))
    assert groups.rooms(told) is groups.rooms(None) is told
    answers.set()


def test_nobody_asks_the_head_in_the_thread_of_a_run() -> None:
    """Ray's calls wait for it without a bound."""
    asks = re.compile(r"\bray\.(nodes|cluster_resources|available_resources)\(")
    files = Path(module.__file__).parent.glob("*.py")
    assert [file.name for file in files if asks.search(file.read_text())] == ["head.py"]
