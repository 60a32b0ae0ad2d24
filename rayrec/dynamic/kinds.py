"""`Kind`: what a dynamic table keeps keys as, ids that have a row or candidates.

Both have places beside the rows. A table may keep more candidates than it has rows, so a row has a
place of theirs in each of several lanes. The places that are beyond the share of a block stay free.
"""

from __future__ import annotations

from typing import NamedTuple

from rayrec.layout.tables import BaseEmbeddingConfig

KINDS = "id", "candidate"


class Kind(NamedTuple):
    """What a table keeps keys as.

    Attributes:
        name: one of `KINDS`.
        eviction: which keys make room; see `DynamicConfig`.
        lanes: places of a row.
        most: keys of a block.
    """

    name: str
    eviction: str
    lanes: int
    most: int


def kinds_of(table: BaseEmbeddingConfig) -> tuple[Kind, ...]:
    """Return the kinds of a dynamic table."""
    assert table.dynamic is not None, "the table is dynamic"
    size, most = table.row_multiple, table.dynamic.block_candidates(table.num_embeddings)
    ids = Kind("id", table.dynamic.eviction, 1, size)
    # candidates that were not seen for longest make room, whatever the rows do
    return (ids, Kind("candidate", "step", -(-most // size), most)) if most else (ids,)
