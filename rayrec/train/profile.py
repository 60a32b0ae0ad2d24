"""Where a rank's time goes: some steps timed by part, then as many under torch's profiler, whose
trace names the parts.

The profiler slows steps, so times by part come from steps without it. Each rank writes
`rank0.trace.json.gz` and so on, for Perfetto or chrome://tracing, with ranges such as
"rayrec::lookup"; rank 0 writes the page (`Profile`). The trainer and the benchmarks share this.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from rayrec.distributed import DistributedModelParallel
from rayrec.errors import ConfigError
from rayrec.observe.timer import RANGE, StepTimer
from rayrec.train.config import ProfileConfig
from rayrec.train.profile_page import Operator, Profile
from rayrec.train.times import StepTimes
from rayrec.train.window import gather_objects

OPERATORS = 15

Run = Callable[[StepTimes, int], bool]


def profile_steps(
    model: DistributedModelParallel, config: ProfileConfig, run: Run, *, rank: int, first_step: int
) -> Profile | None:
    """Time and trace the next steps of a model, and write what was found; every rank calls it
    together.

    Args:
        model: whose timer is set for these steps, and then as before.
        config: where to write, and how many steps; its `skip_steps` have been done.
        run: does so many steps, whose windows it counts with the times it is given, and returns
            whether the run shall stop.
        rank: of this process. first_step: number of the first of these steps.
    Returns:
        The profile, the same on every rank; None when the run shall stop before the trace.
    Raises:
        ConfigError: the folder cannot be written to.
    """
    # the profiler tells of its starts and stops on stderr otherwise
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    cuda, kept = model.device.type == "cuda", model.timer
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    threads = _ExperimentalConfig(profile_all_threads=True)
    try:
        model.timer = StepTimer(_after_device if cuda else perf_counter)
        times = StepTimes(model.timer)
        if run(times, config.steps):
            return None
        model.timer = StepTimer(tracing=True)
        with profile(activities=activities, acc_events=True, experimental_config=threads) as trace:
            run(StepTimes(None), config.steps)
    finally:
        model.timer = kept
    mean = times.mean()
    assert mean is not None
    found = gather_objects((mean, _largest(trace, config.steps, cuda) if rank == 0 else ()))
    ranks, operators = zip(*found, strict=True)
    result = Profile(
        folder=config.path,
        device=model.device.type,
        first_step=first_step,
        steps=config.steps,
        ranks=ranks,
        operators=operators[0],
    )
    try:
        trace.export_chrome_trace(str(Path(config.path) / f"rank{rank}.trace.json.gz"))
        if rank == 0:
            result.write()
    except OSError as error:
        raise ConfigError(f"cannot write the profile to {config.path}: {error}") from None
    return result


def _largest(trace: profile, steps: int, cuda: bool) -> tuple[Operator, ...]:
    found = []
    for event in trace.key_averages():
        if not event.key.startswith(RANGE):
            total_us = event.self_device_time_total if cuda else event.self_cpu_time_total
            found.append(
                Operator(name=event.key, self_s=total_us * 1e-6 / steps, calls=event.count / steps)
            )
    return tuple(sorted(found, key=lambda operator: -operator.self_s)[:OPERATORS])


def _after_device() -> float:
    torch.cuda.synchronize()
    return perf_counter()
