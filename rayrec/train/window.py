"""A window of training: the steps since the last report, merged over ranks by one all_reduce.

The same reduction carries the stop flag and the elapsed time, so every rank learns the same and
takes the same number of steps in the next window: about `report_every_s` seconds of them. That
bounds how long a stop takes, and costs one small collective per window.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rayrec.metrics import BinaryMetrics
from rayrec.train.step import StepResult

# so that a run whose first steps were fast still looks up
MAX_STEPS = 1000


class WindowSum(NamedTuple):
    """A window merged over all ranks.

    Attributes:
        stop: some rank was asked to stop.
        seconds: mean over ranks of the window's wall clock time.
        rows: over all ranks.
        loss: mean over the rows.
        auc, ne: of the rows; None when undefined.
        data_wait: by rank, the share of the window's time in which the next batch was not yet read.
    """

    stop: bool
    seconds: float
    rows: int
    loss: float
    auc: float | None
    ne: float | None
    data_wait: tuple[float, ...]


class Window:
    """Collects steps on one rank.

    Args:
        device: where losses and logits are.
        world_size: ranks that merge.
    """

    def __init__(self, device: torch.device, world_size: int) -> None:
        self._device, self._world_size = device, world_size
        self._metrics = BinaryMetrics(device)
        # on the device, so that no step waits for it
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._rows, self.steps = 0, 0
        self._started = time.perf_counter()

    def add(self, step: StepResult) -> None:
        """Count a step; no host sync."""
        self._loss_sum += step.loss_sum
        self._rows += step.rows
        self.steps += 1
        if step.rows:
            self._metrics.update(step.logits, step.labels)

    def merge(self, should_stop: Callable[[], bool], waited_s: float) -> WindowSum:
        """End the window on all ranks together.

        Args:
            should_stop: read now.
            waited_s: seconds of the window in which this rank waited for batches.
        """
        state = self._metrics.state()
        # waits for the device, so that the clock below is true
        loss_sum = float(self._loss_sum.item())
        seconds = time.perf_counter() - self._started
        # each rank fills in its own
        waits = [0.0] * self._world_size
        waits[dist.get_rank() if dist.is_initialized() else 0] = waited_s / max(seconds, 1e-9)
        # the sum over ranks is their mean
        own_s = seconds / self._world_size
        head = [float(should_stop()), own_s, float(self._rows), loss_sum, *waits]
        numbers = torch.tensor(head, dtype=torch.float64, device=self._device)
        total = torch.cat([numbers, state.flatten().double()])
        all_sum(total)
        # what was put into the head, summed
        stop, mean_seconds, rows, loss, *data_wait = total[: len(head)].tolist()
        auc, ne = None, None
        # the scores of a diverged model are an error of their own, which says less
        if rows and math.isfinite(loss):
            auc, ne = scores_of(total[len(head) :].view(state.shape).to(state.dtype))
        mean_loss = loss / rows if rows else 0.0
        return WindowSum(stop > 0, mean_seconds, int(rows), mean_loss, auc, ne, tuple(data_wait))


def scores_of(state: Tensor) -> tuple[float | None, float | None]:
    """(AUC, normalized entropy) of a merged state; None where undefined."""
    scores = BinaryMetrics.from_state(state).compute()
    return _finite(scores.auc), _finite(scores.ne)


def all_sum(values: Tensor) -> None:
    """Sum over all ranks, in place; a no-op without a process group."""
    if dist.is_initialized():
        dist.all_reduce(values)


def next_length(steps: int, seconds: float, wanted_s: float) -> int:
    """Steps of the next window, from how long the last one took."""
    if steps < 1:
        return 1
    # at most doubled at a time, since the first steps are slow or lucky
    fitting = wanted_s / max(seconds / steps, 1e-6)
    return int(max(1, min(fitting, 2 * steps, MAX_STEPS)))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def gather_objects(value: Any, /) -> list[Any]:
    """The values of all ranks, on every rank."""
    if not dist.is_initialized():
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone
