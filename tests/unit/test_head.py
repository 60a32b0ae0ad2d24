"""Questions to Ray's head, which may not answer: who asks goes on, and hears of it."""

from __future__ import annotations

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
from rayrec.driver.head import Head
from rayrec.errors import ClusterError


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
    assert [head.news("nodes", number(n)) for n in (3, 4)] == [3, 4]
    assert head.news("places", number(5)) == 5 and head.answer(number(6)) == 6


def test_while_the_head_is_silent_a_question_waits_for_its_answer(
    head: Head, silent: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [head.news("nodes", number(n)) for n in (4, 5)] == [None, None]
    silent.set()
    assert head.answer(number(5)) == 5
    monkeypatch.setattr(module, "SOON_S", 30.0)
    assert [head.news("nodes", number(6)) for _ in range(2)] == [4, 6]


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

    for ask in (head.answer, partial(head.news, "nodes")):
        with pytest.raises(ValueError, match="no such group"):
            ask(broken)
    assert head.news("nodes", number(1)) == 1


@pytest.mark.parametrize("kind", ["RpcError", "GetTimeoutError"])
def test_a_lost_call_is_silence_and_no_error(head: Head, kind: str) -> None:
    import ray.exceptions

    def lost() -> int:
        raise getattr(ray.exceptions, kind)("connection reset")

    assert head.news("nodes", number(3)) == 3
    assert head.news("nodes", lost) is None and head.silent_s > 0
    with pytest.raises(ClusterError, match="does not answer: connection reset"):
        head.answer(lost)
    assert head.news("nodes", number(4)) == 4 and head.silent_s == 0


def test_nobody_asks_the_head_in_the_thread_of_a_run() -> None:
    """Ray's calls wait for it without a bound."""
    asks = re.compile(r"\bray\.(nodes|cluster_resources|available_resources)\(")
    files = Path(module.__file__).parent.glob("*.py")
    assert [file.name for file in files if asks.search(file.read_text())] == ["head.py"]
