"""Systems under test in rank processes of their own, which take turns: a round runs a few steps of
each, so that a drift hits all alike.

Each system has its own processes, one torch thread per rank, and its own malloc: "shipped", or
"tuned" as rayrec's ranks set it for themselves. While one system steps, the others wait on a pipe
and cost nothing. A step is timed on every rank; the slowest rank counts. A turn is long enough that
the first steps, which find the caches full of what others left, do not decide.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import re
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.workload import quartiles

if TYPE_CHECKING:
    from rayrec.distributed import DistributedModelParallel

Step = Callable[[int], object]
TIMEOUT_S = 300
_MOST_STEPS = 100
PRELOAD = [
    "benchmarks.systems",
    "rayrec.distributed",
    "rayrec.train",
    "rayrec.optim",
    "rayrec.modules",
]
PRELOAD += [
    "torchrec.distributed.embedding",
    "torchrec.distributed.embeddingbag",
    "torchrec.distributed.planner",
    "torchrec.models.dlrm",
]


class ModelStep(NamedTuple):
    """A step of a rayrec model, which can tell where its time goes."""

    step: Step
    model: DistributedModelParallel

    def __call__(self, i: int) -> object:
        return self.step(i)


class System(NamedTuple):
    """What one system's ranks do.

    Attributes:
        build: of an importable module; called on every rank as build(rank, num_ranks, *args),
            returns `step(i)` for all ranks together.
        args: what it is built with.
        tuned: whether malloc's thresholds are raised first.
        num_ranks: processes.
    """

    build: Callable[..., Step]
    args: tuple[Any, ...]
    tuned: bool
    num_ranks: int


class Turns(NamedTuple):
    """How long to measure: `rounds` of `steps` steps, after `warmup` steps of each system; more,
    where so many take less than `least_s`.
    """

    rounds: int
    steps: int
    warmup: int
    least_s: float = 0.25

    def steps_of(self, warmed_up: np.ndarray) -> int:
        """Steps of a turn of a system, from the seconds (ranks, steps) of its warm-up."""
        return max(
            self.steps,
            min(_MOST_STEPS, math.ceil(self.least_s / float(np.median(warmed_up.max(0))))),
        )


class RankEndedError(RuntimeError):
    """A rank of `system` ended."""

    def __init__(self, system: str, rank: int) -> None:
        super().__init__(f"rank {rank} of {system!r} ended; its own error is above.")
        self.system = system


def time_in_turns(
    systems: Mapping[str, System], turns: Turns, profiles: Path | None = None
) -> dict[str, dict[str, Any]]:
    """Run all systems in turns.

    Args:
        profiles: afterwards profile those whose step is a `ModelStep`, into a folder of their name
            below this one, and print their pages.
    Returns:
        By system: "seconds" (rounds, steps of a turn) of the slowest rank; "faults" and "cpu_ms"
        per step, the mean over ranks; and "waits", how often a step stops for other ranks, None
        where the system cannot tell.
    Raises:
        RankEndedError: a rank ended. RuntimeError: it did not answer in time.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    groups = {name: Ranks(name, system) for name, system in systems.items()}
    try:
        found: dict[str, list[np.ndarray]] = {name: [] for name in groups}
        steps = {
            name: turns.steps_of(group.turn(0, turns.warmup)[:, :-2])
            for name, group in groups.items()
        }
        for round_ in range(turns.rounds):
            for name, group in groups.items():
                found[name].append(group.turn(turns.warmup + round_ * steps[name], steps[name]))
        after = {name: turns.warmup + turns.rounds * count for name, count in steps.items()}
        waits = {name: group.waits(after[name]) for name, group in groups.items()}
        for name, group in groups.items() if profiles is not None else ():
            group.profile(after[name], profiles)
    finally:
        for group in groups.values():
            group.close()
    # (rounds, ranks, steps + 2)
    merged = {name: np.stack(rounds) for name, rounds in found.items()}
    return {
        name: {
            "seconds": a[:, :, :-2].max(1),
            "faults": a[:, :, -2].mean() / steps[name],
            "cpu_ms": a[:, :, -1].mean() / steps[name] * 1e3,
            "waits": waits[name],
        }
        for name, a in merged.items()
    }


def compare(measured: Mapping[str, dict[str, Any]], reference: str) -> dict[str, dict[str, Any]]:
    """By system: "ms" per step over all rounds, and "ratio" of its time to the reference's, round
    by round; quartiles.
    """
    base = np.median(measured[reference]["seconds"], axis=1)
    return {
        name: {
            "ms": quartiles(found["seconds"].ravel() * 1e3),
            "ratio": quartiles(np.median(found["seconds"], axis=1) / base),
            "faults": round(float(found["faults"])),
            "cpu_ms": round(float(found["cpu_ms"]), 2),
            "waits": found["waits"],
        }
        for name, found in measured.items()
    }


