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
from rayrec.dynamic.blocks import blocks_of
from rayrec.dynamic.clock import Instant
from rayrec.dynamic.columns import NO_KEY, IdColumns, Ints
from rayrec.dynamic.id_map import ABSENT
from rayrec.dynamic.known import known_keys
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.shards.overlap import OverlapWriter
from rayrec.shards.state import WEIGHT, ShardState

KINDS = "id", "candidate"  # rows belong to ids; candidates have places of their own


class Moved(NamedTuple):
    """The ids of a saved table in one of another size.

    Attributes:
        places: (P,) int64 place in the other table, `ABSENT` of those that have none there.
        left_out: known ids that have none.
    """

    places: Ints
    left_out: int


def places_in(table: BaseEmbeddingConfig, saved: IdColumns, eviction: str, now: Instant) -> Moved:
    """Give places in a table to what is known in a saved one by now.

    Where a block has too few, those with the highest score get one; the order of the saved places
    is kept.

    Args:
        table: the dynamic table with its new settings.
        saved: (P,) columns.
        eviction: by what ids are compared; see `DynamicConfig`.
    """
    key = saved.key.numpy()
    known = known_keys(table, saved.key, saved.seen, saved.time, now)
    (old,) = np.nonzero(known.numpy() != NO_KEY)
    size = table.row_multiple
    block = blocks_of(key[old], table.num_embeddings // size)
    score = (one[old] for one in saved.score(eviction))
    order = np.lexsort((mix(key[old].view(np.uint64)), *score, block))
    # the last of a block are the best
    _, counts = np.unique(block[order], return_counts=True)
    better = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(len(order))
    kept = np.sort(order[better < size])
    in_order = kept[np.argsort(block[kept], kind="stable")]
    _, firsts, counts = np.unique(block[in_order], return_index=True, return_counts=True)
    within = np.arange(len(in_order)) - np.repeat(firsts, counts)
    places = np.full(len(key), ABSENT, np.int64)
    places[old[in_order]] = block[in_order] * size + within
    return Moved(places, len(old) - len(kept))


def begin_anew(
    states: Sequence[ShardState], places: Mapping[str, Tensor], columns: Mapping[str, Tensor]
) -> None:
    """Clear shards of one table, and write what is known of the ids that have places in them.

    Args:
        places: by kind, (P,) places in the table.
        columns: column name -> (P,); a column that is not given stays clear.
    """
    for state in states:
        for tensor in state.tensors().values():
            tensor.zero_()
        for kind in KINDS:
            if f"{kind}_key" in state.ids:
                state.ids[f"{kind}_key"].fill_(NO_KEY)
        for name, column in state.ids.items():
            if name in columns:
                own_rows, chosen = _inside(places[name.split("_")[0]], state)
                column[own_rows] = columns[name][chosen]


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
    assert table.dynamic is not None, "the table is dynamic"
    for kind in KINDS:
        columns = {one: old.ids.get(f"{kind}_{one}") for one in IdColumns._fields}
        if columns["key"] is None:
            continue
        # candidates always make room by when they were seen
        eviction = table.dynamic.eviction if kind == "id" else "step"
        own = IdColumns(**columns)  # type: ignore[arg-type]
        places = torch.from_numpy(places_in(table, own, eviction, now).places)
        (have,) = (places != ABSENT).nonzero(as_tuple=True)
        at = places[have] - new.shard.rows.start
        source, target = old.tensors(), new.tensors()
        for name, tensor in source.items():
            # rows belong to ids; candidates have places of their own
            if name.startswith("candidate_") == (kind == "candidate"):
                target[name][at] = tensor[have]
