"""`serve`: forks the replicas of a server, and starts again what dies.

The parent loads the artifact, so that a mistake is told before anything is started, and forks: the
replicas share what it has loaded, need no start of their own, and have the same weights whatever
happens to the folder later. It scores nothing and has no thread, which a fork would not survive.

All replicas listen at the same ports (SO_REUSEPORT), among which the kernel spreads connections.
The parent holds them (`held`).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from rayrec.errors import RayrecError, ServingError
from rayrec.machine.memory import tune_malloc
from rayrec.serve.chain.following import FollowingPredictor
from rayrec.serve.memory import populate
from rayrec.serve.predictor import Predictor
from rayrec.serve.server.held import forget_numbers, metrics_folder, reserved
from rayrec.serve.server.leading import CHANGED, Lead
from rayrec.serve.server.served import served_schema, tables_of
from rayrec.serve.server.settings import ServerSettings
from rayrec.storage import one_line

_SIGNALS = {signal.SIGTERM, signal.SIGINT}
_PARENT_DEATH_SIGNAL = 1  # prctl's name of it
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 10.0
_SOUND_S = 30.0  # a replica that lived so long is started again without a longer wait
_MOST_FAILED_STARTS = 3


def serve(path: str, settings: ServerSettings, *, follow: bool = False) -> None:
    """Serve an artifact until SIGTERM or SIGINT.

    Args:
        path: of the artifact; with `follow` of a run that publishes, or of its publications.
        follow: serve what is published from version to version.
    Raises:
        ConfigError: the artifact has no schema, or an address or a key cannot be had.
        ArtifactError: there is no artifact, or a file of it is missing or damaged; or it is not
            signed, or not trusted and cannot be served without code.
        ServingError: no replica can start, or some had to be killed with requests unanswered.
    """
    # a pool of threads would be gone in the replicas, which would wait for it for ever
    torch.set_num_threads(1)
    tune_malloc()
    with reserved(settings) as own:
        predictor: Predictor
        if follow:
            predictor = Predictor.follow(
                path,
                strict=settings.strict,
                trusted=settings.trusted,
                signing_key=settings.signing_key,
            )
        else:
            predictor = Predictor.load(
                path, trusted=settings.trusted, signing_key=settings.signing_key
            )
        served_schema(predictor, path)
        with metrics_folder():
            Supervisor(predictor, own).run(path)


@dataclass(slots=True, eq=False)
class _Slot:
    """One of the replicas.

    Attributes:
        process: None while it waits to be started again.
        said: a message arrives once it takes requests, and once it has changed over to a version.
        is_ready: whether it has.
        started: when it was.
        wait_s: seconds before the next start.
    """

    number: int
    process: BaseProcess | None = None
    said: Connection | None = None
    is_ready: bool = False
    started: float = 0.0
    wait_s: float = _FIRST_WAIT_S


class Supervisor:
    """Starts the replicas, starts again what dies, and ends all of them.

    Args:
        predictor: which the replicas inherit.
        settings: with the ports that are held.
    """

    def __init__(self, predictor: Predictor, settings: ServerSettings) -> None:
        self._predictor, self._settings = predictor, settings
        self._context: ForkContext = multiprocessing.get_context("fork")
        self._slots = [_Slot(number) for number in range(settings.replicas)]
        self._lead: Lead | None = None
        if isinstance(predictor, FollowingPredictor):
            self._lead = Lead(predictor, settings.poll_s)
        self._failed_starts = 0
        self._was_ready = self._is_ending = False
        self._wake_reader, self._wake_writer = self._context.Pipe(duplex=False)

    def run(self, name: str) -> None:
        """Serve until SIGTERM or SIGINT; `name` is what the first line calls the artifact."""
        before = {one: signal.signal(one, self._on_signal) for one in _SIGNALS}
        try:
            for slot in self._slots:
                self._start(slot)
            while not self._is_ending:
                self._watch(name)
            self._drain()
        finally:
            for slot in self._slots:
                if slot.process is not None and slot.process.is_alive():
                    slot.process.kill()
                    slot.process.join()
            for one, handler in before.items():
                signal.signal(one, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        self._is_ending = True
        self._wake_writer.send(None)

    def _start(self, slot: _Slot) -> None:
        slot.said, theirs = self._context.Pipe()
        slot.process = self._context.Process(
            target=_replica,
            args=(self._predictor, self._settings, slot.number, theirs, os.getpid(), self._lead),
            name=f"rayrec-serve-{slot.number}",
        )
        # the child opens its ears itself
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            slot.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        theirs.close()
        slot.is_ready, slot.started = False, time.monotonic()

    def _watch(self, name: str) -> None:
        """Wait for what happens next, and do what follows from it."""
        waited: list[Any] = [self._wake_reader]
        for slot in self._slots:
            if slot.process is not None:
                waited.append(slot.process.sentinel)
            if slot.said is not None:
                waited.append(slot.said)
        happened = wait(waited, self._timeout())
        for slot in self._slots:
            if slot.said in happened:
                self._hear(slot, name)
            if slot.process is not None and slot.process.sentinel in happened:
                self._bury(slot)
            elif slot.process is None and self._due(slot) <= time.monotonic():
                self._start(slot)
        if self._lead is not None and self._was_ready:
            self._follow(self._lead)

    def _timeout(self) -> float | None:
        """Seconds until something has to be done; None where nothing is known of."""
        now = time.monotonic()
        due = [self._due(slot) - now for slot in self._slots if slot.process is None]
        if self._lead is not None and self._was_ready:
            due.append(self._lead.timeout())
        return max(0.0, min(due)) if due else None

    def _follow(self, lead: Lead) -> None:
        """Bring the replicas to the next version, where there is one."""
        for number in lead.late():
            process = self._slots[number].process
            if process is not None:
                print(f"replica {number} hangs; it is killed", file=sys.stderr, flush=True)
                process.kill()
        lead.turn({slot.number: slot.said for slot in self._slots if slot.said is not None})

    def _hear(self, slot: _Slot, name: str) -> None:
        assert slot.said is not None
        try:
            message = slot.said.recv_bytes()
        except (EOFError, OSError):  # it died, which its sentinel tells
            slot.said.close()
            slot.said = None
            return
        if message == CHANGED and self._lead is not None:
            self._lead.heard(slot.number)
            return
        slot.is_ready = True
        if not self._was_ready and all(one.is_ready for one in self._slots):
            self._was_ready = True
            own = self._settings
            print(
                f"{name}: step {self._predictor.step}, {own.replicas} replicas, gRPC at "
                f"{own.address(own.port)}, HTTP at {own.address(own.http_port)}",
                flush=True,
            )
            if not own.is_local:
                print(f"whoever reaches {own.host} can ask, and nothing is encrypted", flush=True)

    def _bury(self, slot: _Slot) -> None:
        """Say how a replica ended, and when it is started again."""
        process = slot.process
        assert process is not None and process.pid is not None
        process.join()
        forget_numbers(process.pid)
        if not slot.is_ready:
            self._failed_starts += 1
            if not self._was_ready and self._failed_starts >= _MOST_FAILED_STARTS:
                raise ServingError(
                    f"no replica can start; {self._failed_starts} have failed, the last with code "
                    f"{process.exitcode}. The lines above say why."
                )
        if time.monotonic() - slot.started > _SOUND_S:
            slot.wait_s = _FIRST_WAIT_S
        print(
            f"replica {slot.number} (process {process.pid}) ended with code {process.exitcode}; "
            f"it is started again in {slot.wait_s:.1f} s",
            file=sys.stderr,
            flush=True,
        )
        if self._lead is not None:
            self._lead.heard(slot.number)
        slot.process = slot.said = None
        slot.started = time.monotonic()

    def _due(self, slot: _Slot) -> float:
        return slot.started + slot.wait_s

    def _drain(self) -> None:
        """End all replicas, each after the answers to what it has."""
        alive = [slot.process for slot in self._slots if slot.process is not None]
        for process in alive:
            process.terminate()
        end = time.monotonic() + self._settings.drain_s + 5
        for process in alive:
            process.join(max(0.0, end - time.monotonic()))
        late = [process for process in alive if process.exitcode != 0]
        if late:
            raise ServingError(
                f"{len(late)} of {len(alive)} replicas did not end by themselves within "
                f"{self._settings.drain_s:g} s; some requests were not answered."
            )


def _replica(
    predictor: Predictor,
    settings: ServerSettings,
    number: int,
    said: Connection,
    parent: int,
    lead: Lead | None,
) -> None:
    """What a forked process does; ends the process."""
    for one in _SIGNALS:
        signal.signal(one, signal.SIG_DFL)
    with suppress(OSError, AttributeError):
        # a parent that is killed can end nobody
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    # here and not in the parent: gRPC does not survive a fork, and prometheus_client looks for the
    # folder of its numbers when it is imported
    from rayrec.serve.server.replica import run_replica

    for data in tables_of(predictor):
        populate(data)
    try:
        code = run_replica(predictor, settings, lambda: said.send_bytes(b"ready"), lead, said)
    except RayrecError as error:
        print(f"replica {number}: {one_line(error)}", file=sys.stderr, flush=True)
        code = 1
    sys.stdout.flush()
    os._exit(code)
