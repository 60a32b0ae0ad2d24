"""Pipelines: a step is done while later batches are read, copied and, when sharded, exchanged.

Names and use are TorchRec's: build a pipeline once, call `progress(iterator)` until StopIteration.
`TrainPipelineBase` reads and copies ahead; `TrainPipelineSparseDist` also starts the input exchange
of the next batch's ids, over connections of its own, before the current batch is computed. Where
ids go does not depend on weights, so every result equals that of the plain loop over `train_step`,
bit for bit. How batches flow through any of them is in `rayrec.train.pipeline_base`.

All ranks must have the same number of batches. Leaves out: semi-synchronous training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rayrec.checks import whole_number
from rayrec.distributed import DistributedModelParallel
from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields
from rayrec.observe.timer import span
from rayrec.train.ahead import AheadBatch
from rayrec.train.pipeline_base import Pipeline, PipelineStep
from rayrec.train.step import share_of


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineOptions:
    """Options of a training step.

    Attributes:
        accumulate: micro-batches per dense update; each counts with its loss divided by this
            number. The tables are updated in every backward pass, so by each micro-batch on its
            own, with its gradient divided likewise: for SGD that adds up to nearly one update, for
            optimizers with state it is `accumulate` smaller ones. Dense gradients cross the wire
            once per dense update. When the data ends within a group, the dense update is done with
            what there is.
        read_ahead: batches that the reading thread holds beyond those on the device. One suffices
            where each batch takes about as long to read; more even out a reader that decodes the
            rows of several batches at once.
        autocast: dtype of the dense layers' matrix products, such as torch.bfloat16; None computes
            in the parameters' own. Tables, their exchange and their updates stay in float32.
    """

    accumulate: int = 1
    read_ahead: int = 1
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        whole_number("PipelineOptions has accumulate", self.accumulate)
        whole_number("PipelineOptions has read_ahead", self.read_ahead)
        if self.autocast not in (None, torch.bfloat16):
            raise ConfigError(
                f"autocast={self.autocast}; use torch.bfloat16 or None. float16 would need loss "
                "scaling."
            )


class TrainPipelineBase(Pipeline):
    """Training steps, with the next batch read and copied during the current one.

    Args:
        model: forward(batch) -> (loss, output); loss the mean over the batch's rows.
        optimizer: optimizer of the dense parameters; None when there are none.
        device: device of the model.
        options: options of a step, such as the accumulation of gradients.
        world_size: ranks that share a global batch; None takes the default process group. A
            batch with `.rows` and `.global_rows` has its loss weighted as `train_step` does, any
            other counts as one of equal parts.

    Example:
        pipeline = TrainPipelineBase(model, torch.optim.Adam(model.parameters()), "cpu")
        batches = iter(loader)
        while True:
            loss, logits, labels = pipeline.progress(batches)   # until StopIteration
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device | str,
        options: PipelineOptions | None = None,
        world_size: int | None = None,
    ) -> None:
        self.options = options or PipelineOptions()
        super().__init__(model, device, self.options.autocast, self.options.read_ahead)
        self.optimizer = optimizer
        self.world_size = world_size or (dist.get_world_size() if dist.is_initialized() else 1)
        # micro-batches done of the current group
        self._micro = 0
        self._update: bool | None = None

    def advance(self, dataloader_iter: Iterator[Any], update: bool | None = None) -> PipelineStep:
        """Do one step as `progress` does, and return the batch and the loss, too.

        Args:
            update: True if this micro-batch ends a group, so that the dense parameters are updated;
                None counts to `accumulate`.
        """
        self._update = update
        return super().advance(dataloader_iter)

    def _step(self, current: AheadBatch, last: bool) -> PipelineStep:
        if self._micro == 0 and self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        update = self._update
        if update is None:
            # a group that the end of the data cuts short is still updated from
            update = last or self._micro + 1 == self.options.accumulate
        with nullcontext() if update else _no_sync(self.model):
            loss, output = self._forward(current)
            with span(self._timer, "backward"):
                share = share_of(self.model, current.batch, self.world_size, loss.device)
                (loss * (share.weight / self.options.accumulate)).sum().backward()
        if update and self.optimizer is not None:
            with span(self._timer, "optimizer"):
                self.optimizer.step()
        self._micro = 0 if update else self._micro + 1
        return PipelineStep(current.batch, loss.detach(), output, share.rows)

    def reset(self) -> None:
        """Drop batches that were read ahead; the next step drops gradients of an open group."""
        super().reset()
        self._micro = 0


class TrainPipelineSparseDist(TrainPipelineBase):
    """Training steps of a sharded model; the next batch's ids are exchanged during the current one.

    Args:
        model: a `DistributedModelParallel` made with prefetch=True, or a module around one.
        others: the arguments of `TrainPipelineBase`.
    Raises:
        ConfigError: the model holds no DistributedModelParallel.

    A collection that is given a KeyedJaggedTensor the model made itself works as without a
    pipeline; one warning names it.
    """

    _sparse = True


class EvalPipeline(Pipeline):
    """Forward passes without gradients, with the next batch read and copied during the current one.

    Args:
        model: forward(batch) -> (loss, output); the caller puts it into eval mode.
        device: device of the model.
        autocast: dtype of the dense layers' matrix products, or None.
    """

    @torch.no_grad()
    def _step(self, current: AheadBatch, last: bool) -> PipelineStep:
        return PipelineStep(current.batch, *self._forward(current))


class EvalPipelineSparseDist(EvalPipeline):
    """`EvalPipeline` of a sharded model; the next batch's ids are exchanged during the current one.

    Args:
        model: a `DistributedModelParallel` made with prefetch=True, or a module around one.
        others: the arguments of `EvalPipeline`.
    Raises:
        ConfigError: the model holds no DistributedModelParallel.
    """

    _sparse = True


def _no_sync(model: nn.Module) -> AbstractContextManager[Any]:
    """Skip the all-reduce of dense gradients in backward passes inside the block."""
    for module in model.modules():
        if isinstance(module, (DistributedDataParallel, DistributedModelParallel)):
            return module.no_sync()
    return nullcontext()
