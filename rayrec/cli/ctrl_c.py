"""Ctrl-C while the command line loads. Imports little: it is there from the first moment on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """End the process at Ctrl-C, with the line and the code of `rayrec.command.run_command`.

    Imports are made inside: a KeyboardInterrupt would end them with a traceback, and torch swallows
    one where it imports numpy.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, b"interrupted\n")
        os._exit(128 + number)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
