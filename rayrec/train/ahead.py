"""What a pipeline does ahead of the step: read the next batches in a thread, copy them to the
device, find and prefetch their ids.

`Reader` keeps a bounded number of batches ready; at most one more is being read. On a GPU they are
copied from pinned memory on a stream of their own. `Prefetcher` learns from the first forward which
KeyedJaggedTensors of a batch reach the sharded collections as they are, and starts the input
exchange of just those for a later batch. Nothing is traced: a collection is watched by a hook while
it is called.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from rayrec.distributed import DistributedModelParallel
from rayrec.distributed.collections import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from rayrec.errors import ConfigError
from rayrec.observe.timer import StepTimer, span
from rayrec.sparse import KeyedJaggedTensor

_END = object()


def find_kjts(batch: Any) -> list[KeyedJaggedTensor]:
    """Every KeyedJaggedTensor in a batch, each once, in a fixed order.

    Looks into the attributes of the batch, and into dataclasses, tuples, lists and mappings of any
    depth.
    """
    found: list[KeyedJaggedTensor] = []
    inside = (
        list(vars(batch).values())
        if hasattr(batch, "__dict__") and not isinstance(batch, KeyedJaggedTensor | nn.Module)
        else []
    )
    _collect(batch, found)
    _collect(inside, found)
    return found


def _collect(value: Any, found: list[KeyedJaggedTensor]) -> None:
    if isinstance(value, KeyedJaggedTensor):
        if not any(value is other for other in found):
            found.append(value)
    elif is_dataclass(value) and not isinstance(value, type):
        _collect([getattr(value, f.name) for f in fields(value)], found)
    elif isinstance(value, Mapping):
        _collect(list(value.values()), found)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, found)


class Ready(NamedTuple):
    """A batch on the device, and the event after its copy (None on CPU)."""

    batch: Any
    copied: torch.cuda.Event | None

    def wait(self) -> Any:
        """Make the current stream wait for the copy; the batch."""
        if self.copied is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.copied)
            if hasattr(self.batch, "record_stream"):
                self.batch.record_stream(stream)
        return self.batch


class Reader:
    """Batches of an iterator, read ahead by one thread and copied to the device.

    Args:
        device: where batches are needed. On CUDA they must have `.to(device, non_blocking=True)`,
            and should have pin_memory() and record_stream(stream), as `rayrec.data.Batch`.
        depth: batches kept on the device, the current one included.

    Attributes:
        waited_s: seconds that `fill` has waited for batches.
    """

    def __init__(self, device: torch.device, depth: int) -> None:
        self.device, self.depth, self.waited_s = device, depth, 0.0
        self.ready: deque[Ready] = deque()
        self._source: Iterator[Any] | None = None
        self._reading: Future[Any] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fill(self, source: Iterator[Any], timer: StepTimer | None = None) -> None:
        """Have `depth` batches ready, as far as there are; waits for the reading thread.

        A source that has ended stays so; another iterator begins when the batches of the former are
        used up.

        Args:
            timer: counts the reading that starts now.
        Raises:
            whatever the source raised, once the batches before are used up.
        """
        if source is not self._source and self._reading is None and not self.ready:
            self._source = source
            self._submit(timer)
        while len(self.ready) < self.depth and self._reading is not None:
            started = time.perf_counter()
            error = self._reading.exception()
            self.waited_s += time.perf_counter() - started
            if error is not None and self.ready:
                return  # first the batches before it
            batch = None if error is not None else self._reading.result()
            self._reading = None
            if error is not None or batch is _END:
                self._end_thread()
            if error is not None:
                raise error
            if batch is not _END:
                self.ready.append(self._copy(batch))
                self._submit(timer)

    def close(self) -> None:
        """Wait for the thread and forget what was read."""
        self._end_thread()
        self._reading, self._source = None, None
        self.ready.clear()

    def _end_thread(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None

    def _submit(self, timer: StepTimer | None) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="rayrec-reader")
        assert self._source is not None
        self._reading = self._pool.submit(_read, self._source, self._copies is not None, timer)

    def _copy(self, batch: Any) -> Ready:
        if self._copies is None:
            return Ready(batch, None)
        if not hasattr(batch, "to"):
            raise ConfigError(
                f"a batch of {type(batch).__name__} has no to(device, non_blocking=...), which a "
                "pipeline on a GPU needs."
            )
        with torch.cuda.stream(self._copies):
            moved = batch.to(self.device, non_blocking=True)
            return Ready(moved, self._copies.record_event())


def _read(source: Iterator[Any], pin: bool, timer: StepTimer | None) -> Any:
    with span(timer, "data", ahead=True):
        batch = next(source, _END)
        return batch.pin_memory() if pin and hasattr(batch, "pin_memory") else batch


class Prefetcher:
    """Starts the input exchange of later batches of a sharded model.

    Args:
        model: a DistributedModelParallel made with prefetch=True, or a module around one.
    Raises:
        ConfigError: the model holds no DistributedModelParallel.
    """

    def __init__(self, model: nn.Module) -> None:
        found = [
            module for module in model.modules() if isinstance(module, DistributedModelParallel)
        ]
        if len(found) != 1:
            raise ConfigError(
                "a sparse pipeline needs one DistributedModelParallel, the model has "
                f"{len(found)}; use TrainPipelineBase."
            )
        self._model = found[0]
        self._given: list[tuple[str, KeyedJaggedTensor]] = []
        self._watching = False
        # of the batch's KJTs, those that reach collections; None before the first forward
        self._places: set[int] | None = None
        self._started: list[tuple[int, KeyedJaggedTensor]] = []
        self._warned = False
        kinds = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)
        self._hooks = [
            module.register_forward_pre_hook(
                self._hook(path or type(module).__name__), with_kwargs=True
            )
            for path, module in self._model.module.named_modules()
            if isinstance(module, kinds)
        ]

    def start(self, batch: Any) -> None:
        """Start the exchange of a batch whose forward comes later; every rank calls it in the same
        order. A second call does nothing.
        """
        if not self._places:
            return
        for place, kjt in enumerate(find_kjts(batch)):
            if (
                place in self._places
                and not any(kjt is other for _, other in self._started)
                and self._model.prefetch(kjt)
            ):
                self._started.append((place, kjt))

    @contextmanager
    def watching(self, batch: Any) -> Iterator[None]:
        """Around the forward of a batch: see which of its KJTs are used, and warn once of a
        collection that cannot be prefetched.
        """
        self._watching, self._given = True, []
        try:
            yield
        finally:
            self._watching = False
        given, self._given = self._given, []
        kjts = find_kjts(batch)
        foreign = [(path, kjt) for path, kjt in given if not any(kjt is other for other in kjts)]
        # an exchange is started for whoever reads these keys: of two KJTs with the same keys
        # neither can be started ahead
        taken = {tuple(kjt.keys()) for _, kjt in foreign}
        used = {
            place
            for place, kjt in enumerate(kjts)
            if any(kjt is other for _, other in given) and tuple(kjt.keys()) not in taken
        }
        unused = {
            place for place, kjt in self._started if any(kjt is other for other in kjts)
        } - used
        self._started = [item for item in self._started if not any(item[1] is kjt for kjt in kjts)]
        self._places = used if self._places is None else self._places - unused
        own = sorted({path for path, _ in foreign})
        if (own or unused) and not self._warned:
            self._warned = True
            why = (
                f"{', '.join(own)} gets a KeyedJaggedTensor that is not the batch's own"
                if own
                else "the model left out ids of a batch"
            )
            warnings.warn(
                f"{why}, so its exchange is not started ahead. Pass on the batch's to overlap it.",
                RuntimeWarning,
                stacklevel=2,
            )

    def forget(self) -> None:
        """Expect no more forwards of the batches that were started."""
        self._started = []
        self._model.forget_prefetched()

    def close(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hook(self, path: str) -> Any:
        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._watching:
                self._given.append((path, args[0] if args else next(iter(kwargs.values()))))

        return see
