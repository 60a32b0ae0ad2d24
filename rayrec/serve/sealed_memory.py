"""Memory for the rows of all tables, which no process can change once it is sealed.

A file that is mapped follows whoever writes to it: rows would change under a version whose bytes
were checked, and a page that was cut off would end the process. So rows are copied, once. The
kernel refuses every change of what is sealed (memfd_create(2)), and other processes of the user
map the same pages, so that a host holds one copy for forked replicas and for workers.

Reading a page that is not mapped yet costs some microseconds, so `populate` asks for all of them at
once.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayrec.serve.files import open_plain

_POPULATE_READ = 22  # madvise of Linux 5.14, without a name in Python


class TableMemory:
    """Memory that is written once, sealed, and read.

    A pickled one is the same memory in the other process, while this process is alive.

    Args:
        num_bytes: size of the memory.
        sealed: path of the memory that another process has sealed; "" makes a new one.
    Raises:
        OSError: the system lacks memory of this size.
    """

    def __init__(self, num_bytes: int, sealed: str = "") -> None:
        if sealed:
            self._file = os.open(sealed, os.O_RDONLY)
        else:
            self._file = os.memfd_create("rayrec-tables", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._bytes = num_bytes
        weakref.finalize(self, os.close, self._file)
        if not sealed:
            os.truncate(self._file, num_bytes)

    def write(self, piece: memoryview, start: int) -> None:
        """Write some bytes; several threads may do so.

        Raises:
            OSError: the system has no memory left.
        """
        while piece:
            # without a fault for each page, which a write through a mapping takes
            done = os.pwrite(self._file, piece, start)
            piece, start = piece[done:], start + done

    def sealed(self) -> Tensor:
        """Seal the memory, so that nobody can write it, and return all bytes, (bytes,) uint8."""
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        if not fcntl.fcntl(self._file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL:
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, seals)
        if not self._bytes:
            return torch.empty(0, dtype=torch.uint8)
        # private and read-only: the pages are those of the file, and older kernels refuse a shared
        # mapping of what is sealed
        whole = mmap.mmap(self._file, self._bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            # torch has no tensors that are read-only
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.from_numpy(np.frombuffer(whole, np.uint8))

    def __reduce__(self) -> tuple[Any, ...]:
        return TableMemory, (self._bytes, f"/proc/{os.getpid()}/fd/{self._file}")


def read_ahead(paths: Sequence[Path]) -> None:
    """Read files into the kernel's cache, one after another, without a copy in this process.

    A disk is fastest that way. It returns when the last read was asked for, and is for a thread
    beside those that need the bytes.
    """
    for path in paths:
        # whoever needs the file says what is wrong with it
        with suppress(OSError), open_plain(path) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def populate(data: Tensor) -> None:
    """Map all pages of a memory into this process, by few page faults."""
    if not data.numel():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.madvise(data.data_ptr(), data.numel(), _POPULATE_READ) != 0:
        # an older kernel: one read of every page does the same, more slowly
        data[:: mmap.PAGESIZE].sum()
