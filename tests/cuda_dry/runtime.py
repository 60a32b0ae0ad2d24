"""What tests ask of the stand-in for the CUDA runtime (`native/`): where the host waited.

A host sync is a call that returns only when the device is done with what it was given. torch's own
code makes them (a blocking copy, `item`, `tolist`), and they are counted where the runtime is
called. Operators that are computed on the CPU here but sync on a GPU (`nonzero`, an index by a
mask) report themselves.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_Watch = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_library = ctypes.CDLL(None)  # the stand-in is preloaded, so its names are the process's own


class Sync(NamedTuple):
    """One stop of the host.

    Attributes:
        call: of the CUDA runtime, or the operator that would make one.
        thread: name of the thread that stopped.
        where: innermost line of rayrec that led to it, as "distributed/steps/route.py:214 route".
        inner: innermost line of all, which may be torch's or FBGEMM's.
    """

    call: str
    thread: str
    where: str
    inner: str


_found: list[list[Sync]] = []


def stopped(call: str) -> None:
    """Count one sync."""
    if not _found:
        return
    sync = Sync(call, threading.current_thread().name, *_place())
    for counting in _found:
        counting.append(sync)


@contextmanager
def syncs() -> Iterator[list[Sync]]:
    """Collects the syncs of all threads while the block runs."""
    found: list[Sync] = []
    _found.append(found)
    try:
        yield found
    finally:
        _found.remove(found)


@contextmanager
def launches_allowed() -> Iterator[None]:
    """In this thread a launch does nothing: the caller computes what the kernel would have."""
    _library.dry_allow_launches(1)
    try:
        yield
    finally:
        _library.dry_allow_launches(0)


def _place() -> tuple[str, str]:
    frame = sys._getframe(2)
    inner = ""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.parent != Path(__file__).parent:
            line = f":{frame.f_lineno} {frame.f_code.co_name}"
            inner = inner or path.name + line
            if path.is_relative_to(ROOT / "rayrec"):
                return f"{path.relative_to(ROOT / 'rayrec')}{line}", inner
        frame = frame.f_back  # type: ignore[assignment]
    return "", inner


@_Watch
def _on_stop(call: bytes) -> None:
    stopped(call.decode())


_library.dry_watch(_on_stop)
