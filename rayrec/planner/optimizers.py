"""What the planner knows of a sparse optimizer: its state per row, by the names of `rayrec.optim`,
which needs torch and stays out.

A state is one float32 value per row of a shard, or one per element. A test holds this table against
the optimizers themselves. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayrec.errors import ConfigError

STATE_BYTES = 4  # optimizer state is float32


@dataclass(frozen=True, slots=True)
class SparseState:
    """State tensors of one optimizer.

    Attributes:
        per_row: tensors with one value per row. per_element: tensors with one value per element.
    """

    per_row: int
    per_element: int

    def row_bytes(self, width: int) -> int:
        """State of one row of `width` columns."""
        return (self.per_row + self.per_element * width) * STATE_BYTES


SPARSE_STATES = {
    "sgd": SparseState(0, 0),
    "rowwise_adagrad": SparseState(1, 0),
    "adagrad": SparseState(0, 1),
    "lars_sgd": SparseState(0, 1),
    "partial_rowwise_adam": SparseState(1, 1),
    "adam": SparseState(0, 2),
    "lamb": SparseState(0, 2),
}


def sparse_state(name: str) -> SparseState:
    """State of the optimizer `name`.

    Raises:
        ConfigError: the planner does not know it; lists those it knows.
    """
    if name not in SPARSE_STATES:
        raise ConfigError(
            f"sparse_optimizer={name!r} is unknown; the planner knows {', '.join(SPARSE_STATES)}."
        )
    return SPARSE_STATES[name]
