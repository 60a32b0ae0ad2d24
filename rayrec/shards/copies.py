"""Copies of a shard in host memory, which a thread writes while training goes on.

A copy of the touched rows is what an increment holds; a copy of all rows takes as much memory as
the shard itself.
"""

# U touched rows

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rayrec.layout.geometry import Shard
from rayrec.shards.state import WEIGHT, ShardState


@dataclass(frozen=True, slots=True, eq=False)
class TouchedState:
    """Some rows of a shard with their optimizer state, in memory of their own.

    Attributes:
        shard: the rectangle that the rows are of.
        rows: (U,) int64 row numbers of the table, ascending, on the CPU.
        weight: (U, cols) of these rows.
        optimizer: state name -> (U,) row-wise or (U, cols) element-wise.
        ids: of a dynamic table, column name -> (U,) integers that say whose rows they are.
    """

    shard: Shard
    rows: Tensor
    weight: Tensor
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)
    ids: Mapping[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """The weight, the columns of ids and the optimizer state by column name, weight first."""
        return {WEIGHT: self.weight, **self.ids, **self.optimizer}


@torch.no_grad()
def copy_touched(state: ShardState, rows: Tensor) -> TouchedState:
    """Copy some rows of a shard to host memory.

    Args:
        rows: (U,) int64 row numbers of the table, ascending.
    """
    local = rows - state.shard.rows.start
    # what is known of ids lies on the host, also where their rows lie on a GPU
    copied = {
        name: t.index_select(0, local.to(t.device)).to("cpu") for name, t in state.tensors().items()
    }
    weight = copied.pop(WEIGHT)
    ids = {name: copied.pop(name) for name in state.ids}
    return TouchedState(state.shard, rows.to("cpu"), weight, copied, ids)


@torch.no_grad()
def copy_whole(state: ShardState) -> ShardState:
    """Copy a shard to host memory."""
    copied = {name: t.detach().to("cpu", copy=True) for name, t in state.tensors().items()}
    weight = copied.pop(WEIGHT)
    ids = {name: copied.pop(name) for name in state.ids}
    return ShardState(state.shard, weight, copied, ids)
