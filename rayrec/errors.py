"""The errors a user of rayrec can meet, one class per kind of mistake.

Every message says what happened with numbers, where, and what to try. A user's mistake keeps its
class wherever it is found, also when a rank finds it and the error crosses Ray; `USER_MISTAKES`
lists those classes. This module needs the standard library only.
"""

from __future__ import annotations

from typing import Any


class RayrecError(Exception):
    """Base of every error that rayrec raises on purpose."""


class VersionError(RayrecError, ImportError):
    """torch and fbgemm-gpu do not fit each other; the message names the command that mends it."""


class ConfigError(RayrecError, ValueError):
    """A table, schema, model or run option contradicts itself or asks for what is not supported."""


class PlanError(RayrecError, ValueError):
    """A sharding plan does not tile a table, does not fit memory, or is for other ranks."""


class InputError(RayrecError, ValueError):
    """A batch, tensor, column or file holds what the model cannot take; says where."""


class ShapeError(InputError):
    """Tensors that must agree in shape do not, for example because plans differ between ranks."""


class CheckpointError(RayrecError):
    """A checkpoint is missing, incomplete, corrupt or of another model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's bytes are not those that were written; an earlier one may be whole."""


class SaveError(CheckpointError):
    """The storage is full, gone or read-only; what was whole before the write is whole still."""


class ArtifactError(RayrecError):
    """An artifact is missing, damaged or of another version, or too far from its model."""


class ServingError(RayrecError):
    """A server gave no score: for now, or by a defect of its own."""


class OverloadedError(ServingError):
    """So much waits already that the server takes no more; ask again a little later."""


class DeadlineError(ServingError):
    """The time that the caller gave passed before the scores were there."""


class UnavailableError(ServingError):
    """No server answers at the address, or it is about to end."""


class CommError(RayrecError):
    """A collective failed or timed out, mostly because another rank is gone."""


class JoinError(CommError):
    """The ranks of a world did not meet: one did not come, or their meeting place is gone."""


class ClusterError(RayrecError):
    """The machine or its Ray cluster is in trouble, for now: trying again may succeed."""


class TrainingFailed(RayrecError):
    """A training run ended by the failure of one rank.

    Attributes:
        rank: the first rank that failed, or None when the run failed before any rank existed.
        host: address of the node of that rank, or "".
        cause: one line, type and message of the first error.
        traceback: the remote traceback as text, or "".
        log: the file that holds the traceback, or "".
    """

    def __init__(
        self,
        message: str,
        rank: int | None = None,
        host: str = "",
        cause: str = "",
        traceback: str = "",
        log: str = "",
    ) -> None:
        super().__init__(message)
        self.message, self.rank, self.host, self.cause = message, rank, host, cause
        self.traceback, self.log = traceback, log

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        where = self.rank, self.host, self.cause, self.traceback, self.log
        return type(self), (self.message, *where)


class CallbackError(RayrecError):
    """A callback of the user's raised; the run saved what it keeps and ended.

    The message names the callback, the process, the step and the error.
    """


class RunInterrupted(SystemExit):
    """A signal ended a run early, after a last checkpoint where the run keeps any.

    It is a `SystemExit`, so a script that does not catch it ends with `code` and without a
    traceback.

    Attributes:
        code: 128 plus the number of the signal: 130 after Ctrl-C (SIGINT), 143 after SIGTERM.
        result: the `rayrec.Result` that the run had reached; None when no step was done.
    """

    def __init__(self, signal_number: int, result: Any = None) -> None:
        super().__init__(128 + signal_number)
        self.signal_number, self.result = signal_number, result


USER_MISTAKES = (ConfigError, PlanError, InputError, CheckpointError, ArtifactError, VersionError)


def is_user_mistake(error: BaseException) -> bool:
    """Return whether the user can mend what `error` says: trying again would fail again."""
    return isinstance(error, USER_MISTAKES) and not isinstance(error, SaveError)


def as_user_mistake(error: BaseException, message: str) -> RayrecError | None:
    """Return an error of the same class with another message; None for no user's mistake.

    An error of a subclass from elsewhere becomes the nearest class of this module, so that it can
    be unpickled in any process.
    """
    if not is_user_mistake(error):
        return None
    kind = next(kind for kind in type(error).__mro__ if kind.__module__ == __name__)
    return kind(message)