def join(rank: int, num_ranks: int, tell: Callable[[int], object], ask: Callable[[], int]) -> None:
    """Meet the other ranks in a process group of one thread each.

    Args:
        tell: called on rank 0 with the port of the rendezvous. ask: returns it on the others.
    """
    import torch

    from rayrec.comm.process_group import connect_store, create_store, init_process_group

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(num_ranks),
    )
    if rank == 0:
        store = create_store("127.0.0.1")
        tell(store.port)
    else:
        store = connect_store("127.0.0.1", ask())
    init_process_group(store, rank, num_ranks, timeout_s=TIMEOUT_S)


class Ranks:
    """The processes of one system."""

    def __init__(self, name: str, system: System) -> None:
        # torch is imported once, before any rank sets malloc or starts a thread
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.name = name
        pipes = [context.Pipe() for _ in range(system.num_ranks)]
        self.pipes = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(target=_rank_main, args=(r, system, theirs))
            for r, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        port = self._receive(0)
        for pipe in self.pipes[1:]:
            pipe.send(port)

    def _receive(self, rank: int) -> Any:
        try:
            if not self.pipes[rank].poll(TIMEOUT_S):
                raise RuntimeError(
                    f"rank {rank} of {self.name!r} did not answer within {TIMEOUT_S} s."
                )
            return self.pipes[rank].recv()
        except (EOFError, OSError):
            raise RankEndedError(self.name, rank) from None

    def turn(self, first: int, count: int) -> np.ndarray:
        """(ranks, count + 2): seconds of each step, then page faults and CPU seconds of all of
        them.
        """
        for pipe in self.pipes:
            pipe.send((first, count))
        return np.array([self._receive(rank) for rank in range(len(self.pipes))])

    def waits(self, step: int) -> int | None:
        """How often a step stops for other ranks, where the system can tell."""
        for pipe in self.pipes:
            pipe.send((step, None))
        found: list[int | None] = [self._receive(rank) for rank in range(len(self.pipes))]
        return found[0]

    def profile(self, first: int, folder: Path) -> None:
        """Profile the steps from `first` on, where the system can, and print the page."""
        path = folder / re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        for pipe in self.pipes:
            pipe.send((first, str(path)))
        page, *_ = [self._receive(rank) for rank in range(len(self.pipes))]
        if page is not None:
            print(f"{self.name}: {page}\nprofile: {path}\n", flush=True)

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(30)
            if process.is_alive():
                process.kill()
                process.join()


def _profiled(step: ModelStep, rank: int, first: int, path: str) -> str:
    """The page of a profile of steps from `first` on."""
    from rayrec.observe.profile import Profiler
    from rayrec.observe.profile_summary import check_folder
    from rayrec.train.profile_config import ProfileConfig
    from rayrec.train.window import gather_objects

    check_folder(path)
    config, done = ProfileConfig(path=path), first - 1
    profiler = Profiler(
        step.model, path, first_step=first, steps=config.steps, rank=rank, gather=gather_objects
    )
    profiler.turn(done)
    while profiler.times is not None and profiler.due is not None:
        profiler.times.begin()
        for number in range(done + 1, profiler.due + 1):
            step(number)
        profiler.times.add(config.steps)
        done = profiler.due
        profiler.turn(done)
    assert profiler.result is not None
    return profiler.result.text()


def _waits(step: ModelStep, number: int) -> int:
    from rayrec.observe.timer import StepTimer

    timer, before = StepTimer(), step.model.timer
    step.model.timer = timer
    step(number)
    step.model.timer = before
    return timer.waits


def _rank_main(rank: int, system: System, pipe: Any) -> None:
    import warnings

    warnings.filterwarnings("ignore")
    from rayrec.machine.memory import tune_malloc

    if system.tuned:
        tune_malloc()
    import torch.distributed as dist

    from rayrec.comm.process_group import destroy_process_group

    join(rank, system.num_ranks, pipe.send, pipe.recv)
    step = system.build(rank, system.num_ranks, *system.args)
    while True:
        try:
            first, count = pipe.recv()
        except EOFError:
            break
        dist.barrier()
        if count is None:
            pipe.send(_waits(step, first) if isinstance(step, ModelStep) else None)
            continue
        if isinstance(count, str):
            pipe.send(_profiled(step, rank, first, count) if isinstance(step, ModelStep) else None)
            continue
        before, seconds = resource.getrusage(resource.RUSAGE_SELF), []
        for i in range(first, first + count):
            start = time.perf_counter()
            step(i)
            seconds.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        pipe.send([*seconds, after.ru_minflt - before.ru_minflt, cpu_s])
    destroy_process_group()
