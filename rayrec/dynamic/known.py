"""What servers are told of the rows of a dynamic table.

A row that belongs to no id, or to one whose time is over, is told as a row of zeros without an id.

    # R rows of a shard, U of them that have changed
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rayrec.dynamic.blocks import NO_KEY
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.shards.copies import TouchedState, copy_touched
from rayrec.shards.state import IDS, SEEN, ShardState


def known_keys(table: BaseEmbeddingConfig, key: Tensor, seen: Tensor, step: int) -> Tensor:
    """Return (N,) keys of some rows, `NO_KEY` of those that are unknown after a step.

    Args:
        key, seen: (N,) columns of the rows.
    """
    assert table.dynamic is not None, "the table is dynamic"
    ttl = table.dynamic.ttl_steps
    if ttl is None:
        return key
    return torch.where(seen.long() + ttl >= step, key, NO_KEY)


def copy_known(
    table: BaseEmbeddingConfig, state: ShardState, rows: Tensor, steps: range
) -> TouchedState:
    """Copy what has changed of a shard for servers, between two steps.

    Args:
        rows: (U,) int64 row numbers of the table that training has touched, ascending.
        steps: training steps of the table at the time of the copy before, and now.
    Returns:
        these rows, and those whose ids have outlived their time meanwhile.
    """
    first, key, seen = state.shard.rows.start, state.ids[IDS], state.ids[SEEN]
    before, now = (known_keys(table, key, seen, step) for step in (steps.start, steps.stop))
    is_changed = before != now
    is_changed[rows - first] = True
    (changed,) = is_changed.nonzero(as_tuple=True)
    copied = copy_touched(ShardState(state.shard, state.weight), changed + first)
    keys = now[changed]
    copied.weight[keys == NO_KEY] = 0.0
    return replace(copied, ids={IDS: keys})
