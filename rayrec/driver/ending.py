"""The error that ends a run whose ranks failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rayrec.driver.blame import Blame
from rayrec.driver.run_log import RunLog
from rayrec.errors import RayrecError, TrainingFailed


class RemoteTraceback(Exception):
    """The traceback of a rank, as text, chained below the error that the driver raises."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0].rstrip()}\n" if self.args else ""


def write_traceback(blame: Blame, log: RunLog) -> str:
    """Keep the traceback of a failure in the run's log; where it can be read, or ""."""
    if not blame.traceback:
        return ""
    return log.write(f"rank {blame.rank} on {blame.host}:\n{blame.traceback}")


def ending(
    blame: Blame, world_size: int, past: Sequence[Blame], log: RunLog, more: str = ""
) -> RayrecError:
    """Return the error to raise for a failure that ends a run.

    Args:
        past: failures that the run recovered from before.
        log: receives the traceback.
        more: further cause to add to the message, or "".
    """
    words = [blame.also, more]
    if past:
        first = past[0]
        times = f"{len(past)} failure" + ("s" if len(past) > 1 else "")
        words.append(
            f"the run had recovered from {times}, the first of rank {first.rank}: {first.cause}"
        )
    also = "; ".join(word for word in words if word)
    error = replace(blame, also=also).error(world_size)
    if isinstance(error, TrainingFailed):
        error.log = write_traceback(blame, log)
    if blame.traceback:
        error.__cause__ = RemoteTraceback(blame.traceback)
    return error
