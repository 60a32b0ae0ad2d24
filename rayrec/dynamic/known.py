"""What servers are told of the rows of a dynamic table.

A row that belongs to no id, or to one whose time is over, is told as a row of zeros without an id.

    # R rows of a shard, U of them that have changed
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rayrec.dynamic.clock import Instant
from rayrec.dynamic.columns import NO_KEY
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.shards.copies import TouchedState, copy_touched
from rayrec.shards.state import IDS, SEEN, TIME, ShardState


def known_keys(
    table: BaseEmbeddingConfig, key: Tensor, seen: Tensor, time: Tensor | None, now: Instant
) -> Tensor:
    """Return (N,) keys of some rows, `NO_KEY` of those that are unknown by now.

    Args:
        key, seen, time: (N,) columns of the rows.
    """
    assert table.dynamic is not None, "the table is dynamic"
    if not table.dynamic.has_ttl:
        return key
    return torch.where(now.is_fresh(table.dynamic, seen, time), key, NO_KEY)


def copy_known(
    table: BaseEmbeddingConfig, state: ShardState, rows: Tensor, since: Instant, now: Instant
) -> TouchedState:
    """Copy what has changed of a shard for servers, between two steps.

    Args:
        rows: (U,) int64 row numbers of the table that training has touched, ascending.
        since: instant of the copy before.
    Returns:
        these rows, and those whose ids have outlived their time meanwhile.
    """
    first, columns = state.shard.rows.start, (state.ids[IDS], state.ids[SEEN], state.ids.get(TIME))
    known = known_keys(table, *columns, now)
    is_changed = known_keys(table, *columns, since) != known
    is_changed[rows.cpu() - first] = True
    (changed,) = is_changed.nonzero(as_tuple=True)
    copied = copy_touched(ShardState(state.shard, state.weight), changed + first)
    keys = known[changed]
    copied.weight[keys == NO_KEY] = 0.0
    return replace(copied, ids={IDS: keys})
