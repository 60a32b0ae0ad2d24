"""A single rank in this process, without Ray: `ScalingConfig(num_workers=0)`, as in Ray Train.

It is for small runs, for a debugger and for a first try on a laptop. The task, the plan and the
checkpoints are those of one rank on a cluster; an error is raised as it is, with its traceback.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from rayrec.driver.planning import GPU_RESERVE
from rayrec.driver.rank_group import Prepared, Ran
from rayrec.driver.scaling import ScalingConfig
from rayrec.errors import ConfigError, TrainingFailed
from rayrec.layout import Topology
from rayrec.machine.signals import hold_signals
from rayrec.storage import one_line
from rayrec.train.events import Event, Milestone
from rayrec.train.progress import ProgressLog
from rayrec.train.seat import RankContext, Seat

LOCAL_HOST = "localhost"  # name of the one rank's host in messages and events
STEP_S = 0.2  # between two steps that are told


def local_topology(scaling: ScalingConfig) -> Topology:
    """Return the topology of the one rank in this process.

    Raises:
        ConfigError: it shall have a GPU and torch sees none, or more threads than there are
            processors.
    """
    processors = os.cpu_count() or 1
    if scaling.cpus_per_worker > processors:
        raise ConfigError(
            f"cpus_per_worker={scaling.cpus_per_worker:g}, but this machine has "
            f"{processors} processors; ask for no more."
        )
    memory = scaling.memory_per_worker
    if scaling.use_gpu:
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                "use_gpu=True needs a GPU in this process, and torch sees none; leave use_gpu out."
            )
        memory = memory or int(torch.cuda.mem_get_info(0)[0] * (1 - GPU_RESERVE))
    return Topology.local(1, memory_bytes=memory, device=scaling.device)


def run_here(
    scaling: ScalingConfig,
    prepare: Callable[[Topology], Prepared],
    on_event: Callable[[Event], None],
    stop_asked: Callable[[], bool],
    timeout_s: float,
    on_step: Callable[[int], None],
) -> Ran:
    """Run one task in this thread.

    Args:
        scaling: resources of the rank; cpus_per_worker is its number of threads.
        prepare: makes the task for the topology.
        on_event: receives every report and line.
        stop_asked: called at the end of each window of training; True ends the task.
        on_step: receives the newest finished step, a few times a second.
    Raises:
        ConfigError: the machine lacks the resources that `scaling` asks for.
        TrainingFailed: the memory did not suffice.
        any other error that the task raised.
        RunInterrupted: a signal came before the task began.
    """
    import torch

    class ForwardingLog(ProgressLog):
        """Hands every event on at once, since nobody polls."""

        told_at = 0.0

        def add(self, event: Event) -> None:
            on_event(event)

        def at_step(self, step: int) -> None:
            super().at_step(step)
            if time.monotonic() - self.told_at >= STEP_S:
                self.told_at = time.monotonic()
                on_step(step)

    with hold_signals() as signals:
        prepared = prepare(local_topology(scaling))
        task = prepared.task
        if task is None:
            return Ran(prepared)
        signals.check()
        on_event(Milestone("plan"))
        threads_before = torch.get_num_threads()
        seat = Seat(
            rank=0,
            world_size=1,
            host=LOCAL_HOST,
            store_host=LOCAL_HOST,
            store_port=0,
            device=scaling.device,
            threads=scaling.threads,
            timeout_s=timeout_s,
        )
        torch.set_num_threads(seat.threads)
        try:
            context = RankContext(
                seat=seat, log=ForwardingLog(), should_stop=lambda: signals.came or stop_asked()
            )
            result = task.run(context)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            raise TrainingFailed(
                f"the memory of this machine did not suffice: {one_line(error)}. Use smaller "
                "layers, tables or batches, or more ranks.",
                rank=0,
                host=seat.host,
                cause=f"{type(error).__name__}: {one_line(error)}",
            ) from error
        finally:
            torch.set_num_threads(threads_before)
        return Ran(prepared, (result,), signals.number)


def _is_out_of_memory(error: Exception) -> bool:
    """Return True if an allocation failed; for CPU memory torch says so in the message only."""
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in words)
