"""Shared memory of one host: memory without a name, a word to wait on, and the life of a peer.

Memory is a memfd, which a peer opens through /proc/PID/fd. So nothing lies in /dev/shm, neither its
size nor that of a container limits it, and the kernel frees it with the last process that maps it,
whatever ended that process. Waiting spins briefly and then sleeps on a futex. A peer's life is
watched by a pidfd, so that a process that ends is noticed at once and its id is never mistaken for
another's.

Linux on x86-64 only: `unsupported` says why it does not work elsewhere. The order in which stores
become visible is what that processor guarantees for plain stores, and Python has no weaker one to
offer.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_FUTEX = 202  # the system call's number on x86-64
_WAIT, _WAKE = 0, 1


def unsupported() -> str | None:
    """Why ranks of this process cannot use shared memory, or None."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"needs Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "needs a Python with os.memfd_create and os.pidfd_open"
    return None


def unnamed_file(size: int) -> int:
    """Return the fd of a file of zeros in memory that has no name."""
    fd = os.memfd_create("rayrec", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


@contextmanager
def opened(pid: int, fd: int) -> Iterator[int]:
    """Open a file that another process has open, and close it at the end of the context.

    Raises:
        OSError: the process is gone, or belongs to another user or namespace.
    """
    file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


class Segment:
    """Shared memory of this process or of a peer, mapped.

    Attributes:
        bytes: (size,) uint8, all of it.
        words: the same as 64-bit integers.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self.memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
        self.bytes: Tensor = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.words = memoryview(self.memory).cast("q")
        self.address = self.bytes.data_ptr()

    @staticmethod
    def attach(pid: int, fd: int, size: int) -> Segment:
        """Map a peer's memory.

        Raises:
            OSError: the peer is gone, or belongs to another user or namespace.
        """
        with opened(pid, fd) as file:
            return Segment(file, size)


class _Descriptor:
    """A file descriptor that ends with its owner."""

    fd = -1

    def close(self) -> None:
        """Close it; a second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


class OwnSegment(Segment, _Descriptor):
    """Memory that this process made, zeroed; peers can attach until `close`, and mappings stay."""

    def __init__(self, size: int) -> None:
        self.fd = unnamed_file(size)
        super().__init__(self.fd, size)


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def futex_wait(address: int, seen: int, timeout_s: float) -> None:
    """Sleep until `futex_wake` on the 32-bit word at `address`; it may wake for nothing.

    It returns at once when the word differs from the low half of `seen`.
    """
    assert _libc is not None
    spec = _TimeSpec(int(timeout_s), int(timeout_s % 1 * 1e9))
    word, value = ctypes.c_void_p(address), ctypes.c_uint32(seen & 0xFFFFFFFF)
    _libc.syscall(_FUTEX, word, _WAIT, value, ctypes.byref(spec), None, 0)


def futex_wake(address: int) -> None:
    """Wake everybody who sleeps on the word."""
    assert _libc is not None
    _libc.syscall(_FUTEX, ctypes.c_void_p(address), _WAKE, 0x7FFFFFFF, None, None, 0)


class PeerLife(_Descriptor):
    """A peer's process, watched for its end."""

    def __init__(self, pid: int) -> None:
        self.fd = os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def ended(self) -> bool:
        """Return whether the process has ended."""
        return bool(self._poll.poll(0))
