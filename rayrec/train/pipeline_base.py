"""The base of pipelines: batches are read, copied and exchanged ahead, and go through the model.

A subclass says what is done with each batch (`rayrec.train.pipeline`). No graph is traced: the next
forward takes the exchanged ids when it is given the very KeyedJaggedTensor of the batch (see
`Prefetcher`). Cost: one more batch of memory (two on a GPU).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rayrec.distributed import DistributedModelParallel
from rayrec.errors import ConfigError
from rayrec.observe.timer import StepTimer, span
from rayrec.train.ahead import AheadBatch, Prefetcher, Reader


class PipelineStep(NamedTuple):
    """Result of one step of a pipeline.

    Attributes:
        batch: the batch, on the device.
        loss: () detached, the model's own, before any scaling.
        output: output of the model beside the loss.
        rows: rows of the global batch that the loss of a training step stands for; see `Share`.
    """

    batch: Any
    loss: Tensor
    output: Any
    rows: float | Tensor | None = None


class Pipeline(ABC):
    """Pipeline of prefetched batches; a subclass implements the step of a batch."""

    # the ids of the next batch are exchanged ahead
    _sparse = False

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str,
        autocast: torch.dtype | None = None,
        read_ahead: int = 1,
    ) -> None:
        self.model, self.device = model, torch.device(device)
        self._autocast = autocast
        self._prefetcher = Prefetcher(model) if self._sparse else None
        self._sharded = next(
            (m for m in model.modules() if isinstance(m, DistributedModelParallel)), None
        )
        on_gpu = self.device.type == "cuda"
        # Batches on the device: the current one and the next one, whose ids are exchanged. On a GPU
        # a third is copied meanwhile, since a batch must be copied before it is exchanged.
        depth = 3 if on_gpu and self._sparse else 2
        self._reader = Reader(self.device, depth, read_ahead)

    @property
    def data_wait_s(self) -> float:
        """Seconds that steps have waited for batches to be read, so far."""
        return self._reader.waited_s

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Do one step and return the model's output, the second of (loss, output).

        Args:
            dataloader_iter: gives batches; read ahead in a thread. Another iterator takes over when
                the former is used up.
        Raises:
            StopIteration: all batches have been done.
            ConfigError: the model's output has another form; or its options do not allow a sparse
                pipeline.
            Exception: whatever the iterator raised, after the steps of the batches before.
        """
        return self.advance(dataloader_iter).output

    def advance(self, dataloader_iter: Iterator[Any]) -> PipelineStep:
        """Do one step as `progress` does, and return the batch and the loss, too."""
        with span(self._timer, "data"):
            self._reader.fill(dataloader_iter, self._timer)
        if not self._reader.ready:
            raise StopIteration
        current = self._reader.ready.popleft()
        current.wait()
        # the ids of the next batch travel while this one is computed
        self._start_next()
        return self._step(current, last=not self._reader.ready)

    def iterate(self, batches: Iterable[Any]) -> Iterator[PipelineStep]:
        """Yield the result of each step until the batches are used up.

        When the caller stops earlier, batches read ahead are dropped.
        """
        source = iter(batches)
        try:
            while True:
                try:
                    step = self.advance(source)
                except StopIteration:
                    return
                yield step
        finally:
            self.reset()

    def reset(self) -> None:
        """Drop batches that were read ahead.

        It waits for the reading thread, so that the iterator may be closed afterwards.
        """
        self._reader.close()
        if self._prefetcher is not None:
            self._prefetcher.forget()

    def close(self) -> None:
        """Reset, and take the pipeline's hooks off the model."""
        self.reset()
        if self._prefetcher is not None:
            self._prefetcher.close()

    @property
    def _timer(self) -> StepTimer | None:
        return None if self._sharded is None else self._sharded.timer

    def _start_next(self) -> None:
        if self._prefetcher is not None and self._reader.ready:
            with span(self._timer, "input"):
                self._prefetcher.start(self._reader.ready[0])

    def _forward(self, current: AheadBatch) -> tuple[Tensor, Any]:
        watching: AbstractContextManager[None] = nullcontext()
        if self._prefetcher is not None:
            watching = self._prefetcher.watching(current)
        autocast = torch.autocast(
            self.device.type, dtype=self._autocast, enabled=self._autocast is not None
        )
        with span(self._timer, "dense"), watching, autocast:
            result = self.model(current.batch)
        # for the first batch only now: its forward has taught the model who reads which ids
        self._start_next()
        try:
            loss, output = result
        except (TypeError, ValueError):
            raise ConfigError(
                f"the model returned {type(result).__name__}; a pipeline needs "
                "(loss, output), as DLRMTrain gives."
            ) from None
        return loss, output

    @abstractmethod
    def _step(self, current: AheadBatch, last: bool) -> PipelineStep:
        """Do the step of one batch; `last` where no later batch has been read."""
