"""`Replicas`: starts, watches, restarts and ends the replicas of a server on a cluster.

Ray restarts a replica whose process or node is lost and repeats its call of `serve`. What is left
to do here is to look at all replicas a few times a second, and to tell what has happened to them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rayrec.driver.ray_replies import death_line
from rayrec.errors import ArtifactError, RayrecError, RunInterrupted, ServingError, as_user_mistake
from rayrec.serve.cluster.replica import Seen, Where, kill_worker
from rayrec.serve.server.settings import ServerSettings
from rayrec.storage import one_line

_LOOK_S = 0.25
_ANSWER_S = 2.0
_SILENT_S = 60.0  # one that has answered, and does not for so many seconds of looking, hangs
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 10.0
_MOST_FAILED_STARTS = 3


@dataclass(slots=True, eq=False)
class _ActorSlot:
    """State of one replica.

    Attributes:
        serving: pending call of `serve`; None while it waits to be repeated.
        asked: pending call of `where`, or None.
        where: addresses of the replica; None while it does not answer.
        is_lost: its process is gone, and the next one has not answered yet.
        failed: number of losses and failed starts since the last answer.
        due: time at which the call of `serve` is repeated.
        silent_s: seconds of watching since the last answer.
    """

    number: int
    actor: Any
    serving: Any = None
    asked: Any = None
    where: Where | None = None
    is_lost: bool = False
    failed: int = 0
    due: float = 0.0
    silent_s: float = 0.0

    @property
    def name(self) -> str:
        """Name of the replica in lines for the user."""
        return f"replica {self.number}"


class Replicas:
    """Replicas of one server.

    Args:
        actors: one each.
        path: absolute, of the artifact.
    """

    def __init__(self, actors: list[Any], path: str, settings: ServerSettings) -> None:
        self._slots = [_ActorSlot(number, actor) for number, actor in enumerate(actors)]
        self._path, self._settings = path, settings
        self._version, self._was_ready = "", False

    @property
    def addresses(self) -> tuple[Where, ...]:
        """Addresses of the replicas that answered when last polled."""
        return tuple(slot.where for slot in self._slots if slot.where is not None)

    def start(self, check: Callable[[], None]) -> None:
        """Check that all hosts have the artifact, and wait until all replicas answer.

        Raises:
            RayrecError: an error of `serve_on_cluster`.
        """
        seen = self._look(check)
        self._version = seen.version
        for slot in self._slots:
            self._serve(slot)
        self._wait_for_all(check)
        self._was_ready = True
        hosts = len({where.host for where in self.addresses})
        own = self._settings
        print(
            f"{self._path}: step {seen.step}, {own.replicas} replicas on {hosts} hosts", flush=True
        )
        if not own.is_local:
            print(f"whoever reaches {own.host} can ask, and nothing is encrypted", flush=True)

    def _wait_for_all(self, check: Callable[[], None]) -> None:
        self.watch()
        while len(self.addresses) < len(self._slots):
            try:
                check()
            except RunInterrupted:
                # some may answer by now, and have requests
                self.watch()
                if len(self.addresses) == len(self._slots):
                    return
                self.drain()
                raise
            self.watch()

    def watch(self) -> None:
        """Poll all replicas once, and restart lost ones; takes a quarter of a second.

        Raises:
            ServingError: a replica is gone for good, or does not start.
            RayrecError: the first start of a replica has met a mistake.
        """
        import ray

        for slot in self._slots:
            if slot.asked is None:
                slot.asked = slot.actor.where.remote()
            if slot.serving is None and slot.due <= time.monotonic():
                self._serve(slot)
        asked, began = [slot.asked for slot in self._slots], time.monotonic()
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_S)
        # time in which this process did not run is nobody's silence
        looked_s = min(time.monotonic() - began, _ANSWER_S)
        for slot in self._slots:
            if slot.asked in answered:
                slot.silent_s = 0.0
                self._hear(slot)
            elif slot.where is not None:
                slot.silent_s += looked_s
                self._end_if_it_hangs(slot)
            if slot.serving is not None and ray.wait([slot.serving], timeout=0)[0]:
                self._ended(slot)
        time.sleep(_LOOK_S)

    def drain(self) -> None:
        """End all replicas, each after the answers to its pending requests.

        Raises:
            ServingError: some did not answer all in time.
        """
        import ray

        # one that is being started again has no requests
        alive = [slot for slot in self._slots if slot.where is not None]
        for slot in alive:
            slot.actor.stop.remote()
        serving = [slot.serving for slot in alive if slot.serving is not None]
        seconds = self._settings.end_s
        done = (
            ray.wait(serving, num_returns=len(serving), timeout=seconds + 5)[0] if serving else []
        )
        sound = 0
        for reference in done:
            with suppress(ray.exceptions.RayError):
                sound += ray.get(reference) == 0
        if sound < len(alive):
            raise ServingError(
                f"{len(alive) - sound} of {len(alive)} replicas did not end by themselves within "
                f"{seconds:g} s; some requests were not answered."
            )

    def _look(self, check: Callable[[], None]) -> Seen:
        """Return the artifact at the path, which must be the same on all hosts.

        Raises:
            ArtifactError: they see different versions.
        """
        import ray

        asked = [slot.actor.look.remote(self._path) for slot in self._slots]
        waiting = asked
        while waiting:
            check()
            _, waiting = ray.wait(asked, num_returns=len(asked), timeout=_LOOK_S)
        pairs = zip(self._slots, asked, strict=True)
        seen: list[Seen] = [_seen(slot.name, reference) for slot, reference in pairs]
        first = seen[0]
        for other in seen:
            if other.version != first.version:
                raise ArtifactError(
                    f"{self._path} is version {first.version} on host {first.host} and "
                    f"{other.version} on host {other.host}; copy one of them to all hosts."
                )
        return first

    def _serve(self, slot: _ActorSlot) -> None:
        # Ray repeats this call where it restarts the actor
        call = slot.actor.serve.options(max_task_retries=-1)
        slot.serving = call.remote(self._path, self._settings, self._version)

    def _hear(self, slot: _ActorSlot) -> None:
        """Record the addresses that a replica answered, or its loss."""
        import ray

        reference, slot.asked = slot.asked, None
        before = slot.where
        try:
            where: Where | None = ray.get(reference)
        except ray.exceptions.RayActorError as error:
            if not slot.is_lost:
                is_away = isinstance(error, ray.exceptions.ActorUnavailableError)
                why = "its process or its node is gone" if is_away else death_line(error)
                self._lost(slot, why)
            return
        if before is not None and where != before and not slot.is_lost:
            self._lost(slot, f"process {before.pid} is gone")
        slot.is_lost = False
        if where is None or where == before:
            return
        slot.where, slot.failed = where, 0
        print(
            f"{slot.name} on {where.host} (process {where.pid}): gRPC at {where.grpc}, HTTP at "
            f"{where.http}",
            flush=True,
        )

    def _end_if_it_hangs(self, slot: _ActorSlot) -> None:
        """Kill a replica that is silent for too long; Ray starts it again."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if slot.silent_s >= _SILENT_S:
            assert slot.where is not None, "only a replica that has answered can hang"
            _say(f"{slot.name} hangs: silent for {slot.silent_s:.0f} s; it is killed")
            slot.silent_s = 0.0
            # on its node: `ray.kill` of a stopped process had no effect in some runs
            here = NodeAffinitySchedulingStrategy(slot.where.node, soft=False)
            kill = ray.remote(kill_worker).options(num_cpus=0, scheduling_strategy=here)
            kill.remote(slot.where.pid)

    def _lost(self, slot: _ActorSlot, why: str) -> None:
        """Report a lost replica, which Ray starts again.

        Raises:
            ServingError: it was lost several times before all replicas were there.
        """
        where = f" on {slot.where.host}" if slot.where is not None else ""
        slot.where, slot.is_lost = None, True
        slot.failed += 1
        if not self._was_ready and slot.failed >= _MOST_FAILED_STARTS:
            raise ServingError(
                f"{slot.name} cannot start; it was lost {slot.failed} times, the last time because "
                f"{why}. Its log is in Ray's folder on its host."
            )
        _say(f"{slot.name}{where} is lost: {why}; Ray starts it again")

    def _ended(self, slot: _ActorSlot) -> None:
        """Schedule another start of a replica whose call of `serve` has ended.

        Raises:
            RayrecError: not all replicas have answered yet, or Ray does not start it again.
        """
        import ray

        reference, slot.serving = slot.serving, None
        try:
            ray.get(reference)
            why = "it was told to end."
        except ray.exceptions.RayActorError as error:
            raise ServingError(f"{slot.name} is gone for good: {death_line(error)}.") from None
        except ray.exceptions.RayTaskError as error:
            mistake = _raised(slot.name, error)
            if not self._was_ready:
                raise mistake from None
            why = one_line(mistake)
        wait_s = min(_FIRST_WAIT_S * 2**slot.failed, _LONGEST_WAIT_S)
        slot.where, slot.due = None, time.monotonic() + wait_s
        slot.failed += 1
        _say(f"{slot.name} does not serve: {why} It is tried again in {wait_s:.1f} s")


def _seen(name: str, reference: Any) -> Seen:
    """Return the artifact as a replica sees it.

    Raises:
        RayrecError: the replica sees none; names the host.
    """
    import ray

    try:
        seen: Seen = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise _raised(name, error) from None
    except ray.exceptions.RayActorError as error:
        raise ServingError(f"{name} cannot start: {death_line(error)}.") from None
    return seen


def _raised(name: str, error: Any) -> RayrecError:
    """Return the error of a replica's call, in its own class where it is a user's mistake."""
    raised = error.cause if error.cause is not None else error
    text = one_line(raised)
    mistake = as_user_mistake(raised, f"{name} {text}")
    return mistake or ServingError(f"{name} failed: {type(raised).__name__}: {text}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
