"""The errors a user of rayrec can meet, one class per kind of mistake.

Every message says what happened with numbers, where, and what to try. The classes carry no state beyond their message unless an
error crosses Ray, in which case `__reduce__` keeps rank, host and first cause. Standard library only.
"""

from __future__ import annotations


class RayrecError(Exception):
    """Base of every error that rayrec raises on purpose."""


class VersionError(RayrecError, ImportError):
    """torch and fbgemm-gpu do not fit each other; the message names the install command that mends it."""


class ConfigError(RayrecError, ValueError):
    """A table, schema, model or run option contradicts itself or asks for what is not supported."""


class PlanError(RayrecError, ValueError):
    """A sharding plan does not tile a table, does not fit the memory, or was made for other ranks."""


class InputError(RayrecError, ValueError):
    """A batch, tensor, column or file holds what the model cannot take; names key, row, value, file."""


class ShapeError(InputError):
    """Tensors that must agree in shape do not, for example because plans differ between ranks."""


class CheckpointError(RayrecError):
    """A checkpoint is missing, incomplete, corrupt or of another model."""


class CommError(RayrecError):
    """A collective failed or timed out, mostly because another rank is gone."""


class TrainingFailed(RayrecError):
    """A training run ended by the failure of one rank.

    Attributes:
        rank: the first rank that failed, or None when the run failed before any rank existed.
        host: address of the node of that rank, or "".
        cause: one line, type and message of the first error.
        traceback: the remote traceback as text, or "".
    """

    def __init__(self, message: str, rank: int | None = None, host: str = "", cause: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.message, self.rank, self.host, self.cause, self.traceback = message, rank, host, cause, traceback

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.message, self.rank, self.host, self.cause, self.traceback)
