"""A rank's log wakes who waits for it: by news, at the end, and otherwise when the time is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

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
