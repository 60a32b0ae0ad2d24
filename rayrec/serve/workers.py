"""Processes of this machine that work units off, each as fast as it can.

They are started anew, load what they need once, and are given one unit at a time. A worker whose
starter is gone ends with its unit.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, NamedTuple, TypeVar

from rayrec.errors import RayrecError, TrainingFailed
from rayrec.storage import one_line

U = TypeVar("U")
R = TypeVar("R")
LOOK_S = 0.2  # between two looks at whether to stop


class _Worker(NamedTuple):
    number: int
    process: BaseProcess
    connection: Connection


class WorkerPool(Generic[U, R]):
    """Worker processes of one job; a context manager, which ends them.

    Args:
        start: called once in every worker, to load what the work needs; returns unit -> result. It
            is pickled.
        count: number of workers.
    """

    def __init__(self, start: Callable[[], Callable[[U], R]], count: int) -> None:
        self._start, self._count = start, count
        self._all: list[_Worker] = []

    def __enter__(self) -> WorkerPool[U, R]:
        context = multiprocessing.get_context("spawn")
        # Starting the tracker, which a first worker would do, ends the blocking below.
        resource_tracker.ensure_running()
        # Ctrl-C reaches all processes of a terminal. The starter decides what it means, so the
        # workers inherit that it is blocked, from their first instruction on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            for number in range(self._count):
                own, theirs = context.Pipe()
                process = context.Process(
                    target=_work,
                    args=(number, theirs, self._start),
                    name=f"worker-{number}",
                    daemon=True,
                )
                process.start()
                # the end of a worker is seen by the end of its pipe, which it must hold alone
                theirs.close()
                self._all.append(_Worker(number, process, own))
        except BaseException:
            self.__exit__()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self._all:
            worker.process.kill()
        for worker in self._all:
            worker.process.join()
            worker.connection.close()

    def run(self, units: list[U], look: Callable[[], None]) -> Iterator[R]:
        """Work all units off; results come in any order.

        Args:
            look: called several times a second; its error ends the work.
        Raises:
            RayrecError: the error of the first worker that failed.
            TrainingFailed: a worker died, or met a defect.
        """
        left = iter(units)
        busy: dict[Connection, _Worker] = {}
        for worker, unit in zip(self._all, left, strict=False):
            busy[worker.connection] = worker
            _give(worker, unit)
        while busy:
            answered = wait(list(busy), LOOK_S)
            # before the answers: a signal to all processes has ended the workers, too
            look()
            for ready in answered:
                assert isinstance(ready, Connection)
                worker = busy[ready]
                result: R = _result(worker)
                yield result
                try:
                    _give(worker, next(left))
                except StopIteration:
                    del busy[ready]


def _give(worker: _Worker, unit: object) -> None:
    with suppress(BrokenPipeError):  # the worker died, which `_result` tells
        worker.connection.send(unit)


def _result(worker: _Worker) -> Any:
    """Return the result that a worker sent for a unit, unless it failed or is gone."""
    name = f"worker {worker.number}"
    try:
        result = worker.connection.recv()
    except (EOFError, ConnectionError):
        worker.process.join()
        code = worker.process.exitcode
        raise TrainingFailed(
            f"{name} (process {worker.process.pid}) ended with code {code}. After -9 look for a "
            "lack of memory, and take fewer workers; a script that starts workers needs its code "
            "behind `if __name__ == '__main__':`.",
            rank=worker.number,
        ) from None
    if isinstance(result, RayrecError):
        raise result
    return result


def _work(number: int, connection: Connection, start: Callable[[], Callable[[U], R]]) -> None:
    """Work units off, and send each one's result or error, until the starter is gone."""
    do: Callable[[U], R] | None = None
    with suppress(EOFError, ConnectionError):
        while True:
            unit = connection.recv()
            try:
                do = do or start()
                result: R | RayrecError = do(unit)
            except RayrecError as error:
                result = error
            except Exception as error:
                cause = f"{type(error).__name__}: {one_line(error)}"
                said = f"worker {number} failed: {cause}."
                trace = traceback.format_exc()
                result = TrainingFailed(said, rank=number, cause=cause, traceback=trace)
            connection.send(result)
