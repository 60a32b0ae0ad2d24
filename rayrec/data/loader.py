"""`BatchLoader`: one rank's batches, decoded ahead by one background thread.

The thread puts finished batches into a bounded queue; decoding releases the GIL. Errors reach the
consumer with their own type, after the batches before them. The thread holds no reference to the
loader, so closing or dropping the loader ends it. Memory: prefetch + 1 batches, and what `streams`
holds.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from functools import partial

from rayrec.data.batch import Batch
from rayrec.machine.memory import start_thread

_Queue = queue.Queue[Batch | BaseException | None]


class BatchLoader(Iterator[Batch]):
    """Iterator over one rank's `Batch`es; also a context manager. Made by `FileDataset.loader`.

    Attributes:
        batches: the global batches not yet yielded; `batches.start` is the cursor to save.
    """

    def __init__(
        self, made: Iterator[Batch], batches: range, prefetch: int, threaded: bool
    ) -> None:
        self.batches = batches
        self._queue: _Queue = queue.Queue(prefetch)
        self._stop = threading.Event()
        # where there is no thread, batches are made by whoever asks for them
        self._made = None if threaded else made
        parts = self._queue, self._stop
        produce = partial(_produce, made, *parts)  # without the loader
        thread = start_thread(produce, "rayrec-loader") if threaded else None
        self._close = weakref.finalize(self, _end, thread, *parts)

    def __len__(self) -> int:
        return len(self.batches)

    def __next__(self) -> Batch:
        if self._stop.is_set():
            raise StopIteration
        if self._made is not None:
            batch = next(self._made)
            self.batches = self.batches[1:]
            return batch
        # The queue gives batches in order, then None at the end of the data or the error that ended
        # the thread.
        item = self._queue.get()
        if isinstance(item, Batch):
            self.batches = self.batches[1:]
            return item
        self.close()
        if item is None:
            raise StopIteration
        raise item

    def close(self) -> None:
        """End the thread and drop what it decoded; later `next` calls stop."""
        self._close()

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _produce(made: Iterator[Batch], out: _Queue, stop: threading.Event) -> None:
    last: BaseException | None = None
    try:
        for batch in made:
            out.put(batch)
            if stop.is_set():
                return
    # Whatever ends the thread reaches the consumer, which would wait for ever otherwise.
    except BaseException as error:
        last = error
    out.put(last)


def _end(thread: threading.Thread | None, out: _Queue, stop: threading.Event) -> None:
    stop.set()
    while thread is not None and thread.is_alive() and thread is not threading.current_thread():
        try:
            # frees a producer that waits for room
            out.get_nowait()
        except queue.Empty:
            thread.join(0.01)
    while not out.empty():
        out.get_nowait()
    # a consumer that waits in another thread ends too
    out.put_nowait(None)
