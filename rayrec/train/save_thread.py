"""`SaveThread`: writes checkpoints behind the training of a rank, one at a time.

Every rank has one. The threads agree with each other over connections of their own, so they need no
order with the collectives of training. A checkpoint that is still being written when the next one
is due is waited for: nothing piles up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from rayrec.comm import plain
from rayrec.comm.process_group import new_group, shutdown_sockets
from rayrec.machine.memory import start_thread

# how long a rank that leaves its world waits for its thread to notice
_LEAVE_S = 5.0


class SaveThread:
    """Save thread of one rank; all ranks make theirs together.

    Args:
        behind: write in a thread; otherwise `start` writes at once, and no save is ever under way.
    """

    def __init__(self, behind: bool = True) -> None:
        self.behind = behind
        # asked once: a thread that outlives its world is not alone because that has ended
        self._alone = not dist.is_initialized()
        self._group = new_group(backend="gloo") if behind and not self._alone else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._given_up = threading.Event()

    def gather(self, value: Any, /) -> list[Any]:
        """Gather the values of all ranks' threads, on every rank."""
        return [value] if self._alone else plain.all_gather(value, self._group)

    def given_up(self) -> bool:
        """Return True if the save under way shall end at once, with an error."""
        return self._given_up.is_set()

    @property
    def busy(self) -> bool:
        """True from the start of a save until `finish`, written or not."""
        return self._thread is not None

    @property
    def done(self) -> bool:
        """True if a started save is written or has failed, and `finish` was not called yet."""
        return self._thread is not None and not self._thread.is_alive()

    def start(self, write: Callable[[], None]) -> None:
        """Run `write` in the thread; the save before must be finished."""
        assert self._thread is None, "one save at a time"
        if not self.behind:
            write()
            return
        self._error = None

        def run() -> None:
            try:
                write()
            except BaseException as error:
                self._error = error

        self._thread = start_thread(run, "save")

    def finish(self) -> None:
        """Wait for the save under way, if there is one.

        Raises:
            SaveError, CheckpointError: the save failed.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def give_up(self) -> None:
        """End a save under way without its result, since this rank leaves its world on an error.

        A peer may be gone, so the connections are cut where the thread waits for one.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._given_up.set()
        thread.join(_LEAVE_S)
        if thread.is_alive():
            shutdown_sockets()
            thread.join(_LEAVE_S)
