"""`serve`: forks the replicas of a server, and restarts those that die or hang.

The parent loads the artifact, so that a mistake is told before anything is started, and forks: the
replicas share what it has loaded, need no start of their own, and have the same weights whatever
happens to the folder later. It scores nothing and has no thread, which a fork would not survive.

All replicas listen at the same ports (SO_REUSEPORT), among which the kernel spreads connections.
The parent holds them (`held`).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext
from typing import Any

import torch

from rayrec.errors import ServingError
from rayrec.machine.memory import tune_malloc
from rayrec.serve.chain.following import FollowingPredictor
from rayrec.serve.predictor import Predictor
from rayrec.serve.server.forked import SIGNALS, run_forked
from rayrec.serve.server.held import forget_numbers, keep_folder, metrics_folder, reserved
from rayrec.serve.server.leading import CHANGED, LATE, Lead
from rayrec.serve.server.process_slot import ProcessSlot, wait_before
from rayrec.serve.server.pulse import SILENT_S, STARTING_S, Pulses
from rayrec.serve.server.served import served_predictor
from rayrec.serve.server.settings import ServerSettings, ServerStatus
from rayrec.serve.server.telling import say, tell
from rayrec.storage import one_line

_SOUND_S = 30.0  # a replica that lived so long is started again without a longer wait
_MOST_FAILED_STARTS = 3


def serve(
    path: str,
    settings: ServerSettings,
    *,
    follow: bool = False,
    version: str = "",
    tries: int = 1,
    holder: Connection | None = None,
) -> None:
    """Serve an artifact until SIGTERM or SIGINT.

    Args:
        path, follow, version: the arguments of `served_predictor`.
        tries: number of pairs of ports to try; see `reserved`.
        holder: connection to a process that asks for the status; the server ends when it is closed.
    Raises:
        ConfigError, ArtifactError: the errors of `served_predictor`; or an address cannot be had.
        ServingError: no replica can start, or some had to be killed with requests unanswered.
    """
    # a pool of threads would be gone in the replicas, which would wait for it for ever
    torch.set_num_threads(1)
    tune_malloc()
    with reserved(settings, tries) as own:
        predictor = served_predictor(path, settings, follow=follow, version=version)
        with metrics_folder():
            Supervisor(predictor, own, holder).run(path)


class Supervisor:
    """Starts the replicas, restarts those that die, and ends all of them.

    Args:
        predictor: predictor that the replicas inherit by the fork.
        settings: settings with the ports that are held.
        holder: the argument of `serve`.
    """

    def __init__(
        self, predictor: Predictor, settings: ServerSettings, holder: Connection | None = None
    ) -> None:
        self._predictor, self._settings, self._holder = predictor, settings, holder
        self._context: ForkContext = multiprocessing.get_context("fork")
        self._slots = [ProcessSlot(number) for number in range(settings.replicas)]
        self._pulses = Pulses(settings.replicas)
        self._lead: Lead | None = None
        if isinstance(predictor, FollowingPredictor):
            self._lead = Lead(predictor, settings.poll_s)
        self._failed_starts = 0
        self._was_ready = self._is_ending = False
        self._wake_reader, self._wake_writer = self._context.Pipe(duplex=False)

    def run(self, name: str) -> None:
        """Serve until SIGTERM or SIGINT; `name` is what the first line calls the artifact."""
        before = {one: signal.signal(one, self._on_signal) for one in SIGNALS}
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
        # at once, since this process may read a base for minutes
        for slot in self._slots:
            slot.end()
        self._wake_writer.send(None)

    def _start(self, slot: ProcessSlot) -> None:
        """Start a replica; where the system refuses, the others go on and it is tried again."""
        try:
            keep_folder()
            self._fork(slot)
        except OSError as error:  # of memory, processes, file descriptors or the disk
            slot.is_ready = False
            self._again(slot, f"replica {slot.number} cannot be started: {one_line(error)}")

    def _fork(self, slot: ProcessSlot) -> None:
        slot.said, theirs = self._context.Pipe()
        slot.process = self._context.Process(
            target=run_forked,
            args=(
                *(self._predictor, self._settings, slot.number, theirs),
                *(self._pulses, self._lead, os.getpid()),
            ),
            name=f"rayrec-serve-{slot.number}",
        )
        slot.is_told = False
        self._pulses.begin(slot.number)
        # the child opens its ears itself
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            slot.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        theirs.close()
        slot.is_ready, slot.started = False, time.monotonic()

    def _watch(self, name: str) -> None:
        """Wait for the next event of a replica, and handle it."""
        waited: list[Any] = [self._wake_reader]
        if self._holder is not None:
            waited.append(self._holder)
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
            elif slot.process is None and slot.due <= time.monotonic():
                self._start(slot)
        if self._holder is not None and self._holder in happened:
            self._answer(self._holder)
        if self._pulses.due_s() == 0:
            self._end_what_hangs()
        if self._lead is not None and self._was_ready:
            said = {slot.number: slot.said for slot in self._slots if slot.said is not None}
            self._lead.turn(said)

    def _answer(self, holder: Connection) -> None:
        """Tell the holder the status; end where it is gone."""
        try:
            holder.recv_bytes()
            holder.send(self._status() if self._was_ready else None)
        except (EOFError, OSError):
            self._is_ending = True

    def _status(self) -> ServerStatus:
        weights = self._predictor.weights
        return ServerStatus(self._settings, weights.name, weights.step)

    def _end_what_hangs(self) -> None:
        """Kill replicas that have been silent for too long, so that they are restarted."""
        # what was killed once has no connection any more
        heard = {s.number: s.process for s in self._slots if s.said is not None}
        silent = self._pulses.look({n: p.pid for n, p in heard.items() if p and p.pid is not None})
        for number, seconds in silent.items():
            slot = self._slots[number]
            if seconds > (SILENT_S if slot.is_ready else STARTING_S):
                self._kill(slot, f"hangs: silent for {seconds:.0f} s")

    def _kill(self, slot: ProcessSlot, why: str) -> None:
        """Kill a replica, for which nobody waits then, however slowly it dies."""
        assert slot.process is not None
        say(f"replica {slot.number} {why}; it is killed")
        slot.process.kill()
        self._leave(slot)

    def _leave(self, slot: ProcessSlot) -> None:
        """Close the connection to a replica that is gone, or will be; no version waits for it."""
        if slot.said is not None:
            slot.said.close()
            slot.said = None
        if self._lead is not None:
            self._lead.heard(slot.number)

    def _timeout(self) -> float:
        """Return the seconds until a start, a look or a publication is due."""
        now = time.monotonic()
        due = [slot.due - now for slot in self._slots if slot.process is None]
        due.append(self._pulses.due_s())
        if self._lead is not None and self._was_ready:
            due.append(self._lead.timeout())
        return max(0.0, min(due))

    def _hear(self, slot: ProcessSlot, name: str) -> None:
        assert slot.said is not None
        try:
            message = slot.said.recv_bytes()
        except (EOFError, OSError):  # the replica died, which its sentinel tells
            self._leave(slot)
            return
        if message == CHANGED and self._lead is not None:
            self._lead.heard(slot.number)
            return
        if message == LATE:
            self._kill(slot, "does not change over")
            return
        slot.is_ready = True
        if not self._was_ready and all(one.is_ready for one in self._slots):
            self._was_ready = True
            own, status = self._settings, self._status()
            tell(
                f"{name}: step {status.step}, {own.replicas} replicas, gRPC at {status.grpc}, "
                f"HTTP at {status.http}"
            )
            if not own.is_local:
                tell(f"whoever reaches {own.host} can ask, and nothing is encrypted")

    def _bury(self, slot: ProcessSlot) -> None:
        """Report how a replica ended, and when it is restarted."""
        process = slot.process
        assert process is not None and process.pid is not None
        process.join()
        forget_numbers(slot.number)
        if time.monotonic() - slot.started > _SOUND_S:
            slot.ends = 0
        self._leave(slot)
        what = f"replica {slot.number} (process {process.pid}) ended with code {process.exitcode}"
        self._again(slot, what)

    def _again(self, slot: ProcessSlot, what: str) -> None:
        """Say why a replica does not run, and start it again later.

        Raises:
            ServingError: none has run yet, and too many starts have failed.
        """
        if not slot.is_ready:
            self._failed_starts += 1
            if not self._was_ready and self._failed_starts >= _MOST_FAILED_STARTS:
                raise ServingError(
                    f"no replica can start; {self._failed_starts} have failed, the last: {what}. "
                    "The lines above say why."
                )
        slot.ends += 1
        slot.process = slot.said = None
        slot.started = time.monotonic()
        say(f"{what}; it is started again in {wait_before(slot.ends):.1f} s")

    def _drain(self) -> None:
        """End all replicas, each after the answers to what it has."""
        alive = [slot.process for slot in self._slots if slot.process is not None]
        for slot in self._slots:
            slot.end()
        end = time.monotonic() + self._settings.end_s + 5
        for process in alive:
            process.join(max(0.0, end - time.monotonic()))
        late = [process for process in alive if process.exitcode != 0]
        if late:
            raise ServingError(
                f"{len(late)} of {len(alive)} replicas did not end by themselves within "
                f"{self._settings.end_s:g} s; some requests were not answered."
            )
