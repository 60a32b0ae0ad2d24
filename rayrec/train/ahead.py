"""Prefetching of a pipeline: later batches are read, copied to the device, and their ids exchanged.

`Reader` has one thread that reads the next batches; on a GPU they are then copied from pinned
memory on a stream of their own. `Prefetcher` learns from the first forward which KeyedJaggedTensors
of a batch reach the sharded collections as they are, and starts the input exchange of just those
for a later batch. Nothing is traced: a collection is watched by a hook while it is called.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from rayrec.distributed import DistributedModelParallel
from rayrec.distributed.collections import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from rayrec.errors import ConfigError
from rayrec.machine.memory import one_thread
from rayrec.observe.timer import StepTimer, span
from rayrec.sparse import KeyedJaggedTensor

_END = object()


def find_kjts(batch: Any) -> list[KeyedJaggedTensor]:
    """Return every KeyedJaggedTensor in a batch, each once, in a fixed order.

    Looks into the attributes of the batch, and into dataclasses, tuples, lists and mappings of any
    depth.
    """
    by_object: dict[int, KeyedJaggedTensor] = {}
    _collect(batch, by_object)
    if hasattr(batch, "__dict__") and not isinstance(batch, KeyedJaggedTensor | nn.Module):
        _collect(list(vars(batch).values()), by_object)
    return list(by_object.values())


def _collect(value: Any, by_object: dict[int, KeyedJaggedTensor]) -> None:
    # All KeyedJaggedTensors of a batch are wanted, however deep they lie in its dataclasses and
    # containers. The same object is the same exchange, so each is kept once, by its identity.
    if isinstance(value, KeyedJaggedTensor):
        by_object.setdefault(id(value), value)
        return
    inside: list[Any] = []
    if is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, f.name) for f in fields(value)]
    elif isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, list | tuple):
        inside = list(value)
    for item in inside:
        _collect(item, by_object)


@dataclass
class AheadBatch:
    """Prefetched batch, with its copy to the device and its input exchange.

    Attributes:
        batch: batch on the device.
        copied: event after the copy of the batch; None on CPU.
        copies: stream of the copy; None on CPU.
        started: indices in `kjts` of those whose exchange is under way.
    """

    batch: Any
    copied: torch.cuda.Event | None = None
    copies: torch.cuda.Stream | None = None
    started: set[int] = field(default_factory=set)

    @cached_property
    def kjts(self) -> list[KeyedJaggedTensor]:
        """KeyedJaggedTensors of the batch, in the same order for every batch."""
        return find_kjts(self.batch)

    def wait(self) -> Any:
        """Make the current stream wait for the copy, and return the batch."""
        if self.copied is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.copied)
            if hasattr(self.batch, "record_stream"):
                self.batch.record_stream(stream)
        return self.batch


class Reader:
    """Batches of an iterator, read ahead by one thread and copied to the device.

    Args:
        device: device to copy batches to. On CUDA they must have `.to(device, non_blocking=True)`,
            and should have pin_memory() and record_stream(stream), as `rayrec.data.Batch`.
        depth: batches kept on the device, the current one included.
        ahead: batches read, or being read, that are not yet on the device.

    Attributes:
        ready: batches on the device.
        waited_s: seconds that `fill` has waited for batches.
    """

    def __init__(self, device: torch.device, depth: int, ahead: int = 1) -> None:
        self.device, self._depth, self._ahead = device, depth, ahead
        self.waited_s = 0.0
        self.ready: deque[AheadBatch] = deque()
        self._source: Iterator[Any] | None = None
        self._reading: deque[Future[Any]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fill(self, source: Iterator[Any], timer: StepTimer | None = None) -> None:
        """Have `depth` batches ready, as far as there are; waits for the reading thread.

        A source that has ended stays so; another iterator begins when the batches of the former are
        used up.

        Args:
            timer: counts the reading that starts now.
        Raises:
            Exception: whatever the source raised, once the batches before are used up.
        """
        # a batch of one source never overtakes one of another
        if source is not self._source and not self._reading and not self.ready:
            self._source = source
            self._read_on(timer)
        while len(self.ready) < self._depth and self._reading:
            started = time.perf_counter()
            error = self._reading[0].exception()
            self.waited_s += time.perf_counter() - started
            if error is not None:
                # first come the batches before it
                if self.ready:
                    return
                self._end_thread()
                raise error
            batch = self._reading.popleft().result()
            if batch is _END:
                self._end_thread()
            else:
                self.ready.append(self._copy(batch))
                self._read_on(timer)

    def close(self) -> None:
        """Wait for the thread and forget what was read."""
        self._end_thread()
        self._source = None
        self.ready.clear()

    def _end_thread(self) -> None:
        self._reading.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None

    def _read_on(self, timer: StepTimer | None) -> None:
        assert self._source is not None
        if self._pool is None:
            self._pool = one_thread("rayrec-reader")
        pin = self._copies is not None
        while len(self._reading) < self._ahead:
            self._reading.append(self._pool.submit(_read, self._source, pin, timer))

    def _copy(self, batch: Any) -> AheadBatch:
        if self._copies is None:
            return AheadBatch(batch)
        if not hasattr(batch, "to"):
            raise ConfigError(
                f"a batch of {type(batch).__name__} has no to(device, non_blocking=...), which a "
                "pipeline on a GPU needs."
            )
        # beside the kernels of the step; who uses the batch waits for the event
        with torch.cuda.stream(self._copies):
            moved = batch.to(self.device, non_blocking=True)
            return AheadBatch(moved, self._copies.record_event(), self._copies)


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
        sharded = [m for m in model.modules() if isinstance(m, DistributedModelParallel)]
        if len(sharded) != 1:
            raise ConfigError(
                "a sparse pipeline needs one DistributedModelParallel, the model has "
                f"{len(sharded)}; use TrainPipelineBase."
            )
        self._model = sharded[0]
        # argument of each collection in the forward that is watched now
        self._given: list[tuple[str, KeyedJaggedTensor]] | None = None
        # indices of a batch's KJTs that reach collections; None before the first forward
        self._places: set[int] | None = None
        self._warned = False
        kinds = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)
        self._hooks = []
        for path, module in self._model.module.named_modules():
            if isinstance(module, kinds):
                hook = self._hook(path or type(module).__name__)
                self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def start(self, ahead: AheadBatch) -> None:
        """Start the exchange of a batch whose forward comes later; a second call does nothing.

        Every rank calls it for the same batches in the same order.
        """
        # what is started waits for the copy, and not for the steps that the GPU has still to do
        with torch.cuda.stream(ahead.copies):
            # in the same order on every rank, since exchanges are matched by their order
            for place in sorted(self._places or ()):
                if place in ahead.started or place >= len(ahead.kjts):
                    continue
                if self._model.prefetch(ahead.kjts[place]):
                    ahead.started.add(place)

    @contextmanager
    def watching(self, ahead: AheadBatch) -> Iterator[None]:
        """Record which KJTs of a batch reach the collections in its forward, inside the block.

        Warns once of a collection that cannot be prefetched.
        """
        given = self._given = []
        try:
            yield
        finally:
            self._given = None
        # a collection is given the batch's own object, or ids that the model made
        place_of = {id(kjt): place for place, kjt in enumerate(ahead.kjts)}
        foreign = [(path, kjt) for path, kjt in given if id(kjt) not in place_of]
        # an exchange is started for whoever reads these keys: of two KJTs with the same keys
        # neither can be started ahead
        taken = {tuple(kjt.keys()) for _, kjt in foreign}
        own = [kjt for _, kjt in given if id(kjt) in place_of]
        used = {place_of[id(kjt)] for kjt in own if tuple(kjt.keys()) not in taken}
        unused = ahead.started - used
        self._places = used if self._places is None else self._places - unused
        if foreign or unused:
            self._warn(sorted({path for path, _ in foreign}))

    def _warn(self, foreign: list[str]) -> None:
        if self._warned:
            return
        self._warned = True
        why = "the model left out ids of a batch"
        if foreign:
            why = f"{', '.join(foreign)} gets a KeyedJaggedTensor that is not the batch's own"
        warnings.warn(
            f"{why}, so its exchange is not started ahead. Pass on the batch's to overlap it.",
            RuntimeWarning,
            stacklevel=3,
        )

    def forget(self) -> None:
        """Drop the exchanges of batches that were started and will have no forward."""
        self._model.forget_prefetched()

    def close(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hook(self, path: str) -> Any:
        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._given is not None:
                self._given.append((path, args[0] if args else next(iter(kwargs.values()))))

        return see
