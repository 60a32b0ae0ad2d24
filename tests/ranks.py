"""Real ranks for tests: a pool of processes that joins a fresh gloo group for every task.

Importing torch costs more than two seconds, so the processes are forked from one that has imported
it (multiprocessing's fork server, which has no threads), once per test session, and reused. A task
of W ranks uses the first W of them, with a process group of its own. All meet in one store, which
rank 0 keeps and everyone opens once: torch looks up the name of who connects, and a name server may
take seconds to answer. Every wait is bounded. A task that fails or hangs costs the pool its
processes, and the next task starts new ones.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

START_S, TASK_S = 120.0, 120.0
PRELOADED = [
    "pytest",
    # a second of each rank that makes DDP or an optimizer of torch
    "torch._dynamo",
    "rayrec.distributed",
    "rayrec.models",
    "rayrec.planner",
    "rayrec.train.pipeline",
    "rayrec.driver.planning",
]


class RankFailed(AssertionError):
    """A rank of a task raised, or died."""


class RankPool:
    """Up to `size` rank processes of one torch thread each.

    Args:
        method: of multiprocessing; "spawn" where what is preloaded must not be forked, as CUDA.
    """

    def __init__(self, size: int = 4, method: str = "forkserver") -> None:
        self.size, self.method = size, method
        self.processes: list[mp.process.BaseProcess] = []
        self.pipes: list[Connection] = []
        self.generation = 0

    def run(
        self, world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = TASK_S
    ) -> list[Any]:
        """Run `fn(rank, world_size, *args)` on `world_size` ranks inside a gloo group; results in
        rank order.

        Raises:
            RankFailed: with the traceback of the first rank that failed.
        """
        assert world_size <= self.size
        if not self.processes:
            self._start()
        try:
            return self._run(world_size, fn, args, timeout_s)
        except BaseException:  # a limit of pytest, too: the next task must not get these answers
            self.close()
            raise

    def _run(
        self, world_size: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
    ) -> list[Any]:
        self.generation += 1
        pipes = self.pipes[:world_size]
        for rank, pipe in enumerate(pipes):
            pipe.send(((rank, world_size, self.generation), (fn, args)))
        results: dict[int, Any] = {}
        while len(results) < world_size:
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
            ready = wait(waiting, timeout_s)
            if not ready:
                raise RankFailed(
                    f"ranks {[r for r in range(world_size) if r not in results]} gave "
                    f"no answer in {timeout_s:.0f} s"
                )
            for pipe in ready:
                rank = pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    ok, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    ok, value = False, "the process died"
                if not ok:
                    raise RankFailed(f"rank {rank} of {world_size} failed:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join(10)
        self.processes, self.pipes = [], []

    def _start(self) -> None:
        context = mp.get_context(self.method)
        if self.method == "forkserver":
            context.set_forkserver_preload(PRELOADED)
        for _ in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        self.pipes[0].send(None)
        if not self.pipes[0].poll(START_S):
            self.close()
            raise RankFailed(f"a rank process did not start in {START_S:.0f} s")
        port = self.pipes[0].recv()
        for pipe in self.pipes[1:]:
            pipe.send(port)


def _serve(pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from rayrec.comm.process_group import (
        connect_store,
        create_store,
        destroy_process_group,
        init_process_group,
    )

    torch.set_num_threads(1)
    port, modules = pipe.recv(), 0
    store = create_store("127.0.0.1") if port is None else connect_store("127.0.0.1", port)
    if port is None:
        pipe.send(store.port)
    while True:
        try:
            where, (fn, args) = pipe.recv()
        except EOFError:
            return
        try:
            if len(sys.modules) > modules:
                # A task ends with two full collections (destroy_process_group), which took 0.15 s
                # while they walked what imports had made.
                gc.collect()
                gc.freeze()
                modules = len(sys.modules)
            rank, world_size, generation = where
            init_process_group(store, rank, world_size, timeout_s=60, generation=generation)
            try:
                pipe.send((True, fn(rank, world_size, *args)))
            finally:
                destroy_process_group()
        except BaseException:
            pipe.send((False, traceback.format_exc()))
