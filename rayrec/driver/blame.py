"""The failure of a rank to report: who failed first, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rayrec.errors import RayrecError, TrainingFailed

# parts that differ between two errors of one kind: keys and files, addresses, ports, ranks
_VARYING = re.compile(
    r"/\S*\d\S*|\[[\da-f.:%]+\](:\d+)?|\d+(\.\d+){3}(:\d+)?|\bport \d+|:\d{2,}|0x[\da-f]+|"
    r"\brank \d+",
    re.IGNORECASE,
)


Kind = Literal["died", "silent", "stopped", "error"]


def silence(seconds: float) -> str:
    """Return the cause of a failure for a process that gives no answer, in one line."""
    return f"no answer for {seconds:.0f} s (stopped or overloaded)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Blame:
    """The failure to report: who failed first, and why.

    Attributes:
        rank, host: who failed; the host is "" where it is not known.
        cause: the error in one line. traceback: its text, or "".
        step: global steps that the rank had done.
        also: error of another rank that may be the root cause, or "".
        mistake: the error itself where it is a user's mistake.
        kind: the process died, gives no answer, is stopped, or told of an error.
        final: trying again would fail again.
        symptom: the error blames another rank, and no rank told of a cause.
        unmet: the ranks did not meet, and no rank told of a cause.
        needless: the rank that gave no answer was alive.
        preempted: the process died on a node that was announced to go.
        what: verb phrase of what the rank could not do before it worked, such as "start", or "".
    """

    rank: int
    host: str
    cause: str
    traceback: str = ""
    step: int = 0
    also: str = ""
    mistake: RayrecError | None = None
    kind: Kind = "error"
    final: bool = False
    symptom: bool = False
    unmet: bool = False
    needless: bool = False
    preempted: bool = False
    what: str = ""

    @property
    def is_mute(self) -> bool:
        """True if the process gives no answer, and may live."""
        return self.kind in ("silent", "stopped")

    @property
    def words(self) -> str:
        """Cause without paths, addresses and ranks, so that a repeated error compares equal."""
        return _VARYING.sub("#", self.cause)

    def error(self, world_size: int) -> RayrecError:
        """Return the error to raise: a user's mistake in its own class, else a `TrainingFailed`."""
        where = f"rank {self.rank} of {world_size} on {self.host or 'an unknown host'}"
        if self.mistake is not None:
            when = f" after step {self.step}" if self.step else ""
            return type(self.mistake)(f"{self.mistake} (found by {where}{when})")
        also = f"; {self.also}" if self.also else ""
        if self.what and not self.step:
            message = f"{where} could not {self.what}: {self.cause}{also}"
        else:
            message = f"{where} failed after step {self.step}: {self.cause}{also}"
        return TrainingFailed(message, self.rank, self.host, self.cause, self.traceback)


class RankTrouble(Exception):
    """A rank failed while the driver waited for it.

    Attributes:
        blame: who failed, and why.
    """

    def __init__(self, blame: Blame) -> None:
        super().__init__(blame.cause)
        self.blame = blame
