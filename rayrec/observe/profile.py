"""Profile of a rank: some steps timed by part, then as many under torch's profiler.

The profiler slows steps, so times by part come from steps without it. Each rank writes
`rank0.trace.json.gz` and so on, for Perfetto or chrome://tracing, with ranges such as
"rayrec::lookup"; rank 0 writes the page (`Profile`). The trainer and the benchmarks share this.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from rayrec.errors import ConfigError
from rayrec.observe.profile_summary import Operator, Profile
from rayrec.observe.step_times import StepTimes
from rayrec.observe.timer import RANGE, StepTimer
from rayrec.observe.times import RankTimes

OPERATORS = 15


class TimedModel(Protocol):
    """A model that times the parts of its steps where it has a timer."""

    device: torch.device
    timer: StepTimer | None


class Profiler:
    """Profiles the steps of a loop that calls `turn` after its steps; all ranks do so together.

    Args:
        model: its timer is set for the profile's steps, and then as before.
        folder: folder of the profile's files.
        first_step: number of the first step to time.
        steps: number of steps to time, and then to trace.
        rank: rank of this process.
        gather: returns the values of all ranks, on every rank.
    Attributes:
        due: step after which the next call of `turn` begins or ends a part, or None.
        times: step times of the profile, in place of the run's own, while it times; else None.
        result: the profile, the same on every rank; None before its end.
    """

    def __init__(
        self,
        model: TimedModel,
        folder: str,
        *,
        first_step: int,
        steps: int,
        rank: int,
        gather: Callable[[Any], list[Any]],
    ) -> None:
        self._model, self._folder = model, folder
        self._rank, self._gather = rank, gather
        self._first_step, self._steps = first_step, steps
        self.due: int | None = first_step - 1
        self.times: StepTimes | None = None
        self.result: Profile | None = None
        self._mean: RankTimes | None = None
        self._trace: profile | None = None
        self._undo = ExitStack()

    def turn(self, step: int, stopped: bool = False) -> None:
        """Begin or end a part of the profile, if one is due.

        Args:
            step: the number of steps done.
            stopped: the run ends here. What is traced is still written; before the trace there will
                be no profile.
        Raises:
            ConfigError: the folder cannot be written to.
        """
        if self.due is None or (step != self.due and not stopped):
            return
        if self._trace is not None:
            self._finish(self._trace)
        elif stopped:
            self.close()
        elif self.times is None:
            self._begin_timing(step)
        else:
            self._begin_trace(step, self.times)

    def close(self) -> None:
        """Give the model back its timer; a profile that is not finished is dropped."""
        self.due, self.times, self._trace = None, None, None
        self._undo.close()

    def _begin_timing(self, step: int) -> None:
        self._undo.callback(setattr, self._model, "timer", self._model.timer)
        # each part of a step on a GPU ends when the device has done it
        clock = _after_device if self._on_gpu else perf_counter
        self._model.timer = StepTimer(clock)
        self.times = StepTimes(self._model.timer)
        self.due = step + self._steps

    def _begin_trace(self, step: int, timed: StepTimes) -> None:
        # the profiler tells of its starts and stops on stderr otherwise
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(ProfilerActivity.CUDA)
        threads = _ExperimentalConfig(profile_all_threads=True)
        self._mean = timed.mean()
        self._model.timer = StepTimer(tracing=True)
        # traced steps are slow, and count nowhere
        self.times = StepTimes(None)
        trace = profile(activities=activities, acc_events=True, experimental_config=threads)
        self._trace = self._undo.enter_context(trace)
        self.due = step + self._steps

    def _finish(self, trace: profile) -> None:
        # the trace ends here, before the ranks exchange what they saw
        self.close()
        operators = self._largest(trace) if self._rank == 0 else ()
        gathered = self._gather((self._mean, operators))
        self.result = Profile(
            folder=self._folder,
            device=self._model.device.type,
            first_step=self._first_step,
            steps=self._steps,
            ranks=tuple(mean for mean, _ in gathered),
            operators=gathered[0][1],
        )
        try:
            trace.export_chrome_trace(str(Path(self._folder) / f"rank{self._rank}.trace.json.gz"))
            if self._rank == 0:
                self.result.write()
        except OSError as error:
            raise ConfigError(f"cannot write the profile to {self._folder}: {error}") from None

    def _largest(self, trace: profile) -> tuple[Operator, ...]:
        operators = []
        for event in trace.key_averages():
            if event.key.startswith(RANGE):
                continue
            total_us = event.self_device_time_total if self._on_gpu else event.self_cpu_time_total
            self_s, calls = total_us * 1e-6 / self._steps, event.count / self._steps
            operators.append(Operator(name=event.key, self_s=self_s, calls=calls))
        return tuple(sorted(operators, key=lambda operator: -operator.self_s)[:OPERATORS])

    @property
    def _on_gpu(self) -> bool:
        return self._model.device.type == "cuda"


def _after_device() -> float:
    torch.cuda.synchronize()
    return perf_counter()
