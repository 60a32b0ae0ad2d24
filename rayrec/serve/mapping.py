"""Files as one stretch of memory: each is mapped where the one before it ends.

The lookup takes the rows of all tables as one tensor, and every table has a file of its own. So one
range of addresses is reserved, and the files are mapped into it, page by page, read-only and
shared: any number of processes of a host hold one copy. Reading a page that is not mapped yet costs
some microseconds, so `populate` asks the kernel for all of them at once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_POPULATE_READ = 22  # madvise of Linux 5.14, without a name in Python
_PAGE = mmap.PAGESIZE


def map_files(paths: Sequence[Path]) -> tuple[Tensor, list[int]]:
    """Map files read-only, one after another.

    Args:
        paths: local files, none of them empty.
    Returns:
        (bytes,) uint8 of all of them, which must not be written to, and where each begins.
    Raises:
        OSError: a file cannot be opened or mapped.
    """
    sizes = [os.path.getsize(path) for path in paths]
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _PAGE) * _PAGE
    if not end:
        return torch.empty(0, dtype=torch.uint8), []
    if not sys.platform.startswith("linux"):
        return _read_files(paths, sizes, starts, end), starts
    libc = _libc()
    free = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    base = libc.mmap(None, end, _PROT_NONE, free, -1, 0)
    _check(base)
    whole = (ctypes.c_uint8 * end).from_address(base)
    # not at the end of the process, where a thread may still read
    weakref.finalize(whole, libc.munmap, base, end).atexit = False
    for path, size, start in zip(paths, sizes, starts, strict=True):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            place = mmap.MAP_SHARED | _MAP_FIXED
            _check(libc.mmap(base + start, size, mmap.PROT_READ, place, descriptor, 0))
        finally:
            os.close(descriptor)
    return torch.from_numpy(np.ctypeslib.as_array(whole)), starts


def read_ahead(paths: Sequence[Path]) -> None:
    """Have the kernel read files into its cache, one after another, without a copy of them here.

    A disk is fastest that way; a mapped file is read in small pieces as its pages are asked for. It
    returns when the last read was asked for, and is for a thread beside that which needs the pages.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        # whoever needs the file says what is wrong with it
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)


def populate(data: Tensor) -> None:
    """Have all pages of mapped files in memory and in this process, by few faults."""
    if not data.numel() or not sys.platform.startswith("linux"):
        return
    if _libc().madvise(data.data_ptr(), data.numel(), _POPULATE_READ) != 0:
        # an older kernel: one read of every page does the same, more slowly
        data[::_PAGE].sum()


def _read_files(
    paths: Sequence[Path], sizes: Sequence[int], starts: Sequence[int], end: int
) -> Tensor:
    data = torch.zeros(end, dtype=torch.uint8)
    view = data.numpy().data
    for path, size, start in zip(paths, sizes, starts, strict=True):
        with open(path, "rb") as file:
            file.readinto(view[start : start + size])
    return data


def _check(address: int | None) -> None:
    if address is None or address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"the tables cannot be mapped into memory: {os.strerror(code)}")


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    sized = ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [*sized, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = list(sized)
    libc.madvise.argtypes = [*sized, ctypes.c_int]
    return libc
