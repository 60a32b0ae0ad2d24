"""`Hosts`: starts, watches, restarts and ends the servers of a cluster's nodes.

There is room for every replica in a placement group. The replicas whose room is on one node are one
server there, which an actor holds. Ray finds other room for those of a lost node, and a server is
started where it lies. What is inside of a server is its supervisor's to watch; here all hosts are
asked a few times a second, and what has happened is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rayrec.driver.rank_process import death_line
from rayrec.errors import ArtifactError, RayrecError, RunInterrupted, ServingError, as_user_mistake
from rayrec.serve.cluster.placing import NodePlace, kill, places_of, start_on
from rayrec.serve.server.hosted import HostedServer, HostReport
from rayrec.serve.server.process_slot import wait_before
from rayrec.serve.server.served import served_model
from rayrec.serve.server.settings import ServerSettings, ServerStatus
from rayrec.serve.server.telling import say, tell
from rayrec.storage import one_line

_LOOK_S, _ANSWER_S = 0.25, 2.0
_SILENT_S = 60.0  # an actor that has answered, and does not for so many seconds of looking, hangs
_MOST_FAILED_STARTS = 3
_ANY_HOST = ("0.0.0.0", "::")


@dataclass(slots=True, eq=False)
class _HostSlot:
    """State of the server of some replicas.

    Attributes:
        bundles: parts of the placement group with the room of its replicas.
        place: node where they lie.
        actor: holder of the server; None while it waits to be started.
        asked: pending call of `report`, or None.
        pid: id of the actor's process, once it has answered.
        status: last status of a server whose replicas answer; None until then.
        ports: ports at which it has answered on this node, or None.
        failed: number of losses and failed starts since the last answer.
        due: time of the next start.
        silent_s: seconds of watching since the last answer.
    """

    bundles: tuple[int, ...]
    place: NodePlace
    actor: Any = None
    asked: Any = None
    pid: int = 0
    status: ServerStatus | None = None
    ports: tuple[int, int] | None = None
    failed: int = 0
    due: float = 0.0
    silent_s: float = 0.0

    @property
    def name(self) -> str:
        """Name of the host in lines for the user."""
        return f"host {self.place.host}"


class Hosts:
    """Servers of one model on the nodes of a cluster.

    Args:
        group: placement group with a part for each replica.
        path: absolute path of the artifact, or of the chain.
        check: called several times a second while Ray is waited for; its error ends the wait.
    """

    def __init__(
        self,
        group: Any,
        path: str,
        settings: ServerSettings,
        follow: bool,
        check: Callable[[], None],
    ) -> None:
        self._group, self._path, self._settings = group, path, settings
        self._follow, self._check = follow, check
        self._version, self._was_ready, self._is_ending = "", False, False
        self._slots, self._unanswered = list[_HostSlot](), list[str]()

    @property
    def addresses(self) -> tuple[ServerStatus, ...]:
        """Status of every server whose replicas answer, with its addresses."""
        return tuple(slot.status for slot in self._slots if slot.status is not None)

    def start(self) -> None:
        """Check that all hosts have the same model, and wait until all replicas answer.

        Raises:
            RayrecError: an error of `serve_on_cluster`.
        """
        own = self._settings
        while not (places := places_of(self._group, range(own.replicas), self._check)):
            self._check()
            time.sleep(_LOOK_S)
        self._slots = [_HostSlot(own, place) for place, own in places.items()]
        model = self._look()
        self._version = "" if self._follow else model
        for slot in self._slots:
            self._serve(slot)
        while len(self.addresses) < len(self._slots):
            self.watch()
            try:
                self._check()
            except RunInterrupted:
                # some may answer by now, and have requests; a status comes with the second look
                for _ in range(3):
                    self.watch()
                if len(self.addresses) < len(self._slots):
                    self.drain()
                    raise
        self._was_ready = True
        step = max(one.step for one in self.addresses)
        hosts = len(self._slots)
        tell(f"{self._path}: step {step}, {own.replicas} replicas on {hosts} hosts")
        if not own.is_local:
            tell(f"whoever reaches {own.host} can ask, and nothing is encrypted")

    def watch(self) -> None:
        """Ask all hosts once, and start lost servers again; takes a quarter of a second.

        Raises:
            RayrecError: a server has not started yet, and met a mistake or was lost several times.
        """
        import ray

        for slot in list(self._slots):
            if slot.actor is None and slot.due <= time.monotonic():
                self._start_again(slot)
        alive = [slot for slot in self._slots if slot.actor is not None]
        for slot in alive:
            slot.asked = slot.asked or slot.actor.report.remote()
        asked, began = [slot.asked for slot in alive], time.monotonic()
        answered = ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_S)[0] if asked else []
        # time in which this process did not run is nobody's silence
        looked_s = min(time.monotonic() - began, _ANSWER_S)
        for slot in alive:
            if slot.asked in answered:
                slot.silent_s = 0.0
                self._hear(slot)
            elif slot.status is not None:
                slot.silent_s += looked_s
                if slot.silent_s >= _SILENT_S:
                    say(f"{slot.name} hangs: silent for {slot.silent_s:.0f} s; it is killed")
                    slot.silent_s = 0.0
                    start_on(slot.place, kill, slot.pid)
        time.sleep(_LOOK_S)

    def drain(self) -> None:
        """End all servers, each after the answers to its pending requests.

        Raises:
            ServingError: some did not answer all in time.
        """
        self._is_ending = True
        # one that is being started has no requests; `kill` ends it
        waited = [slot for slot in self._slots if slot.status is not None]
        for slot in waited:
            slot.actor.terminate.remote()
        end = time.monotonic() + self._settings.end_s + 10
        while any(slot.actor for slot in waited) and time.monotonic() < end:
            self.watch()
        late = [f"{slot.name} does not end." for slot in waited if slot.actor]
        if said := " ".join([*self._unanswered, *late]):
            raise ServingError(f"some requests were not answered. {said}")

    def kill(self) -> None:
        """End the actors, and with them what still runs."""
        import ray

        for slot in self._slots:
            if slot.actor is not None:
                ray.kill(slot.actor, no_restart=True)

    def _look(self) -> str:
        """Return the model at the path, which must be the same on all hosts."""
        import ray

        given = self._path, self._settings, self._follow
        asked = [start_on(slot.place, served_model, *given) for slot in self._slots]
        waiting, seen = asked, list[str]()
        while waiting:
            self._check()
            _, waiting = ray.wait(asked, num_returns=len(asked), timeout=_LOOK_S)
        for slot, reference in zip(self._slots, asked, strict=True):
            try:
                seen.append(ray.get(reference))
            except ray.exceptions.RayTaskError as error:
                raised = error.cause if error.cause is not None else error
                raise _of_host(slot, raised) from None
            except ray.exceptions.RayError as error:
                raise ServingError(f"{slot.name} cannot start: {death_line(error)}.") from None
        for slot, other in zip(self._slots, seen, strict=True):
            if other != seen[0]:
                raise ArtifactError(
                    f"{self._path} is {'of run' if self._follow else 'version'} {seen[0]} on "
                    f"{self._slots[0].name} and {other} on {slot.name}; copy one of them to all "
                    "hosts."
                )
        return seen[0]

    def _serve(self, slot: _HostSlot) -> None:
        own, tries = replace(self._settings, replicas=len(slot.bundles)), self._settings.replicas
        if slot.ports is not None and slot.failed <= 2 * _MOST_FAILED_STARTS:
            own, tries = replace(own, port=slot.ports[0], http_port=slot.ports[1]), 1
        options = {"follow": self._follow, "version": self._version, "tries": tries}
        slot.actor = start_on(slot.place, HostedServer, self._path, own, **options)

    def _start_again(self, lost: _HostSlot) -> None:
        """Start servers where the room of a lost one lies now; wait where it has none yet."""
        try:
            places = places_of(self._group, lost.bundles, self._check)
        except RunInterrupted:  # which ends the loop that watches, too
            return
        if self._is_ending or not places:
            lost.due = time.monotonic() + 1.0
            return
        self._slots.remove(lost)
        for place, own in places.items():
            ports = lost.ports if place == lost.place else None
            self._slots.append(slot := _HostSlot(own, place, failed=lost.failed, ports=ports))
            self._serve(slot)

    def _hear(self, slot: _HostSlot) -> None:
        """Record what a host has answered, or its loss."""
        import ray

        reference, slot.asked = slot.asked, None
        try:
            report: HostReport = ray.get(reference)
        except ray.exceptions.RayError as error:
            self._gone(slot, ServingError(f"it is lost: {death_line(error)}."), _MOST_FAILED_STARTS)
            return
        for line in report.lines:
            say(f"{slot.name}: {line}")
        if report.has_ended:
            self._gone(slot, report.error, 1)
        elif report.status is not None:
            self._answers(slot, report.pid, report.status)

    def _answers(self, slot: _HostSlot, pid: int, status: ServerStatus) -> None:
        """Record and tell the addresses and the version of a server."""
        if status.settings.host in _ANY_HOST:
            reached = replace(status.settings, host=slot.place.host)
            status = status._replace(settings=reached)
        before, slot.status = slot.status, status
        slot.pid, slot.failed = pid, 0
        slot.ports = status.settings.port, status.settings.http_port
        if before is None:
            tell(
                f"{slot.name} (process {pid}): {len(slot.bundles)} replicas, gRPC at "
                f"{status.grpc}, HTTP at {status.http}"
            )
        elif before.version != status.version:
            tell(f"{slot.name}: now at step {status.step}, version {status.version}")

    def _gone(self, slot: _HostSlot, error: RayrecError | None, tries: int) -> None:
        """Schedule another start of a server that has ended or is lost.

        Args:
            error: None where it has ended in order.
            tries: starts that may fail before all replicas have answered once.
        Raises:
            RayrecError: it is not tried again.
        """
        import ray

        ray.kill(slot.actor, no_restart=True)
        had_requests, slot.actor, slot.status = slot.status is not None, None, None
        slot.failed += 1
        if self._is_ending:
            if error is not None and had_requests:
                self._unanswered.append(f"{slot.name}: {one_line(error)}")
            return
        error = error or ServingError("it was told to end.")
        if not self._was_ready and slot.failed >= tries:
            raise _of_host(slot, error)
        wait_s = wait_before(slot.failed)
        slot.due = time.monotonic() + wait_s
        say(f"{slot.name}: {one_line(error)} It is started again in {wait_s:.1f} s")


def _of_host(slot: _HostSlot, error: BaseException) -> RayrecError:
    """Return an error with the name of its host, in its own class where it is a user's mistake."""
    text = f"{slot.name}: {one_line(error)}"
    return as_user_mistake(error, text) or ServingError(text)
