"""Work that a table gives a rank: ids, rows and bytes, for any layout.

The two halves of every price and every buffer: `TableWork` says what a step does with a table,
`shard_traffic` how much of it meets the rectangles that one rank owns. Ids follow a Zipf law over
rows whose order is hashed or shuffled, so that any block of rows has its share of the frequent
ones. `distributed.steps.route` packs what travels: per feature, row block and destination rank a
header of two counts, the ids (8 bytes, once however many column blocks wait there) and, when
pooled, the lengths (4 bytes a bag); and per bag a pooled row. Bags without ids in a row block stay
at home. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rayrec.layout.geometry import Layout, Replicated, Shard
from rayrec.layout.kinds import COMPACT_BELOW, COMPACT_COLUMNS, takes_two_hops
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
ROW_ELEMENT_BYTES = 4  # pooled rows and their gradients are float32 at either end


@dataclass(frozen=True, slots=True)
class TableWork:
    """One table and what a training step does with it.

    Attributes:
        rows, dim, element_bytes: the table.
        features: number of features that look it up.
        batch_size: B, bags per feature and rank. world_size: W.
        pooling_factor: mean ids per bag.
        weighted: a weight travels with each id.
        pooled: a bag gives one row; else every id gives one.
        storage: memory of its rows.
        gpu: the rank is a GPU, whose memory is not that of the host.
        skew: exponent of the Zipf law of its ids; 0 means uniform.
        wire: wire types of rows and gradients; one rank alone codes nothing.
        in_place: every rank reads its rows where they lie, so that none travel; see
            `rayrec.distributed.ways.in_place`.
        distinct_at_home: expected number of different rows among the ids of one rank.
        distinct: the same among the ids of all ranks; a block of rows has its share of them.
        missed: share of `distinct` that a cache does not hold; 0 without a cache.
        optimizer: name of the table's own optimizer; None for that of the run.
        row_multiple: rows between which the table may be cut.
        id_bytes: bytes of a row of a dynamic table that say whose it is, its map included.
        copies: times its present rows that memory must have room for, since a table may grow.
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
    storage: Storage = field(default_factory=Storage)
    gpu: bool = False
    skew: float = 0.0
    wire: Wire = FLOAT32
    in_place: bool = False
    optimizer: str | None = None
    row_multiple: int = 1
    id_bytes: int = 0
    copies: int = 1
    distinct_at_home: float = field(init=False)
    distinct: float = field(init=False)
    missed: float = field(init=False)

    def __post_init__(self) -> None:
        # The three numbers are worked out once: every candidate layout of the table asks for them.
        ids = self.world_size * self.ids
        distinct = distinct_rows(self.rows, ids, self.skew)
        at_home = distinct_rows(self.rows, self.ids, self.skew) if self.in_place else 0.0
        held = 1.0
        if self.gpu and self.storage.load_factor is not None:
            # A cache holds the rows that are asked for most.
            cached_rows = round(self.storage.load_factor * self.rows)
            held = distinct_rows(self.rows, ids, self.skew, cached_rows) / distinct
        object.__setattr__(self, "distinct", distinct)
        object.__setattr__(self, "distinct_at_home", at_home)
        object.__setattr__(self, "missed", 1.0 - held)

    @property
    def off_device(self) -> bool:
        """True if its rows lie in a memory that is not the rank's own."""
        return self.gpu and self.storage.kind != "device"

    @property
    def cached(self) -> bool:
        """True if the rank holds some of them in a cache."""
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
    """The work of one table for `batch_size` rows per rank.

    Args:
        storage: memory of its rows; by default the fastest that its constraints allow.
        share_tables: rows are read in place.
    """
    return TableWork(
        rows=table.num_embeddings,
        dim=table.embedding_dim,
        element_bytes=table.data_type.num_bytes,
        features=max(table.num_features(), 1),
        batch_size=batch_size,
        world_size=world_size,
        pooling_factor=constraints.pooling_factor,
        weighted=constraints.weighted,
        pooled=getattr(table, "pooling", PoolingType.SUM) is not PoolingType.NONE,
        storage=storage or storages_of(table, constraints, device)[0],
        gpu=device == "cuda",
        skew=constraints.skew,
        wire=wire if world_size > 1 else FLOAT32,
        in_place=share_tables,
        row_multiple=table.row_multiple,
        id_bytes=_id_bytes(table),
        copies=_copies(table),
    )


