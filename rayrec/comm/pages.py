"""Memory for tables on CPU, on huge pages where the kernel allows them.

Looking up random rows is bound by the translation of addresses, which huge pages make cheaper.
Private memory gets them by madvise. Shared memory has none as long as the system's setting for it
is "never", which is the default; but MADV_COLLAPSE (Linux 6.1) makes them all the same, where the
address of the memory and its place in the file agree.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
Allocate = Callable[[int], Tensor]  # bytes -> (bytes,) uint8
_COLLAPSE = 25  # MADV_COLLAPSE
_BUSY = (errno.EAGAIN, errno.EBUSY)  # of this page alone
_READ_WRITE, _NONE = 3, 0
_SHARED_FIXED, _PRIVATE_ANONYMOUS = 0x11, 0x22  # Linux, all architectures with 2 MiB pages

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
if _libc is not None:
    _address, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    _libc.mmap.restype = _address
    _libc.mmap.argtypes = [_address, _size, _int, _int, _int, ctypes.c_long]
    _libc.munmap.argtypes = [_address, _size]
    _libc.madvise.argtypes = [_address, _size, _int]


def private_memory(size: int) -> Tensor:
    """Return (size,) uint8 zeros of this process, on huge pages where it can have them."""
    if size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def map_file(fd: int, size: int) -> Tensor:
    """Map a file as (size,) uint8 so that it can have huge pages (Linux only).

    The mapping ends with the tensor.

    Raises:
        OSError: the kernel refuses.
    """
    assert _libc is not None
    whole = size + HUGE_PAGE
    base = _libc.mmap(None, whole, _NONE, _PRIVATE_ANONYMOUS, -1, 0)  # addresses to choose from
    start = -(-base // HUGE_PAGE) * HUGE_PAGE
    if base == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"no addresses for {size} bytes of shared memory")
    if _libc.mmap(start, size, _READ_WRITE, _SHARED_FIXED, fd, 0) != start:
        number = ctypes.get_errno()
        _libc.munmap(base, whole)
        raise OSError(number, f"cannot map {size} bytes of shared memory")
    mapping: Any = type("Mapping", (_Mapping, ctypes.c_char * size), {"whole": (base, whole)})
    return torch.frombuffer(mapping.from_address(start), dtype=torch.uint8)


class _Mapping:
    """Mapped memory, which is unmapped with the last tensor over it."""

    whole: tuple[int, int]

    def __del__(self, _unmap: Any = None if _libc is None else _libc.munmap) -> None:
        _unmap(*self.whole)


def make_huge(memory: Tensor) -> None:
    """Put the 2 MiB pages that begin inside shared `memory` on huge pages, where the kernel can."""
    if _libc is None:
        return
    first = -(-memory.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    last = -(-(memory.data_ptr() + memory.numel() * memory.element_size()) // HUGE_PAGE) * HUGE_PAGE
    for page in range(first, last, HUGE_PAGE):
        # a page of the file comes into being, else there is nothing to collapse
        _ = ctypes.c_char.from_address(page).value
        if _libc.madvise(page, HUGE_PAGE, _COLLAPSE) and ctypes.get_errno() not in _BUSY:
            return
