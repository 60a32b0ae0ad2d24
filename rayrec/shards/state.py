"""The state of shards for checkpoints: rectangles of tables, with optimizer state, as tensors.

A `ShardState` is a view, not a copy: saving reads it in bounded chunks, restoring writes into it.
Row-wise optimizers keep one value per row of a shard, (rows,); element-wise ones one per element,
(rows, cols). The package knows neither modules nor process groups; the one collective it needs is
handed in as a `Gather`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor

from rayrec.errors import ShapeError
from rayrec.layout.geometry import Shard

T = TypeVar("T")
IDS = "id_key"  # the column of a dynamic table that says whose a row is
SEEN = "id_seen"  # that which says in which step its id was last seen
HITS = "id_hits"  # and how often since it has the row
TIME = "id_time"  # and at which time of the data, where the table asks for it
WEIGHT = "weight"  # the name of the weight's column; no optimizer state may have it


def is_time(column: str) -> bool:
    """Return True for columns of times, which a table's earlier checkpoints may lack."""
    return column.endswith("_time")


def is_key(column: str) -> bool:
    """Return True for columns of ids and candidates, which say whose a place is."""
    return column.endswith("_key")


class Gather(Protocol):
    """All ranks' values in rank order, on every rank; of one rank, `lambda value: [value]`."""

    def __call__(self, value: T, /) -> list[T]: ...


@dataclass(frozen=True, slots=True, eq=False)
class ShardState:
    """A shard's live weight and optimizer state.

    Attributes:
        shard: the rectangle, and the rank that owns it.
        weight: (rows, cols), float32, float16 or bfloat16, on any device; may be strided.
        optimizer: state name -> (rows,) row-wise or (rows, cols) element-wise; empty for SGD, or to
            restore the weights alone.
        ids: of a dynamic table, column name -> (rows,) integers that say whose rows they are.
    Raises:
        ShapeError: a tensor does not have the shape of the rectangle.
    """

    shard: Shard
    weight: Tensor
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)
    ids: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows, cols = self.shard.shape
        where = f"{describe(self.shard)} of table {self.shard.table!r} on rank {self.shard.rank}"
        if tuple(self.weight.shape) != (rows, cols):
            raise ShapeError(
                f"the weight of {where} has shape {tuple(self.weight.shape)}, not ({rows}, {cols})."
            )
        for name, state in self.optimizer.items():
            if tuple(state.shape) not in ((rows,), (rows, cols)):
                raise ShapeError(
                    f"optimizer state {name!r} of {where} has shape {tuple(state.shape)}; it must "
                    f"be ({rows},), one value per row, or ({rows}, {cols}), one per element."
                )
            if name == WEIGHT:
                raise ShapeError(
                    f"optimizer state of {where} is called {WEIGHT!r}, the name of the rows "
                    "themselves; rename it."
                )

    def tensors(self) -> dict[str, Tensor]:
        """The weight, the columns of ids and the optimizer state by column name, weight first."""
        return {WEIGHT: self.weight, **self.ids, **self.optimizer}


def describe(shard: Shard) -> str:
    """A rectangle for people and file names, "r0-100-c0-64": rows 0 to 99, columns 0 to 63."""
    return f"r{shard.rows.start}-{shard.rows.stop}-c{shard.cols.start}-{shard.cols.stop}"
