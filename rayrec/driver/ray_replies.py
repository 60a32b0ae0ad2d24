"""Answers, silence and deaths of the rank actors, as values or as one line for the user."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rayrec.errors import TrainingFailed, as_user_mistake
from rayrec.train.seat import RankAddress

WAIT_TURN_S = 0.25
LONGEST_TURN_S = 2.0


def get_replies(
    references: Mapping[int, Any],
    addresses: Sequence[RankAddress],
    world_size: int,
    what: str,
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Wait for one answer of each rank in `references`; the values in the same order.

    Args:
        references: object reference of the pending call, by rank.
        addresses: addresses of the ranks, as far as known; they name the host in an error.
        what: verb phrase of the call that completes "rank 1 could not ...", such as "start".
        check: called several times a second, so that a signal is obeyed while the ranks are silent.
    Raises:
        TrainingFailed: names the first rank that died, raised, or did not answer in `timeout_s`
            seconds.
        RayrecError: a rank found a user's mistake; it keeps its class.
        whatever `check` raises.
    """
    import ray

    waiting, deadline = list(references.values()), time.monotonic() + timeout_s
    while waiting and time.monotonic() < deadline:
        check()
        turn_s = min(WAIT_TURN_S, timeout_s)
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=turn_s)
    values = []
    for rank, reference in references.items():
        details, kind = "", "error"
        try:
            if reference not in waiting:
                values.append(ray.get(reference))
                continue
            cause, kind = f"no answer in {timeout_s:.0f} s", "silent"
        except ray.exceptions.RayTaskError as error:
            raised = error.cause if error.cause is not None else error
            words = str(raised).strip()
            # A mistake of the user comes before everything else: it says what to change.
            mistake = as_user_mistake(raised, words)
            if mistake is not None:
                raise mistake from error
            cause = f"{type(raised).__name__}: {(words.splitlines() or [''])[0]}"
            details = str(error)
        except ray.exceptions.RayActorError as error:
            cause, details, kind = death_line(error), str(error), "died"
        where = addresses[rank].host if rank < len(addresses) else ""
        who = f"rank {rank} of {world_size} on {where or 'an unknown host'}"
        failed = TrainingFailed(f"{who} could not {what}: {cause}", rank, where, cause, details)
        failed.kind = kind
        raise failed
    return values


class Heartbeat:
    """Looks whether ranks are alive while the driver waits for something else of them.

    A call may take long for good reasons; a process that is stopped answers no call at all. One
    that imports torch may answer none for long either, so silence counts from the first answer on
    that says that it is done with it.

    Args:
        actors: the actor of each rank, in order; each has answered a call before.
        addresses: the address of each rank, in order.
        limit_s: seconds of silence that count as a failure.
        awake: actors that have finished their imports; `check` adds and removes actors.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        addresses: Sequence[RankAddress],
        limit_s: float,
        awake: set[Any],
    ) -> None:
        self._actors, self._addresses, self._limit_s = actors, addresses, limit_s
        self._awake = awake
        self._silent_s = [0.0] * len(actors)
        self._asked: dict[int, Any] = {}
        self._looked_at = time.monotonic()

    def check(self) -> None:
        """Ask every rank that owes no answer; returns at once.

        Raises:
            TrainingFailed: a rank has been silent for too long.
        """
        import ray

        now = time.monotonic()
        # a driver that was stopped itself must not take its own sleep for the silence of its ranks
        turn_s, self._looked_at = min(now - self._looked_at, LONGEST_TURN_S), now
        for rank, actor in enumerate(self._actors):
            if rank not in self._asked:
                self._asked[rank] = actor.poll.remote(sys.maxsize, 0.0)
            elif ray.wait([self._asked[rank]], timeout=0)[0]:
                self._silent_s[rank] = 0.0
                # a death is told of by the awaited call
                with suppress(ray.exceptions.RayError):
                    starts = ray.get(self._asked[rank]).starts
                    (self._awake.discard if starts else self._awake.add)(actor)
                del self._asked[rank]
            elif actor in self._awake:
                self._silent_s[rank] += turn_s
                if self._silent_s[rank] >= self._limit_s:
                    host = self._addresses[rank].host
                    raise _silent(rank, len(self._actors), host, self._silent_s[rank])


def stacks_of(actors: Sequence[Any], addresses: Sequence[RankAddress], timeout_s: float) -> str:
    """Return the stack traces of all ranks as text; a rank that gives none in time is named."""
    import ray

    asked = [actor.stacks.remote() for actor in actors]
    # A rank that hangs in native code gives no stack; the others still show where it is waited for.
    ready, _ = ray.wait(asked, num_returns=len(asked), timeout=timeout_s)
    lines = []
    for rank, reference in enumerate(asked):
        address = addresses[rank]
        lines.append(f"-- rank {rank} on {address.host}, process {address.pid}")
        if reference not in ready:
            lines.append(f"no answer in {timeout_s:.0f} s")
            continue
        try:
            lines.append(ray.get(reference))
        except ray.exceptions.RayError as error:
            lines.append(f"{type(error).__name__}: {death_line(error)}")
    return "\n".join(lines)


def _silent(rank: int, world_size: int, host: str, silent_s: float) -> TrainingFailed:
    cause = f"no answer for {silent_s:.0f} s (stopped or overloaded)"
    who = f"rank {rank} of {world_size} on {host or 'an unknown host'}"
    failed = TrainingFailed(f"{who} failed: {cause}", rank, host, cause)
    failed.kind = "silent"
    return failed


def death_line(error: BaseException) -> str:
    """Return the cause of an actor's death in one line, taken from Ray's long message."""
    text = str(error)
    low = text.lower()
    if "node has died" in low or "node was terminated" in low or "node failure" in low:
        return "its node died or lost its connection"
    if "ActorUnavailable" in type(error).__name__:
        # without restarts Ray says so when it cannot reach the actor's raylet, or the head that
        # would know more; it never comes back
        return (
            "it cannot be reached: its process or its node's raylet was killed, or the node lost "
            "its connection"
        )
    if "OutOfMemory" in type(error).__name__ or "memory monitor" in low or "low memory" in low:
        return "its process was killed because the node ran out of memory"
    silent = ("worker unexpectedly exits", "exit_detail", "worker process has died")
    if any(words in low for words in silent):
        return (
            "its process died without a word (killed by SIGKILL or the kernel's OOM killer, or "
            "crashed in native code)"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"its process died: {lines[-1] if lines else type(error).__name__}"
