"""Where the ids of a dynamic table lie in one of another size, or those of a foreign table in one
that is dynamic, and how its rows are filled.

A checkpoint restores into such a table, and a table that grows while it trains becomes one.

Which of them have a row follows from what is known of them and the settings of the table alone.

    # P places of the saved table
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rayrec.data.hashing import mix
from rayrec.dynamic.clock import Instant
from rayrec.dynamic.columns import NO_KEY, IdColumns, Ints, lanes_of
from rayrec.dynamic.id_map import ABSENT
from rayrec.dynamic.key_blocks import blocks_of
from rayrec.dynamic.kinds import KINDS, kinds_of
from rayrec.dynamic.known import known_keys
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.shards.overlap import OverlapWriter
from rayrec.shards.state import WEIGHT, ShardState


class Moved(NamedTuple):
    """The keys of a kind of a saved table in one of another size.

    Attributes:
        places: (P,) int64 place in the other table, `ABSENT` of those that have none there.
        left_out: known keys that have none.
    """

    places: Ints
    left_out: int


def places_in(table: BaseEmbeddingConfig, saved: IdColumns, name: str, now: Instant) -> Moved:
    """Give places in a table to the keys of a kind that are known in a saved one by now.

    Where a block has too few, those with the highest score get one; the order of the saved places
    is kept.

    Args:
        table: the dynamic table with its new settings.
        saved: (P,) columns.
        name: one of `KINDS`, which the table has.
    """
    kind = next(kind for kind in kinds_of(table) if kind.name == name)
    key = saved.key.numpy()
    known = known_keys(table, saved.key, saved.seen, saved.time, now)
    (old,) = np.nonzero(known.numpy() != NO_KEY)
    size = table.row_multiple
    block = blocks_of(key[old], table.num_embeddings // size)
    score = (one[old] for one in saved.score(kind.eviction))
    order = np.lexsort((mix(key[old].view(np.uint64)), *score, block))
    # the last of a block are the best
    _, counts = np.unique(block[order], return_counts=True)
    better = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(len(order))
    kept = np.sort(order[better < kind.most])
    in_order = kept[np.argsort(block[kept], kind="stable")]
    _, firsts, counts = np.unique(block[in_order], return_index=True, return_counts=True)
    within = np.arange(len(in_order)) - np.repeat(firsts, counts)
    places = np.full(len(key), ABSENT, np.int64)
    places[old[in_order]] = block[in_order] * size * kind.lanes + within
    return Moved(places, len(old) - len(kept))


def begin_anew(
    states: Sequence[ShardState], places: Mapping[str, Tensor], known: Mapping[str, IdColumns]
) -> None:
    """Clear shards of one table, and write what is known of the keys that have places in them.

    Args:
        places: by kind, (P,) places in the table.
        known: by kind, (P,) columns; a column that is not given stays clear.
    """
    for state in states:
        for tensor in state.tensors().values():
            tensor.zero_()
        for kind in KINDS:
            for lane in lanes_of(kind, state.ids):
                state.ids[f"{lane}_key"].fill_(NO_KEY)
        for kind, of_kind in known.items():
            _put_known(state, kind, places[kind], of_kind)


def _put_known(state: ShardState, kind: str, places: Tensor, known: IdColumns) -> None:
    """Write what is known of the keys of a kind that have places in a shard."""
    lanes = lanes_of(kind, state.ids)
    for number, lane in enumerate(lanes):
        rows = torch.where(places % len(lanes) == number, places // len(lanes), ABSENT)
        own_rows, chosen = _inside(rows, state)
        for name, column in known.named().items():
            if f"{lane}_{name}" in state.ids:
                state.ids[f"{lane}_{name}"][own_rows] = column[chosen]


def put_values(
    places: Tensor,
    cols: range,
    data: Mapping[str, Tensor],
    states: Sequence[ShardState],
    writer: OverlapWriter,
) -> None:
    """Write the rows of ids into shards; `writer` finishes them.

    Args:
        places: (P,) places of the ids in the table.
        cols: columns of the table that `data` has.
        data: column name -> (P, cols), or (P,) for row-wise state; states that are missing stay.
        states: shards that have some of these columns.
    """
    for state in states:
        own_rows, chosen = _inside(places, state)
        values = {WEIGHT: state.weight, **state.optimizer}
        values = {name: tensor for name, tensor in values.items() if name in data}
        part = {name: data[name][chosen] for name in values}
        writer.put_rows(own_rows, cols, part, state, values)


def _inside(places: Tensor, state: ShardState) -> tuple[Tensor, Tensor]:
    """Return the rows of a shard that some places are, and which of the places these are."""
    rows = state.shard.rows
    (chosen,) = ((places >= rows.start) & (places < rows.stop)).nonzero(as_tuple=True)
    return places[chosen] - rows.start, chosen


@torch.no_grad()
def move_rows(table: BaseEmbeddingConfig, old: ShardState, new: ShardState, now: Instant) -> None:
    """Move what is known of a shard by now to the empty shard of the same blocks.

    Args:
        table: the table of the new shard.
    """
    for kind in KINDS:
        known = IdColumns.of_lanes(kind, old.ids)
        if known is None:
            continue
        places = torch.from_numpy(places_in(table, known, kind, now).places)
        _put_known(new, kind, places, known)
        if kind == "id":
            # rows belong to ids; candidates have places of their own
            at, have = _inside(places, new)
            target = new.tensors()
            for name in (WEIGHT, *old.optimizer):
                target[name][at] = old.tensors()[name][have]
