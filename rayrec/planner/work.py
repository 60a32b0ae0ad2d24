"""How much of each thing a table asks of a rank: ids, rows and bytes, for any layout.

The two halves of every price and every buffer: `TableWork` says what a step does with a table, `shard_traffic` how much of it meets
the rectangles that one rank owns. Ids are taken as uniform over rows. An id crosses the wire once per destination rank, whatever
number of column blocks waits there. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayrec.layout.geometry import Shard
from rayrec.layout.tables import BaseEmbeddingConfig, PoolingType
from rayrec.planner.constraints import ParameterConstraints

ID_BYTES = 8
WEIGHT_BYTES = 4
LENGTH_BYTES = 4
ROW_ELEMENT_BYTES = 4  # pooled rows and their gradients travel as float32


@dataclass(frozen=True, slots=True)
class TableWork:
    """One table and what a training step does with it.

    Attributes:
        rows, dim, element_bytes: the table. features: that look it up.
        batch_size: B, bags per feature and rank. world_size: W.
        pooling_factor: mean ids per bag. weighted: a weight travels with each id.
        pooled: a bag gives one row; else every id gives one.
    """

    rows: int
    dim: int
    element_bytes: int
    features: int
    batch_size: int
    world_size: int
    pooling_factor: float
    weighted: bool
    pooled: bool

    @property
    def bags(self) -> int:
        """Bags that one rank brings to a step."""
        return self.batch_size * self.features

    @property
    def ids(self) -> float:
        """Ids that one rank brings to a step."""
        return self.bags * self.pooling_factor


def table_work(table: BaseEmbeddingConfig, constraints: ParameterConstraints, batch_size: int, world_size: int) -> TableWork:
    """The work of one table for `batch_size` rows per rank."""
    pooled = getattr(table, "pooling", PoolingType.SUM) is not PoolingType.NONE
    return TableWork(
        rows=table.num_embeddings,
        dim=table.embedding_dim,
        element_bytes=table.data_type.num_bytes,
        features=max(table.num_features(), 1),
        batch_size=batch_size,
        world_size=world_size,
        pooling_factor=constraints.pooling_factor,
        weighted=constraints.weighted,
        pooled=pooled,
    )


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes between ONE source rank and the owner of some shards of a table.

    Attributes:
        id_bytes: lengths, ids and weights to the owner.
        row_bytes: rows from the owner; their gradients take as many, the other way.
    """

    id_bytes: float
    row_bytes: float


def returned_rows(work: TableWork, shard: Shard) -> float:
    """Rows that a shard returns to one source rank: one per bag when pooled, else one per id that meets it."""
    return work.bags if work.pooled else work.ids * len(shard.rows) / work.rows


def shard_traffic(work: TableWork, shards: Sequence[Shard]) -> Traffic:
    """Traffic of the shards of one table that one rank owns."""
    blocks = {(shard.rows.start, shard.rows.stop) for shard in shards}
    fraction = sum(stop - start for start, stop in blocks) / work.rows
    per_id = ID_BYTES + WEIGHT_BYTES * work.weighted
    return Traffic(
        id_bytes=work.ids * fraction * per_id + work.bags * len(blocks) * LENGTH_BYTES,
        row_bytes=sum(returned_rows(work, shard) * len(shard.cols) for shard in shards) * ROW_ELEMENT_BYTES,
    )
