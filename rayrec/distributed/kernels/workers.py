"""The threads that share a rank's embedding work on CPU.

The kernels of a lookup run on one thread, whatever torch is told, except where they stop at
barriers for sorts of a few thousand ids. So a rank that has several threads cuts its work into
tasks, and each thread works them off with one torch thread; the operators release the GIL. Which
thread takes a task changes no result. Dense layers outside of `run` keep all of torch's threads:
torch counts threads for each thread that calls it. Waking the others costs some 50 microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch

Task = Callable[[], object]


class Workers:
    """The calling thread and `threads - 1` more, which start with the first work for them and end
    with this object.

    Args:
        threads: number of threads that work at once.
    """

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self._others: ThreadPoolExecutor | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Workers:
        memo[id(self)] = twin = Workers(self.threads)  # threads are not copied, but started again
        return twin

    def run(self, tasks: Sequence[Task]) -> None:
        """Run all tasks, the first ones first, and wait for them. They must not need each other,
        nor autograd.

        Raises:
            The error of a task, when all threads have stopped.
        """
        with self.alone():
            left = iter(tasks)
            others = []
            if min(self.threads, len(tasks)) > 1:
                if self._others is None:
                    self._others = ThreadPoolExecutor(
                        self.threads - 1, "rayrec-lookup", torch.set_num_threads, (1,)
                    )
                others = [
                    self._others.submit(_work_off, left)
                    for _ in range(min(self.threads, len(tasks)) - 1)
                ]
            try:
                _work_off(left)
            finally:
                wait(others)
            for other in others:
                other.result()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, torch's operators run on the calling thread only."""
        if self.threads == 1:
            yield
            return
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)  # also what threads that are new to torch start with


def _work_off(tasks: Iterator[Task]) -> None:
    # a thread has its own mode, and the outputs of an evaluation may be inference tensors
    with torch.inference_mode():
        for task in tasks:
            task()
