"""Where a step's time goes on this rank: seconds by part, and how much of them was waiting for other ranks.

An engine with a `StepTimer` wraps its parts in spans and hands them an exchange whose waits are counted; without one it does neither, so
timing costs nothing when it is off, and a few microseconds a step when it is on. Parts of the backward pass are timed by hooks of their
autograd nodes. The clock is the host's: on a GPU it sees launches and not kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import TypeVar

from torch import Tensor

from rayrec.comm.exchange import Exchange, FlatExchange, Headed, Pending, SplitsOf

PARTS = ("input", "lookup", "output", "gradient", "update")

T = TypeVar("T")


class StepTimer:
    """Seconds by part since the last `reset`.

    Args:
        clock: seconds now; by default those of the wall.
    Attributes:
        seconds: of each part, waits included. waited: of them, spent waiting for other ranks.
        ahead: whether the input of a step was exchanged in a thread of its own, beside the step before.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        self.seconds, self.waited = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
        self.ahead = False
        self._owner = threading.get_ident()
        self._here = threading.local()  # a prefetching thread is in a part of its own

    def reset(self) -> None:
        """Begin anew."""
        for part in PARTS:
            self.seconds[part] = self.waited[part] = 0.0

    @contextmanager
    def span(self, part: str) -> Iterator[None]:
        """Count what happens inside as `part`."""
        start = self._begin(part)
        try:
            yield
        finally:
            self._end(part, start)

    def follow(self, part: str, output: Tensor) -> None:
        """Count the backward pass of the operation that made `output` as `part`; does nothing where there will be none."""
        node = output.grad_fn
        if node is not None:
            started: list[float] = []
            node.register_prehook(lambda _: started.append(self._begin(part)))
            node.register_hook(lambda *_: self._end(part, started.pop()))

    def watch(self, exchange: Exchange) -> Exchange:
        """The same exchange, with every wait counted."""
        return _Watched(exchange, self)

    def wait(self, wait: Callable[[], T]) -> T:
        """Count a wait in the part that this thread is in."""
        start = self.clock()
        value = wait()
        part = getattr(self._here, "part", None)
        if part is not None:
            self.waited[part] += self.clock() - start
        return value

    def _begin(self, part: str) -> float:
        self._here.part = part
        self.ahead = self.ahead or (part == "input" and threading.get_ident() != self._owner)
        return self.clock()

    def _end(self, part: str, start: float) -> None:
        self.seconds[part] += self.clock() - start
        self._here.part = None


def span(timer: StepTimer | None, part: str) -> AbstractContextManager[None]:
    """`timer.span(part)`, or nothing without a timer."""
    return nullcontext() if timer is None else timer.span(part)


class _Watched(FlatExchange):
    def __init__(self, inner: Exchange, timer: StepTimer) -> None:
        self.rank, self.world_size, self.keeps_own = inner.rank, inner.world_size, inner.keeps_own
        self._inner, self._timer = inner, timer
        self.buffer, self.split = inner.buffer, inner.split  # type: ignore[method-assign]

    def _counted(self, pending: Pending[T]) -> Pending[T]:
        return Pending(lambda: self._timer.wait(pending.wait))

    def all_to_all(self, send: Tensor, send_splits: Sequence[int], recv_splits: Sequence[int]) -> Pending[Tensor]:
        return self._counted(self._inner.all_to_all(send, send_splits, recv_splits))

    def views(self, send: Tensor, send_splits: Sequence[int], recv_splits: Sequence[int]) -> Pending[list[Tensor]]:
        return self._counted(self._inner.views(send, send_splits, recv_splits))

    def headed(
        self, headers: Sequence[Sequence[int]], send: Tensor, send_splits: Sequence[int], head: int, splits_of: SplitsOf
    ) -> Pending[Headed]:
        return self._counted(self._inner.headed(headers, send, send_splits, head, splits_of))

    def all_gather(self, send: Tensor, sizes: Sequence[int]) -> Pending[list[Tensor]]:
        return self._counted(self._inner.all_gather(send, sizes))
