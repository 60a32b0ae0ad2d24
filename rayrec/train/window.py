"""A window of training: the steps since the last report, merged over ranks by one all_reduce.

The same reduction carries the stop flag and the elapsed time, so every rank learns the same and
takes the same number of steps in the next window: about `report_every_s` seconds of them, and at
most half as many again. That bounds how long a stop takes, and costs one small collective per
window.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rayrec.comm import plain
from rayrec.machine.memory import resident_bytes
from rayrec.spec.task import Task
from rayrec.train.scoring import Scoring, by_task
from rayrec.train.step import StepResult

# so that a run whose first steps were fast still looks up
MAX_STEPS = 1000


class WindowSum(NamedTuple):
    """Sums and means of a window, merged over all ranks.

    Attributes:
        stop: some rank was asked to stop.
        save: some rank was asked to save.
        seconds: mean over ranks of the window's wall clock time.
        passed_s: the same, with the time before it that its rows were scored or came in.
        rows: rows of all ranks.
        loss: mean loss over the rows.
        scores: scores of the rows, by name; empty without rows or if the model has diverged.
        data_wait: share of the window's time, by rank, in which the next batch was not yet read.
        memory_bytes: used memory of the tables' device, by rank.
        written: a checkpoint behind the training is over on every rank.
    """

    stop: bool
    seconds: float
    rows: int
    loss: float
    scores: Mapping[str, float]
    data_wait: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    written: bool = False
    save: bool = False
    passed_s: float = 0.0


class Window:
    """Window of one rank, which collects its steps.

    Args:
        device: device of losses and logits.
        world_size: number of ranks that merge their windows.
        tasks: tasks of the run; none means one binary task.
        model: trained model, which may say that its logits are no probabilities.
    Attributes:
        end: global step after which the window is merged.
        steps: steps done.
        waited_s: seconds in which this rank waited for batches.
        before_s: seconds before this window in which its rows were scored or came in.
        rates: learning rates of the last step, "sparse" and "dense".
        step_s: seconds of the mean step by part.
        values: further scores, as the loop gives them.
    """

    def __init__(
        self,
        device: torch.device,
        world_size: int,
        tasks: Sequence[Task] = (),
        model: nn.Module | None = None,
    ) -> None:
        self._device, self._world_size = device, world_size
        self.end, self.waited_s, self.before_s = 0, 0.0, 0.0
        self.rates: Mapping[str, float] = {}
        self.step_s: Mapping[str, float] = {}
        self.values: Mapping[str, float] = {}
        self._scoring = Scoring(tasks, device, model)
        # on the device, so that no step waits for it
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._rows, self.steps = 0, 0
        self._started = time.perf_counter()

    def add(self, step: StepResult, batch: Any) -> None:
        """Count the step of a batch; no host sync."""
        self._loss_sum += step.loss_sum
        self._rows += step.rows
        self.steps += 1
        if isinstance(step.logits, Mapping) and not step.logits:  # a loop that tells of none
            return
        outputs = by_task(self._scoring.tasks, step.logits, step.labels)
        if step.rows:
            self._scoring.add(outputs, batch)

    def merge(
        self, should_stop: Callable[[], bool], written: bool = False, save: bool = False
    ) -> WindowSum:
        """End the window on all ranks together.

        Args:
            should_stop: read now.
            written: a checkpoint behind the training is over on this rank.
            save: this rank was asked to save.
        """
        state = self._scoring.state()
        # waits for the device, so that the clock below is true
        loss_sum = float(self._loss_sum.item())
        seconds = time.perf_counter() - self._started
        # each rank fills in its own
        waits, memory = [0.0] * self._world_size, [0.0] * self._world_size
        rank = dist.get_rank() if dist.is_initialized() else 0
        waits[rank] = self.waited_s / max(seconds, 1e-9)
        memory[rank] = float(memory_in_use(self._device))
        # the sum over ranks is their mean
        own_s, before_s = (s / self._world_size for s in (seconds, self.before_s))
        head = [
            float(should_stop()),
            own_s,
            own_s + before_s,
            float(self._rows),
            loss_sum,
            float(written),
            float(save),
        ]
        head += [*waits, *memory]
        numbers = torch.tensor(head, dtype=torch.float64, device=self._device)
        total = torch.cat([numbers, state])
        all_sum(total)
        # the sums of the numbers in `head`
        stop, mean_seconds, passed_s, rows, loss, done, saves, *by_rank = total[
            : len(head)
        ].tolist()
        scores: Mapping[str, float] = {}
        # the scores of a diverged model are an error of their own, which says less
        counted = total[len(head) :]
        if rows and math.isfinite(loss) and counted.any():
            scores = self._scoring.scores(counted)
        return WindowSum(
            stop=stop > 0,
            seconds=mean_seconds,
            rows=int(rows),
            loss=loss / rows if rows else 0.0,
            scores=scores,
            data_wait=tuple(by_rank[: self._world_size]),
            memory_bytes=tuple(int(value) for value in by_rank[self._world_size :]),
            written=done == self._world_size,
            save=saves > 0,
            passed_s=passed_s,
        )


def memory_in_use(device: torch.device) -> int:
    """Return the bytes that this process uses: torch's memory on a GPU, else resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return resident_bytes()


def all_sum(values: Tensor) -> None:
    """Sum over all ranks, in place; a no-op without a process group."""
    if dist.is_initialized():
        dist.all_reduce(values)


def next_length(steps: int, seconds: float, wanted_s: float) -> int:
    """Return the number of steps of the next window, from the seconds of the last one."""
    if steps < 1:
        return 1
    # at most doubled at a time, since the first steps are slow or lucky
    fitting = wanted_s / max(seconds / steps, 1e-6)
    return int(max(1, min(fitting, 2 * steps, MAX_STEPS)))


def even_length(steps: int, left: int) -> int:
    """Return the steps of the next window, so that windows up to a given end are equally long.

    Without this, the last window before an end holds what the others left. The loss of a few rows
    is mostly noise, and the last one is what a run tells as its training loss.

    Args:
        steps: wanted number of steps of a window.
        left: steps up to the end.
    Returns:
        at most `left`, and at most 1.5 times `steps`.
    """
    windows = max(1, round(left / steps))
    # rounded up, and no further than half a window
    return -(-left // windows)


def gather_objects(value: Any, /) -> list[Any]:
    """Gather the values of all ranks, on every rank."""
    if not dist.is_initialized():
        return [value]
    return plain.all_gather(value)
