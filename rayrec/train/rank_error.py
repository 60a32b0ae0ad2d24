"""Error that ended a rank's thread, and the test if a peer is to blame for it.

When one rank dies, all others fail in a collective a moment later. Such an error is a symptom, and
must not be reported as the cause: `RankError.collateral` tells them apart. Standard library only.
"""

from __future__ import annotations

import re
import time
import traceback as traceback_module
from collections.abc import Iterator
from dataclasses import dataclass

from rayrec.errors import CallbackError, JoinError, RayrecError, as_user_mistake

# Words of gloo, NCCL and the store for trouble at the other end of the connection.
_PEER_TROUBLE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|closed by peer|"
    r"socket (closed|is not connected)|timed? ?out waiting|timed out after|recv failed|"
    r"send failed|nccl (communicator was aborted|timeout)|gloo.*(error|timeout)|gloo/transport|"
    r"watchdog|software caused connection abort|transport endpoint",
    re.IGNORECASE,
)
_WIRE_TYPES = (
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "DistError",
    "CommError",
    "ConnectionResetError",
    "BrokenPipeError",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankError:
    """Error that ended a rank's thread.

    Attributes:
        cause: type and message on one line.
        traceback: traceback as text.
        at: time of the error, in seconds of the wall clock.
        step: global steps that were finished.
        collateral: a peer is to blame.
        mistake: a user's mistake as the error to raise again, or None where it is none.
        final: the user's code or input is to blame, so that trying again would fail again.
        unmet: the rank did not meet the others, so that no task began.
    """

    cause: str
    traceback: str
    at: float
    step: int
    collateral: bool
    mistake: RayrecError | None = None
    final: bool = False
    unmet: bool = False

    @classmethod
    def of(cls, error: BaseException, step: int) -> RankError:
        """Describe `error`, which a rank's thread met after `step` finished steps."""
        words = str(error).strip()
        mistake = as_user_mistake(error, words)
        return cls(
            cause=type(error).__name__ + (f": {words.splitlines()[0]}" if words else ""),
            traceback="".join(traceback_module.format_exception(error)),
            at=time.time(),
            step=step,
            collateral=mistake is None and is_collateral(error),
            mistake=mistake,
            final=mistake is not None or isinstance(error, CallbackError),
            unmet=isinstance(error, JoinError),
        )


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and the errors that it was raised from or during, each once."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        # A chain of causes may close in a circle, which `seen` ends.
        link = link.__cause__ or link.__context__


def is_collateral(error: BaseException) -> bool:
    """Return True if an error or a cause of it blames a lost or silent peer."""
    for link in causes(error):
        if any(kind.__name__ in _WIRE_TYPES for kind in type(link).__mro__):
            return True
        # Words alone prove nothing: a user's ValueError may speak of a time-out, too.
        may_blame = isinstance(link, RuntimeError | TimeoutError | OSError)
        if may_blame and _PEER_TROUBLE.search(str(link)):
            return True
    return False
