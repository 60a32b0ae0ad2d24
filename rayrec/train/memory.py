"""How glibc's malloc serves a training process.

By default it maps large tensors anew in every step and gives them back, so that half of a step's CPU time goes into page faults. With high
thresholds freed memory stays with the process; with one arena that holds for the training thread, too, whose own arena would be unmapped
whenever it is empty; and on huge pages the processor finds the addresses of a step's buffers faster.

torch aligns tensors to 64 bytes. What malloc cuts off for that goes to small objects, so a freed buffer is just too small for the next one
of its size, and a heap that gives nothing back grows to twice or thrice what is in use. Large tensors on whole pages leave cuts that malloc
mostly joins again.
"""

from __future__ import annotations

import ctypes
import mmap
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of mallopt(3)
_KEPT_BYTES = 1 << 30
_WHOLE_PAGES = "THP_MEM_ALLOC_ENABLE"  # read by torch when it allocates for the first time
_HUGE_HEAP_BYTES = 256 << 20  # the first part of the heap, as far as it is used
_HUGE_PAGE = 2 << 20


def tune_malloc() -> bool:
    """Keep freed memory in this process, unless the environment sets glibc's thresholds; call it before large allocations and threads.

    Returns:
        Whether it was done.
    """
    if any(name in os.environ for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")):
        return False
    try:
        libc = ctypes.CDLL("libc.so.6")
        mallopt = libc.mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_THRESHOLD, _KEPT_BYTES), (_M_TRIM_THRESHOLD, _KEPT_BYTES), (_M_ARENA_MAX, 1))
    done = all(mallopt(what, value) for what, value in settings)
    os.environ.setdefault(_WHOLE_PAGES, "1")
    if done and hasattr(mmap, "MADV_HUGEPAGE"):
        _advise_huge_pages(libc)
    return done


def _advise_huge_pages(libc: ctypes.CDLL) -> None:
    """Mark the part of the heap that the next allocations will use."""
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    address = libc.malloc(_HUGE_HEAP_BYTES)
    if address:
        first, last = -(-address // _HUGE_PAGE) * _HUGE_PAGE, (address + _HUGE_HEAP_BYTES) // _HUGE_PAGE * _HUGE_PAGE
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_HUGEPAGE)
        libc.free(address)
