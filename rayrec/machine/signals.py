"""Ctrl-C and SIGTERM while a run goes on: the first one is held until the run can obey it.

A signal that Python turns into an exception wherever the program stands may be swallowed inside a
library that is starting up. Here the first SIGINT or SIGTERM only sets a flag: a run that starts
looks at it between two parts of the start, and a run that trains asks its ranks to stop and save. A
second Ctrl-C raises `KeyboardInterrupt` at once, for a run that does not obey. `ray.init` installs
a SIGTERM handler of its own, so `install` is called again after it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rayrec.errors import RunInterrupted

_HELD = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """The signals of a block, see `hold_signals`.

    Attributes:
        number: the first signal that came, or None.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def came(self) -> bool:
        """True once a signal has come."""
        return self.number is not None

    def check(self) -> None:
        """Obey a signal that came, where nothing has to be saved yet.

        Raises:
            RunInterrupted: a signal came.
        """
        if self.number is not None:
            raise RunInterrupted(self.number)

    def install(self) -> None:
        """Take the signals over; a second call takes them back from a library that took them.

        Python delivers signals to the main thread only, so in any other it does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _HELD:
            before = signal.getsignal(number)
            if before != self._handle:
                signal.signal(number, self._handle)
                self._before.setdefault(number, before)

    def restore(self) -> None:
        """Give the signals back to those who had them."""
        for number, before in self._before.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.number is None:
            self.number = number


_active: Signals | None = None


@contextmanager
def hold_signals() -> Iterator[Signals]:
    """Hold SIGINT and SIGTERM inside the block; a block inside another shares its signals.

    Python delivers signals to the main thread only. In any other thread the block holds nothing.
    """
    global _active
    if _active is not None and threading.current_thread() is threading.main_thread():
        _active.install()
        yield _active
        return
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    signals.install()
    _active = signals
    try:
        yield signals
    finally:
        _active = None
        signals.restore()
