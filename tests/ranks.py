"""Real ranks for tests: a pool of processes that joins a fresh gloo group for every task.

Importing torch costs more than a second per process, so the processes are started once per test session and reused; a task of W ranks
uses the first W of them, with a store and a process group of its own. Every wait is bounded. A task that fails or hangs costs the pool
its processes, and the next task starts new ones.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

START_S, TASK_S = 120.0, 120.0


class RankFailed(AssertionError):
    """A rank of a task raised, or died."""


class RankPool:
    """Up to `size` rank processes of one torch thread each."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self.processes: list[mp.process.BaseProcess] = []
        self.pipes: list[Connection] = []
        self.generation = 0

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = TASK_S) -> list[Any]:
        """Run `fn(rank, world_size, *args)` on `world_size` ranks inside a gloo group; results in rank order.

        Raises:
            RankFailed: with the traceback of the first rank that failed.
        """
        assert world_size <= self.size
        if not self.processes:
            self._start()
        self.generation += 1
        pipes = self.pipes[:world_size]
        pipes[0].send(("store", None, None))
        port = self._receive(pipes[0], START_S)
        for rank, pipe in enumerate(pipes):
            pipe.send(("task", (rank, world_size, port, self.generation), (fn, args)))
        results: dict[int, Any] = {}
        while len(results) < world_size:
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
            ready = wait(waiting, timeout_s)
            if not ready:
                self.close()
                raise RankFailed(f"ranks {[r for r in range(world_size) if r not in results]} gave no answer in {timeout_s:.0f} s")
            for pipe in ready:
                rank = pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    ok, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    ok, value = False, "the process died"
                if not ok:
                    self.close()
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
        context = mp.get_context("spawn")
        for _ in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def _receive(self, pipe: Connection, timeout_s: float) -> Any:
        if not pipe.poll(timeout_s):
            self.close()
            raise RankFailed(f"a rank process did not start in {timeout_s:.0f} s")
        ok, value = pipe.recv()
        assert ok, value
        return value


def _serve(pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from rayrec.comm.process_group import connect_store, create_store, destroy_process_group, init_process_group

    torch.set_num_threads(1)
    own_store = None
    while True:
        try:
            kind, where, work = pipe.recv()
        except EOFError:
            return
        try:
            if kind == "store":
                own_store = create_store("127.0.0.1")
                pipe.send((True, own_store.port))
                continue
            rank, world_size, port, generation = where
            store = own_store if rank == 0 else connect_store("127.0.0.1", port)
            assert store is not None
            init_process_group(store, rank, world_size, timeout_s=60, generation=generation)
            try:
                fn, args = work
                pipe.send((True, fn(rank, world_size, *args)))
            finally:
                destroy_process_group()
        except BaseException:
            pipe.send((False, traceback.format_exc()))
