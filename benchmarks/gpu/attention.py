"""Attention over jagged sequences: as the padded one in float64, and its time beside it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import sequences
from benchmarks.gpu.checks import Notes, Settings, assert_close
from benchmarks.gpu.timing import Step, count_syncs, turns_ms

# sums of up to a thousand products in float32, in another order; a bias sums up thousands of pairs
RTOL, ATOL = 1e-4, 2e-5


def run(settings: Settings, notes: Notes) -> None:
    """Equality by fill, host syncs, times in turns with the padded way, and a long history."""
    sizes = settings.choose(
        [(32, 50), (64, 400), (16, 1000)], [(32, 50), (8, 200)], [(4, 9), (3, 30)]
    )
    for name, case in sequences.CASES.items():
        for count, longest in sizes:
            for fill in (0.25, 0.75):
                world = sequences.world_of(count, longest, fill)
                with notes.check(f"{name}, {count} x {longest}, fill {fill}") as found:
                    found["largest difference"] = _compare(case, world, settings)
    for name in sequences.CASES:
        for count, longest in settings.choose([(256, 50), (128, 200), (64, 1000)], [(8, 50)]):
            for fill in (0.25, 0.75):
                with notes.check(f"time of {name}, {count} x {longest}, fill {fill}") as found:
                    found |= _times(name, sequences.world_of(count, longest, fill), settings)
    count, longest = settings.choose((8, 4096), (2, 300), (2, 40))
    world = sequences.world_of(count, longest, 0.5).to(settings.device)
    for name in ("causal", "hstu"):
        for which, way in zip(("padded", "ours"), sequences.CASES[name](world)[:2], strict=True):
            with notes.check(f"memory of {name}, {which}, {count} x {longest}") as found:
                found["peak MB"] = _peak(way, settings)


def _compare(
    case: Callable[[sequences.World], sequences.Pair], world: sequences.World, settings: Settings
) -> float:
    """Outputs and gradients against the padded way in float64 on CPU; the largest difference."""
    padded, _, wide = case(world.to("cpu", torch.float64))
    # the longest sequence is known, as in a model
    _, ours, inputs = case(world.to(settings.device))
    wanted, got = padded(), ours()
    largest = assert_close("output", got, wanted, RTOL, ATOL)
    factors = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view(wanted.shape)
    wants = torch.autograd.grad((wanted * factors).sum(), wide)
    gots = torch.autograd.grad((got * factors.to(got)).sum(), inputs)
    for place, (one, other) in enumerate(zip(gots, wants, strict=True)):
        scale = max(1.0, float(other.abs().max()))
        off = assert_close(f"gradient {place}", one.cpu() / scale, other / scale, RTOL, ATOL)
        largest = max(largest, off)
    return largest


def _step(way: Callable[[], Tensor], inputs: list[Tensor]) -> Step:
    def step(i: int) -> None:
        out = way()
        torch.autograd.grad((out * out).sum(), inputs)

    return step


def _times(name: str, world: sequences.World, settings: Settings) -> dict[str, object]:
    # a model knows its longest history, so that the host need not ask for it
    world = world.to(settings.device)._replace(max_length=world.longest)
    padded, ours, inputs = sequences.CASES[name](world)
    sides = {"padded": _step(padded, inputs), "ours": _step(ours, inputs)}
    rounds, steps = settings.choose(7, 3, 2), settings.choose(5, 2, 1)
    found: dict[str, object] = {"ms": (times := turns_ms(sides, settings, rounds, steps))}
    found["times as fast"] = round(times["padded"]["median"] / times["ours"]["median"], 3)
    if settings.on_gpu:
        found["host syncs"] = count_syncs(sides["ours"])
    return found


def _peak(way: Callable[[], Tensor], settings: Settings) -> float | None:
    """Megabytes of the device beside what was there, of a forward and a backward."""
    if not settings.on_gpu:
        way().sum().backward()
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    way().sum().backward()
    return round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)