def _id_bytes(table: BaseEmbeddingConfig) -> int:
    """Return the bytes of a row that say whose it is.

    They are the mean over the rows that a table has grown to and those beside them, half as many,
    from which they came.
    """
    if table.dynamic is None:
        return 0
    if table.most_rows == table.num_embeddings:
        return table.dynamic.row_bytes(table.num_embeddings)
    rule = table.with_rows(table.most_rows).dynamic
    assert rule is not None, "a dynamic table stays one"
    grown, before = (rule.row_bytes(rows) for rows in (table.most_rows, table.most_rows // 2))
    return -(-(2 * grown + before) // 3)


def _copies(table: BaseEmbeddingConfig) -> int:
    """Return how many times its present rows a table takes while it grows for the last time.

    The rows that it has then lie beside twice as many.
    """
    doubled = table.most_rows // table.num_embeddings
    return doubled if doubled == 1 else doubled + doubled // 2


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes between ONE source rank and the owner of some shards of a table.

    Attributes:
        id_bytes: headers, lengths, ids and weights to the owner.
        row_bytes: rows from the owner, in float32; their gradients take as many, the other way.
    """

    id_bytes: float
    row_bytes: float

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.id_bytes + other.id_bytes, self.row_bytes + other.row_bytes)


NO_TRAFFIC = Traffic(0.0, 0.0)


def returned_rows(work: TableWork, shard: Shard, summed: int = 1) -> float:
    """Rows that a shard returns to one source rank.

    A sequence returns one row for every id that meets the shard, a pooled table one row per bag.
    A row block in which few bags have ids returns rows of those bags alone, unless rows are read in
    place or summed on their way. Those bags are counted as the fullest of several features has
    them: two standard deviations more than the mean.

    Args:
        summed: ranks of a host that sum their rows first; see `summed_ranks`.
    """
    share = len(shard.rows) / work.rows
    if not work.pooled:
        return work.ids * share
    # share of the bags that have an id in this block of rows
    if work.pooling_factor < 1:
        filled = share * work.pooling_factor
    else:
        filled = 1.0 - (1.0 - share) ** work.pooling_factor
    if share == 1.0 or summed > 1 or work.in_place or filled >= COMPACT_BELOW:
        return work.bags
    if math.gcd(len(shard.cols), work.dim) < COMPACT_COLUMNS:
        return work.bags
    # Messages have the size of the fullest feature: of a binomial, mean + 2 standard deviations.
    mean = work.batch_size * filled
    return work.features * min(work.batch_size, mean + 2 * math.sqrt(mean * (1.0 - filled)))


def shard_traffic(work: TableWork, shards: Sequence[Shard], summed: int = 1) -> Traffic:
    """Traffic of the shards of one table that one rank owns; `summed` as in `returned_rows`."""
    # Ids cross once per row block, however many column blocks of it the rank owns.
    blocks = {(shard.rows.start, shard.rows.stop): shard for shard in shards}
    fraction = sum(stop - start for start, stop in blocks) / work.rows
    if work.in_place and not work.pooled:
        fraction = len(blocks)  # owners pick their ids themselves
    bags = sum(returned_rows(work, shard, summed) for shard in blocks.values())
    headers = len(blocks) * work.features * HEADER_BYTES
    # owners of dynamic tables that are read in place answer every id with its row
    answered = work.in_place and work.id_bytes > 0
    per_id = ID_BYTES * (1 + answered) + WEIGHT_BYTES * work.weighted
    ids = work.ids * fraction * per_id
    elements = sum(returned_rows(work, shard, summed) * len(shard.cols) for shard in shards)
    return Traffic(
        id_bytes=ids + headers + (bags * LENGTH_BYTES if work.pooled else 0),
        row_bytes=elements * ROW_ELEMENT_BYTES,
    )


def layout_traffic(
    work: TableWork, by_rank: Mapping[int, Sequence[Shard]], summed: int = 1
) -> Traffic:
    """Traffic between one source rank and all owners together."""
    return sum((shard_traffic(work, shards, summed) for shards in by_rank.values()), NO_TRAFFIC)


def weight_bytes(table: BaseEmbeddingConfig) -> int:
    """Bytes of all rows of a table."""
    return table.num_embeddings * table.embedding_dim * table.data_type.num_bytes


def shards_by_rank(layout: Layout) -> dict[int, list[Shard]]:
    """Rank -> the rectangles it owns, ranks ascending."""
    by_rank: dict[int, list[Shard]] = {rank: [] for rank in layout.ranks}
    for shard in layout.shards(""):
        by_rank[shard.rank].append(shard)
    return by_rank


def row_blocks(layout: Layout) -> int:
    """Blocks that the ids of a table are sorted into; 1 for a replicated table."""
    return 1 if isinstance(layout, Replicated) else layout.num_row_blocks


def summed_ranks(layout: Layout, hosts: Sequence[Sequence[int]]) -> int:
    """Ranks of a host whose rows are summed before they go home.

    All of them on the route of two hops, so that fewer bytes cross between hosts; else 1. The rule
    is the runtime's own, `rayrec.layout.takes_two_hops`.
    """
    return len(hosts[0]) if takes_two_hops(layout, hosts) else 1
