"""Where the ids of a dynamic table lie in one of another size, or of other blocks.

A checkpoint restores into such a table, and a table that grows while it trains becomes one.

Which of them have a row follows from the saved columns and the settings of the table alone.

    # P places of the saved table
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from rayrec.data.hashing import mix
from rayrec.dynamic.blocks import blocks_of
from rayrec.dynamic.clock import Instant
from rayrec.dynamic.columns import NO_KEY, IdColumns, Ints
from rayrec.dynamic.id_map import ABSENT
from rayrec.dynamic.known import known_keys
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.shards.state import ShardState


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


@torch.no_grad()
def move_rows(table: BaseEmbeddingConfig, old: ShardState, new: ShardState, now: Instant) -> None:
    """Move what is known of a shard by now to the empty shard of the same blocks.

    Args:
        table: the table of the new shard.
    """
    assert table.dynamic is not None, "the table is dynamic"
    for kind in ("id", "candidate"):
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
