"""Time on a GPU and on a CPU, bandwidth, and what a step costs the host."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch

from benchmarks.gpu.checks import Settings
from benchmarks.workload import quartiles

Step = Callable[[int], object]


def synchronize(settings: Settings) -> None:
    """Wait for the GPU; nothing on CPU."""
    if settings.on_gpu:
        torch.cuda.synchronize()


def step_ms(step: Step, settings: Settings, rounds: int, steps: int) -> dict[str, float]:
    """Milliseconds of a step by quartiles of rounds, each of so many steps without a wait."""
    for i in range(3):
        step(i)
    synchronize(settings)
    found = []
    for r in range(rounds):
        began = time.perf_counter()
        for i in range(steps):
            step(3 + r * steps + i)
        synchronize(settings)
        found.append(1e3 * (time.perf_counter() - began) / steps)
    return _rounded(quartiles(found))


def turns_ms(
    sides: dict[str, Step], settings: Settings, rounds: int, steps: int
) -> dict[str, dict[str, float]]:
    """As `step_ms` for several sides in turns, so that a drift of the machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for step in sides.values():
        for i in range(3):
            step(i)
    for r in range(rounds):
        for name, step in sides.items():
            synchronize(settings)
            began = time.perf_counter()
            for i in range(steps):
                step(3 + r * steps + i)
            synchronize(settings)
            times[name].append(1e3 * (time.perf_counter() - began) / steps)
    return {name: _rounded(quartiles(found)) for name, found in times.items()}


def host_us(step: Step, settings: Settings, steps: int) -> dict[str, float]:
    """Microseconds until a step has been handed to the GPU, by quartiles of steps.

    The batch must be so small that the GPU is never behind. On CPU it is the time of the step.
    """
    for i in range(5):
        step(i)
    found = []
    for i in range(steps):
        synchronize(settings)
        began = time.perf_counter()
        step(5 + i)
        found.append(1e6 * (time.perf_counter() - began))
    return _rounded(quartiles(found))


def count_syncs(step: Step) -> int:
    """How often torch says that a step on the GPU made the host wait.

    Waits for events are not among them.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step(0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(one.message) for one in said)


def copy_bandwidth(settings: Settings) -> float:
    """Bytes read and written per second by copies within the device's memory."""
    size = settings.choose(1 << 30, 1 << 26, 1 << 22)
    source = torch.ones(size, dtype=torch.uint8, device=settings.device)
    target = torch.empty_like(source)
    found = step_ms(lambda i: target.copy_(source), settings, 5, settings.choose(20, 4, 2))
    return 2 * size / (found["min"] * 1e-3)


def _rounded(found: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 4) for key, value in found.items()}
