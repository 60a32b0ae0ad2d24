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
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from rayrec.errors import RayrecError, TrainingFailed

U = TypeVar("U", contravariant=True)
R = TypeVar("R", covariant=True)
T = TypeVar("T")
LOOK_S = 0.2  # between two looks at whether to stop


class WorkerJob(Protocol[U, R]):
    """WorkerJob of the workers; it is pickled."""

    def start(self) -> Callable[[U], R]:
        """Load what the work needs; called once in every worker.

        Returns:
            unit -> result.
        """


class WorkerFailure(NamedTuple):
    """Error that ended a worker: one of rayrec's, or the text of another one and its traceback."""

    error: RayrecError | str
    trace: str = ""


class _Worker(NamedTuple):
    number: int
    process: BaseProcess
    connection: Connection


class WorkerPool(Generic[U, R]):
    """Worker processes of one job; a context manager, which ends them.

    Args:
        job: job of every worker.
        count: number of workers.
    """

    def __init__(self, job: WorkerJob[U, R], count: int) -> None:
        self._job, self._count = job, count
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
                    target=_work, args=(theirs, self._job), name=f"worker-{number}", daemon=True
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
    """Return the result that a worker sent for a unit.

    Raises:
        RayrecError: the worker failed, or is gone.
    """
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
    if not isinstance(result, WorkerFailure):
        return result
    if isinstance(result.error, RayrecError):
        raise result.error
    raise TrainingFailed(
        f"{name} failed: {result.error}.",
        rank=worker.number,
        cause=result.error,
        traceback=result.trace,
    )


def _work(connection: Connection, job: WorkerJob[U, R]) -> None:
    """Work units off until the starter is gone."""
    with suppress(EOFError, ConnectionError):
        unit = connection.recv()
        do = _tried(job.start)
        while not isinstance(do, WorkerFailure):
            connection.send(_tried(do, unit))
            unit = connection.recv()
        connection.send(do)


def _tried(function: Callable[..., T], *args: object) -> T | WorkerFailure:
    """Call a function, and return its result or its error as a `WorkerFailure`."""
    try:
        return function(*args)
    except RayrecError as error:
        return WorkerFailure(error)
    except Exception as error:
        text = " ".join(str(error).split())
        return WorkerFailure(f"{type(error).__name__}: {text}", traceback.format_exc())
