"""`folder_lock`: of the processes that would write one local folder at a time, one does.

The lock is the kernel's, on the folder itself. So it leaves no file behind, and a process that is
killed holds nothing. It does not wait: whoever comes second is told so at once. A file system
without such locks lets everybody in, as if there were none.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def folder_lock(folder: str | os.PathLike[str]) -> Iterator[bool]:
    """Yield True if this process alone has the folder inside the block; False if another has it.

    Raises:
        OSError: there is no such folder, or it cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield _lock(descriptor) and _is_at(descriptor, folder)
    finally:
        # a process that was forked inside the block has the descriptor, too
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        return True
    return True


def _is_at(descriptor: int, folder: str | os.PathLike[str]) -> bool:
    """Return False where the one who had the folder before has removed or replaced it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(folder))
    except OSError:
        return False
