"""Answers, silence and deaths of the rank actors, as values or as one line for the user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayrec.errors import as_user_mistake
from rayrec.train.seat import RankAddress

LONGEST_TURN_S = 2.0


def told(error: Any) -> dict[str, Any]:
    """Return what a call that raised tells: cause in one line, traceback, and a user's mistake."""
    raised = error.cause if error.cause is not None else error
    words = str(raised).strip()
    cause = f"{type(raised).__name__}: {(words.splitlines() or [''])[0]}"
    mistake = as_user_mistake(raised, words)
    return {"cause": cause, "traceback": str(error), "mistake": mistake}


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
