"""A rank's log wakes who waits for it: by news, at the end, and otherwise when the time is over."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import pytest

from rayrec.train import progress
from rayrec.train.progress import ProgressLog

LONG_S = 60.0


def waited(
    log: ProgressLog,
    seen: int,
    timeout_s: float = LONG_S,
    meanwhile: Callable[[], None] | None = None,
) -> float:
    """Seconds that a wait took, while another thread does something a moment later."""
    timer = threading.Timer(0.05, meanwhile or (lambda: None))
    timer.start()
    start = time.monotonic()
    log.wait(seen, timeout_s)
    took = time.monotonic() - start
    timer.join()
    return took


def test_a_wait_ends_with_news() -> None:
    log = ProgressLog()
    log.add("first")
    assert waited(log, 1, meanwhile=lambda: log.add("line")) < LONG_S / 2 and log.events == [
        "first",
        "line",
    ]
    assert waited(log, 1) < LONG_S / 2  # known already


def test_a_wait_ends_with_the_log() -> None:
    log = ProgressLog()
    assert waited(log, 0, meanwhile=log.end) < LONG_S / 2
    assert waited(log, 0) < LONG_S / 2


def test_a_wait_without_news_takes_its_time() -> None:
    log = ProgressLog()
    log.add("seen")
    assert waited(log, 1, timeout_s=0.1) >= 0.09


def test_what_was_read_is_forgotten_and_what_was_not_is_told_again() -> None:
    log = ProgressLog()
    for number in range(5):
        log.add(str(number))
    assert log.after(0) == tuple("01234") and log.after(0) == tuple("01234")
    assert log.after(3) == tuple("34") and log.events == ["3", "4"]
    assert log.after(3) == tuple("34")  # the answer was lost
    log.add("5")
    assert waited(log, 5) < LONG_S / 2 and log.after(5) == ("5",)
    assert log.after(6) == () and log.events == []
    assert waited(log, 6, timeout_s=0.1) >= 0.09


def test_a_log_that_nobody_reads_keeps_the_newest_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "KEPT", 3)
    log = ProgressLog()
    for number in range(10):
        log.add(str(number))
        assert log.after(sys.maxsize) == ()
    assert log.events == ["7", "8", "9"]
    # such a rank may be asked for them later
    assert log.after(0) == ("7", "8", "9") and log.after(9) == ("9",)
