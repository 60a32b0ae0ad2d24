"""Questions to Ray's head, which may not answer: who asks goes on, and hears of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from rayrec.driver import head as module
from rayrec.driver.head import Head


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
    head.tell(said.append)
    head.tell(said.append)
    assert len(said) == 1 and said[0].startswith("the driver does not hear from Ray: ")
    silent.set()
    head.answer(number(1))
    head.tell(said.append)
    head.tell(said.append)
    assert len(said) == 2 and said[1].startswith("the driver hears from Ray again, after ")


def test_what_a_question_raises_is_raised_where_its_answer_is_wanted(head: Head) -> None:
    def broken() -> int:
        raise ValueError("no such group")

    for ask in (head.answer, partial(head.recent, "nodes")):
        with pytest.raises(ValueError, match="no such group"):
            ask(broken)
    assert head.recent("nodes", number(1)) == 1


def test_a_lost_call_is_silence_and_no_error(head: Head) -> None:
    from ray.exceptions import RpcError

    def lost() -> int:
        raise RpcError("connection reset", rpc_code=14)

    assert head.recent("nodes", number(3)) == 3
    assert head.recent("nodes", lost) == 3 and head.silent_s > 0
    assert head.recent("nodes", number(4)) == 4 and head.silent_s == 0
