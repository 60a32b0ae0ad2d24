"""How much of each thing a table asks of a rank: ids, rows and bytes, for any layout.

The two halves of every price and every buffer: `TableWork` says what a step does with a table,
`shard_traffic` how much of it meets the rectangles that one rank owns. Ids follow a Zipf law over
rows whose order is hashed or shuffled, so that any block of rows has its share of the frequent
ones. What travels is what `distributed.route` packs: per feature, row block and destination rank a
header of two counts, the ids (8 bytes, once however many column blocks wait there) and, when
pooled, the lengths (4 bytes a bag); and per bag a pooled row. Bags without ids in a row block stay
at home. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rayrec.layout.geometry import Shard
from rayrec.layout.kinds import COMPACT_BELOW, COMPACT_COLUMNS
from rayrec.layout.plan import Storage
from rayrec.layout.tables import BaseEmbeddingConfig, PoolingType
from rayrec.layout.topology import Device
from rayrec.planner.constraints import ParameterConstraints, storages_of
from rayrec.planner.zipf import distinct_rows
from rayrec.spec.wire import FLOAT32, Wire

ID_BYTES = 8
WEIGHT_BYTES = 4
LENGTH_BYTES = 4
HEADER_BYTES = 16  # ids and bags of one piece
ON_DEVICE = Storage()
ROW_ELEMENT_BYTES = 4  # pooled rows and their gradients are float32 at either end


@dataclass(frozen=True, slots=True)
class TableWork:
    """One table and what a training step does with it.

    Attributes:
        rows, dim, element_bytes: the table. features: that look it up.
        batch_size: B, bags per feature and rank. world_size: W.
        pooling_factor: mean ids per bag. weighted: a weight travels with each id.
        pooled: a bag gives one row; else every id gives one.
        skew: exponent of the Zipf law of its ids; 0 means uniform.
        storage: where its rows lie. gpu: the rank is one, so that the host's memory is another than
            its own.
        wire: what rows and gradients travel as; one rank alone codes nothing.
        in_place: every rank reads its rows where they lie, so that none travel; see
            `rayrec.distributed.shared.in_place`.
        distinct_at_home: different rows among the ids of one rank.
        distinct: different rows among the ids of all ranks, as is to be expected; a block of rows
            has its share of them.
        missed: share of them that a cache does not hold; 0 without a cache.
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
    storage: Storage = ON_DEVICE
    gpu: bool = False
    skew: float = 0.0
    wire: Wire = FLOAT32
    in_place: bool = False
    distinct_at_home: float = field(init=False)
    distinct: float = field(init=False)
    missed: float = field(init=False)

    def __post_init__(self) -> None:
        ids, kept = self.world_size * self.ids, self.storage.load_factor if self.gpu else None
        object.__setattr__(self, "distinct", distinct_rows(self.rows, ids, self.skew))
        object.__setattr__(
            self,
            "distinct_at_home",
            distinct_rows(self.rows, self.ids, self.skew) if self.in_place else 0.0,
        )
        held = (
            1.0
            if kept is None
            else distinct_rows(self.rows, ids, self.skew, round(kept * self.rows)) / self.distinct
        )
        object.__setattr__(self, "missed", 1.0 - held)

    @property
    def off_device(self) -> bool:
        """Whether its rows lie in a memory that is not the rank's own."""
        return self.gpu and self.storage.kind != "device"

    @property
    def cached(self) -> bool:
        """Whether the rank holds some of them in a cache."""
        return self.off_device and self.storage.kind == "cached"

    @property
    def bags(self) -> int:
        """Bags that one rank brings to a step."""
        return self.batch_size * self.features

    @property
    def ids(self) -> float:
        """Ids that one rank brings to a step."""
        return self.bags * self.pooling_factor


def table_work(
    table: BaseEmbeddingConfig,
    constraints: ParameterConstraints,
    batch_size: int,
    world_size: int,
    device: Device = "cpu",
    wire: Wire = FLOAT32,
    storage: Storage | None = None,
    share_tables: bool = False,
) -> TableWork:
    """The work of one table for `batch_size` rows per rank, where its constraints let it lie first
    unless `storage` is given.

    Args:
        share_tables: rows are read in place.
    """
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
        storage=storage or storages_of(table, constraints, device)[0],
        gpu=device == "cuda",
        skew=constraints.skew,
        wire=wire if world_size > 1 else FLOAT32,
        in_place=share_tables,
    )


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes between ONE source rank and the owner of some shards of a table.

    Attributes:
        id_bytes: headers, lengths, ids and weights to the owner.
        row_bytes: rows from the owner, in float32; their gradients take as many, the other way.
    """

    id_bytes: float
    row_bytes: float

    def __mul__(self, times: int) -> Traffic:
        return Traffic(self.id_bytes * times, self.row_bytes * times)

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.id_bytes + other.id_bytes, self.row_bytes + other.row_bytes)


NO_TRAFFIC = Traffic(0.0, 0.0)


def returned_rows(work: TableWork, shard: Shard, summed: int = 1) -> float:
    """Rows that a shard returns to one source rank.

    Sequences: one for every id that meets it. Pooled: one per bag; of row blocks one per bag with
    ids there where few bags have any, unless rows are read in place. As many as the fullest of
    several features or tables has: two standard deviations more than the mean.

    Args:
        summed: ranks of a host that sum their rows first, see `routes`; those are of all bags.
    """
    share = len(shard.rows) / work.rows
    if not work.pooled:
        return work.ids * share
    filled = (
        share * work.pooling_factor
        if work.pooling_factor < 1
        else 1.0 - (1.0 - share) ** work.pooling_factor
    )
    if (
        share == 1.0
        or summed > 1
        or work.in_place
        or filled >= COMPACT_BELOW
        or math.gcd(len(shard.cols), work.dim) < COMPACT_COLUMNS
    ):
        return work.bags
    mean = work.batch_size * filled
    return work.features * min(work.batch_size, mean + 2 * math.sqrt(mean * (1.0 - filled)))


def shard_traffic(work: TableWork, shards: Sequence[Shard], summed: int = 1) -> Traffic:
    """Traffic of the shards of one table that one rank owns; `summed` as in `returned_rows`."""
    blocks = {(shard.rows.start, shard.rows.stop): shard for shard in shards}
    fraction = sum(stop - start for start, stop in blocks) / work.rows
    per_id = ID_BYTES + WEIGHT_BYTES * work.weighted
    lengths = (
        sum(returned_rows(work, shard, summed) for shard in blocks.values()) * LENGTH_BYTES
        if work.pooled
        else 0
    )
    if work.in_place and not work.pooled:
        fraction = len(blocks)  # owners pick their ids themselves
    return Traffic(
        id_bytes=work.ids * fraction * per_id
        + len(blocks) * work.features * HEADER_BYTES
        + lengths,
        row_bytes=sum(returned_rows(work, shard, summed) * len(shard.cols) for shard in shards)
        * ROW_ELEMENT_BYTES,
    )
