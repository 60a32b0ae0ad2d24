"""Memory hygiene of a rank process: keep large buffers in the heap instead of giving them back after every step.

glibc maps every large tensor anew and unmaps it when it is freed, so a training step pays a page fault for each 4 KiB of every buffer: on
2 cores half of a step's CPU time. With high thresholds freed memory stays with the process and is used again. Costs the peak of what
was allocated, which a training step needs in every step anyway. Elsewhere than on glibc it does nothing.
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_KEPT_BYTES = 1 << 30


def tune_malloc() -> bool:
    """Raise glibc's thresholds for this process, unless the environment sets them; call it before large allocations.

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
    return bool(mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
