"""Input exchanges that run ahead of their forward: one thread, connections of its own, and on a GPU
a stream of its own.

On a GPU the stream waits for what the caller has queued, such as the copy of the batch; the stream
of the forward waits for the routed ids in turn, and the allocator is told who uses what. So kernels
of the exchange run beside those of the step, and its host sync stops only the thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rayrec.comm.exchange import Exchange
from rayrec.distributed.steps.route import RoutedIds
from rayrec.observe.timer import StepTimer
from rayrec.sparse import KeyedJaggedTensor


class _Routed(NamedTuple):
    ids: RoutedIds
    done: torch.cuda.Event | None  # on a GPU, after the last kernel


@dataclass(eq=False)
class Started:
    """The exchange of the ids of one KJT, under way.

    Attributes:
        collections: collections whose rows will be looked up.
        expected: True while a forward pass is still to use it.
    """

    collections: frozenset[int]
    routed: Future[_Routed]
    expected: bool = True


class RoutesAhead:
    """Exchanges under way, in the order they were started.

    Args:
        exchange: connections that nobody else uses.
        device: device of the ids.
    """

    def __init__(self, exchange: Exchange, device: torch.device) -> None:
        self._exchange, self._device = exchange, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._under_way: list[Started] = []

    def __len__(self) -> int:
        return len(self._under_way)

    def start(
        self,
        kjt: KeyedJaggedTensor,
        collections: frozenset[int],
        route: Callable[[Exchange], RoutedIds],
    ) -> Started:
        """Run `route` in the thread; every rank starts the same exchanges in the same order."""
        ready = None
        if self._stream is not None:
            # The batch may still be on its way to the device, on the stream of the caller.
            ready = torch.cuda.current_stream(self._device).record_event()
            kjt.record_stream(self._stream)
        started = Started(collections, self._pool.submit(self._run, route, ready))
        self._under_way.append(started)
        return started

    def _run(
        self, route: Callable[[Exchange], RoutedIds], ready: torch.cuda.Event | None
    ) -> _Routed:
        if self._stream is None or ready is None:
            return _Routed(route(self._exchange), None)
        # the current stream and device are the thread's own
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            return _Routed(route(self._exchange), self._stream.record_event())

    def take(
        self, started: Started, collections: frozenset[int], timer: StepTimer | None
    ) -> RoutedIds | None:
        """Return routed ids for the current stream; None when they are not expected any more.

        Args:
            collections: None is returned, too, when the ids were routed for others.
            timer: counts the wait for them, if any.
        """
        if not started.expected:
            return None
        started.expected = False
        self._under_way.remove(started)
        wait = started.routed.result
        ids, done = wait() if timer is None else timer.wait(wait)
        if done is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(done)
            # Otherwise the allocator reuses memory of the other stream that this one still reads.
            for tensor in _tensors(ids):
                tensor.record_stream(stream)
        return ids if started.collections == collections else None

    def wait(self) -> None:
        """Wait until all that was started is done.

        Raises:
            CommError: a peer is gone.
        """
        for started in self._under_way:
            started.routed.result()

    def forget(self) -> None:
        """Expect nobody to take what was started; it ends by itself."""
        for started in self._under_way:
            started.expected = False
        self._under_way = []

    def close(self, wait: bool) -> None:
        """End the thread.

        Args:
            wait: wait for exchanges under way; else they end, by an error, once connections are
                cut.
        """
        self.forget()
        self._pool.shutdown(wait=wait, cancel_futures=not wait)


def _tensors(routed: RoutedIds) -> Iterator[Tensor]:
    """Return what a later step reads of routed ids."""
    found = [
        t
        for group in routed.groups.values()
        for t in (group.ids, group.offsets, group.weights, group.lags)
    ]
    found += [
        t
        for part in routed.source.parts
        for t in (part.ids, part.lengths, part.weights, part.origin)
    ]
    found += [] if routed.source.filled is None else [routed.source.filled.bags]
    return (t for t in found if t is not None)
