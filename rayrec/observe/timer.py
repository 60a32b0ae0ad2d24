"""Timer of a rank's step: seconds by part, and those spent waiting for other ranks.

A model with a `StepTimer` wraps its parts in spans and hands them an exchange whose waits are
counted; without one it does neither, so timing costs nothing when it is off, and a few microseconds
a step when it is on. Parts of the backward pass are timed by hooks of their autograd nodes. A part
within a part counts for itself alone, so parts never add up to more than the step. The clock is the
host's: on a GPU it sees launches and not kernels, unless it waits for the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

from torch import Tensor
from torch.profiler import record_function

from rayrec.comm.exchange import Exchange, Headed, Headers, Pending, Splits, SplitsOf, Views
from rayrec.observe.times import STEP_PARTS, PartTimes

# stands before the name of a part in a trace
RANGE = "rayrec::"

T = TypeVar("T")


@dataclass(slots=True)
class _Span:
    part: str
    start: float
    # seconds of spans within this one
    inner: float = 0.0
    # its range in the trace
    range: Any = None


@dataclass(slots=True)
class _Sums:
    seconds: float = 0.0
    waited: float = 0.0
    ahead: float = 0.0
    ahead_waited: float = 0.0


class StepTimer:
    """Seconds by part since the last `reset`.

    Args:
        clock: returns the time in seconds; by default the wall clock's.
        tracing: parts and waits are named ranges in the trace of the torch profiler that runs, such
            as "rayrec::lookup".
    Attributes:
        waits: number of times the step waited for other ranks.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter, tracing: bool = False) -> None:
        self.clock, self._tracing = clock, tracing
        self.reset()
        # open spans of the step, the innermost last. They are no thread's own: on a GPU the
        # backward pass runs in a thread of autograd
        self._open: list[_Span] = []
        # seconds waited in the span of a thread beside the step
        self._beside = threading.local()

    def reset(self) -> None:
        """Set all sums to zero."""
        self.waits = 0
        self._sums = {part: _Sums() for part in STEP_PARTS}

    def read(self) -> dict[str, PartTimes]:
        """Return the times of every part since the last `reset`."""
        return {
            part: PartTimes(s.seconds, s.waited, s.ahead, s.ahead_waited)
            for part, s in self._sums.items()
        }

    @contextmanager
    def span(self, part: str, ahead: bool = False) -> Iterator[None]:
        """Add the time of the block to `part`; `ahead` is for a thread beside the step."""
        if not ahead:
            span = self._begin(part)
            try:
                yield
            finally:
                self._end(span)
            return
        self._beside.waited, start = 0.0, perf_counter()
        try:
            with self._range(f"{part} ahead"):
                yield
        finally:
            # both at once, for whoever reads meanwhile
            self._sums[part].ahead += perf_counter() - start
            self._sums[part].ahead_waited += self._beside.waited
            self._beside.waited = None

    def follow(self, part: str, output: Tensor) -> None:
        """Add the backward pass of the operation that made `output`, if it has one, to `part`."""
        node = output.grad_fn
        if node is not None:
            started: list[_Span] = []
            node.register_prehook(lambda _: started.append(self._begin(part)))
            node.register_hook(lambda *_: self._end(started.pop()))

    def watch(self, exchange: Exchange) -> Exchange:
        """Return the same exchange, with every wait counted."""
        return exchange if exchange.world_size == 1 else _Watched(exchange, self)

    def wait(self, wait: Callable[[], T]) -> T:
        """Run a wait, and add its time to the current part of this thread."""
        beside = getattr(self._beside, "waited", None)
        clock = self.clock if beside is None else perf_counter
        start = clock()
        with self._range("wait"):
            value = wait()
        took = clock() - start
        if beside is not None:
            self._beside.waited += took
        elif self._open:
            self._sums[self._open[-1].part].waited += took
            self.waits += 1
        return value

    def _range(self, name: str) -> AbstractContextManager[Any]:
        return record_function(RANGE + name) if self._tracing else nullcontext()

    def _begin(self, part: str) -> _Span:
        span = _Span(part, self.clock(), range=self._range(part))
        span.range.__enter__()
        self._open.append(span)
        return span

    def _end(self, span: _Span) -> None:
        span.range.__exit__(None, None, None)
        took = self.clock() - span.start
        # above it lie spans that an error in the backward pass left open
        while self._open.pop() is not span:
            pass
        self._sums[span.part].seconds += took - span.inner
        if self._open:
            self._open[-1].inner += took


def span(timer: StepTimer | None, part: str, ahead: bool = False) -> AbstractContextManager[None]:
    """Return `timer.span(part, ahead)`, or an empty context without a timer."""
    return nullcontext() if timer is None else timer.span(part, ahead)


class _Watched(Exchange):
    def __init__(self, inner: Exchange, timer: StepTimer) -> None:
        self.rank, self.world_size, self.keeps_own = inner.rank, inner.world_size, inner.keeps_own
        self._inner, self._timer = inner, timer
        self.buffer, self.share = inner.buffer, inner.share  # type: ignore[method-assign]

    def _counted(self, pending: Pending[T]) -> Pending[T]:
        return Pending(lambda: self._timer.wait(pending.wait))

    def all_to_all(self, send: Tensor, send_splits: Splits, recv_splits: Splits) -> Pending[Tensor]:
        return self._counted(self._inner.all_to_all(send, send_splits, recv_splits))

    def views(self, send: Tensor, send_splits: Splits, recv_splits: Splits) -> Views:
        return self._counted(self._inner.views(send, send_splits, recv_splits))

    def headed(
        self, headers: Headers, send: Tensor, send_splits: Splits, head: int, splits_of: SplitsOf
    ) -> Pending[Headed]:
        return self._counted(self._inner.headed(headers, send, send_splits, head, splits_of))

    def meet(self) -> None:
        self._timer.wait(self._inner.meet)

    def split(self, groups: Sequence[Sequence[int]]) -> Exchange:
        return self._inner.split(groups)

    def all_gather(self, send: Tensor, sizes: Splits) -> Views:
        return self._counted(self._inner.all_gather(send, sizes))
