"""Settings of glibc's malloc for a training process.

By default it maps large tensors anew in every step and gives them back, so that half of a step's
CPU time goes into page faults. With high thresholds freed memory stays with the process, and on
huge pages the processor finds the addresses of a step's buffers faster.

All of that is for the main arena, which the main thread has. glibc gives other threads an arena
each, made of parts of 64 MB on small pages that are unmapped whenever they are empty, and in a
process with threads, such as Ray's workers, they exist before anything can be set. No more are made
then, and `start_thread` finds a thread that shares the main one.

torch aligns tensors to 64 bytes. What malloc cuts off for that goes to small objects, so a freed
buffer is just too small for the next one of its size, and a heap that gives nothing back grows to
twice or thrice what is in use. Large tensors on whole pages leave cuts that malloc mostly joins
again.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

# names of mallopt(3)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES = 1 << 30
# torch reads it when it allocates for the first time
_WHOLE_PAGES = "THP_MEM_ALLOC_ENABLE"
# the first part of the heap, as far as it is used
_HUGE_HEAP_BYTES = 256 << 20
_HUGE_PAGE = 2 << 20
# too large for the cache of a thread, which may hold memory of other arenas
_PROBE_BYTES = 1 << 16
# flags of a chunk's size, which is the word before it
_MAPPED, _OTHER_ARENA = 2, 4
_MOST_ARENAS = 256

# holds libc once its settings are made
_tuned: list[ctypes.CDLL] = []


def tune_malloc() -> bool:
    """Keep freed memory in this process, unless the environment sets glibc's thresholds.

    It is to be called before large allocations and threads.

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
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    done = (
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        and mallopt(_M_ARENA_MAX, 1)
    )
    os.environ.setdefault(_WHOLE_PAGES, "1")
    if done:
        _tuned[:] = [libc]
        if _on_main_arena(libc):
            _advise_huge_pages()
    return bool(done)


def give_back() -> None:
    """Free what lies in cycles, and return freed pages to the system if `tune_malloc` keeps them.

    Python looks at old objects only when a quarter of all is new, which takes a process with torch
    some hours. What malloc keeps lies in pieces that add up. The pages that the next step uses cost
    it page faults once more.
    """
    gc.collect()
    if _tuned:
        _tuned[0].malloc_trim(0)


def start_thread(
    run: Callable[[], object], name: str, huge_pages: bool = False
) -> threading.Thread:
    """Start a daemon thread; after `tune_malloc` one of the main arena, where one is to be had.

    Threads that come and go else leave something in each arena that they get in turn.

    Args:
        huge_pages: its buffers are large and stay, so they are to lie on huge pages.
    """
    free: threading.Event = threading.Event()
    answers: SimpleQueue[bool] = SimpleQueue()

    def attempt(last: bool) -> None:
        fits = not _tuned or _on_main_arena(_tuned[0])
        if fits and huge_pages:
            _advise_huge_pages()
        answers.put(fits)
        if fits or last:
            run()
        else:
            # the thread keeps its arena, or the next one would get it
            free.wait()

    try:
        for i in range(_MOST_ARENAS):
            last = i == _MOST_ARENAS - 1
            thread = threading.Thread(target=attempt, args=(last,), name=name, daemon=True)
            thread.start()
            if answers.get():
                break
    finally:
        free.set()
    return thread


def one_thread(name: str) -> ThreadPoolExecutor:
    """Return a pool of one thread, which is of the main arena as those of `start_thread` are."""
    others: list[ThreadPoolExecutor] = []
    try:
        while True:
            pool = ThreadPoolExecutor(1, thread_name_prefix=name)
            if not _tuned or len(others) + 1 == _MOST_ARENAS:
                return pool
            if pool.submit(_on_main_arena, _tuned[0]).result():
                return pool
            others.append(pool)
    finally:
        for other in others:
            other.shutdown(wait=False)


def _on_main_arena(libc: ctypes.CDLL) -> bool:
    """Return True if the calling thread allocates from the main arena."""
    address = libc.malloc(_PROBE_BYTES)
    if not address:
        return False
    flags = ctypes.c_size_t.from_address(address - ctypes.sizeof(ctypes.c_size_t)).value
    libc.free(address)
    return not flags & (_MAPPED | _OTHER_ARENA)


def _advise_huge_pages() -> None:
    """Mark the part of the main arena that the next allocations of this thread will use."""
    if not _tuned or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    libc = _tuned[0]
    address = libc.malloc(_HUGE_HEAP_BYTES)
    if address:
        first = -(-address // _HUGE_PAGE) * _HUGE_PAGE
        last = (address + _HUGE_HEAP_BYTES) // _HUGE_PAGE * _HUGE_PAGE
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_HUGEPAGE)
        libc.free(address)


def resident_bytes() -> int:
    """Return the resident memory of this process, pages shared with other processes included."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:  # not Linux
        return 0
