"""Compile the slot table: from a plan and the collections' tables to what every rank looks up.

The result is a pure function of the arguments, so every rank gets the same table without talking.
It costs one pass over uses x shards, once per set of collections.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from math import gcd
from typing import NamedTuple

from rayrec.distributed.program.groups import (
    OWN_COLUMNS,
    CollectionSpec,
    GradientColumns,
    GroupKey,
    LookupGroup,
    Piece,
    Slot,
    Use,
)
from rayrec.distributed.program.slots import RankSlots, SlotTable
from rayrec.layout import (
    COLUMN_MULTIPLE,
    BaseEmbeddingConfig,
    Layout,
    Shard,
    ShardingPlan,
    TableLayout,
)
from rayrec.layout.tables import UNBOUNDED
from rayrec.optim import SparseOptimizer


class Address(NamedTuple):
    """Route of one use's ids to its shards, and the carrier that brings their rows back.

    Attributes:
        carrier: the name of the carrier; messages hold their carriers in the order of their names.
        cuts: row cuts of ids before they are sent, or None to send all ids to each shard.
        leaves_out: bags without ids in a row block may stay at home.
    """

    carrier: str
    cuts: tuple[int, ...] | None
    leaves_out: bool = False


class Addressing(ABC):
    """Decisions of a way while the slot table is compiled."""

    @abstractmethod
    def address(self, spec: CollectionSpec, layout: Layout, granule: int) -> Address:
        """Return how the ids and rows of a table with this layout travel; see `Address`."""

    def header(self, spec: CollectionSpec, uses: Sequence[Use]) -> tuple[str | None, ...]:
        """Return the counts of a batch that ranks tell each other; see `SlotTable.headers`."""
        return ()

    def arrange(self, key: GroupKey, slots: Sequence[Slot]) -> Iterable[LookupGroup]:
        """Return the groups of one rank's slots that have a key in common."""
        return [group_of(key, slots)]


def uses_of(collection: int, tables: Sequence[BaseEmbeddingConfig]) -> tuple[Use, ...]:
    """Return the uses of one collection in output order: tables in order, and their features."""
    uses: list[Use] = []
    column = 0
    for table in tables:
        for feature in table.feature_names:
            width = table.embedding_dim
            lag = 0 if table.dynamic is None else table.dynamic.lag(feature)
            use = Use(len(uses), collection, table.name, feature, column, width, lag)
            uses.append(use)
            column += width
    return tuple(uses)


def granule_of(uses: Sequence[Use], plan: ShardingPlan) -> int:
    """Return the columns of the widest blocks that make up the uses of one collection.

    Tables that are cut by rows are cut by columns, too, at the borders of such blocks.
    """
    columns = 0
    for use in uses:
        layout = plan.tables[use.table].layout
        columns = gcd(columns, use.column, use.width)
        if isinstance(layout, TableLayout) and layout.num_row_blocks > 1:
            columns = gcd(columns, *layout.col_cuts)
    return columns


def compile_slots(
    plan: ShardingPlan,
    specs: Mapping[int, CollectionSpec],
    optimizers: Mapping[str, SparseOptimizer],
    world_size: int,
    ways: Mapping[int, Addressing],
) -> SlotTable:
    """Compile the slot table of some collections.

    Args:
        plan: covers every table.
        specs: collections by index.
        optimizers: optimizer of every table.
        world_size: the number of ranks.
        ways: the way of each collection.
    """
    specs = {c: specs[c] for c in sorted(specs)}
    uses = {c: uses_of(c, spec.tables) for c, spec in specs.items()}
    granules = {c: granule_of(uses[c], plan) for c in specs}
    # Every rank compiles all ranks, since it must know the shape of every message.
    pieces: list[dict[Piece, int]] = [{} for _ in range(world_size)]
    slots: list[dict[GroupKey, list[Slot]]] = [{} for _ in range(world_size)]
    limits: dict[str, int] = {}
    for c, spec in specs.items():
        configs = {table.name: table for table in spec.tables}
        for use in uses[c]:
            config, placement = configs[use.table], plan.tables[use.table]
            rows, layout = config.num_embeddings, placement.layout
            # An id must exist in every table that its feature looks up.
            limits[use.feature] = min(limits.get(use.feature, UNBOUNDED), config.id_limit)
            address = ways[c].address(spec, layout, granules[c])
            # A merged table of a sequence, and a cache, hold rows of one width.
            one_width = spec.sequence or placement.storage.kind == "cached"
            for shard in layout.shards(use.table):
                key = GroupKey(
                    collection=c,
                    carrier=address.carrier,
                    data_type=config.data_type,
                    weighted=spec.weighted,
                    storage=placement.storage,
                    optimizer=optimizers[use.table],
                    sequence=spec.sequence,
                    width=len(shard.cols) if one_width else 0,
                    odd=len(shard.cols) % COLUMN_MULTIPLE > 0,
                    dynamic=config.dynamic is not None,
                )
                block = 0
                if address.cuts is not None and isinstance(layout, TableLayout):
                    block = layout.row_block(shard.rows.start)
                piece = Piece(
                    use.feature,
                    address.cuts,
                    block,
                    spec.sequence,
                    spec.weighted,
                    address.leaves_out,
                    blocks_of(config),
                )
                # Equal pieces get one number, so their ids are sent once per rank.
                number = pieces[shard.rank].setdefault(piece, len(pieces[shard.rank]))
                slot = Slot(use, shard, block, number, whole=len(shard.rows) == rows)
                slots[shard.rank].setdefault(key, []).append(slot)
    ranks = tuple(
        RankSlots(tuple(of_rank), _groups(by_key, ways))
        for of_rank, by_key in zip(pieces, slots, strict=True)
    )
    headers = {c: ways[c].header(spec, uses[c]) for c, spec in specs.items()}
    return SlotTable(
        ranks=ranks,
        collections=specs,
        uses=uses,
        limits=limits,
        hosts=plan.hosts,
        granules=granules,
        headers={c: entries for c, entries in headers.items() if entries},
    )


def blocks_of(table: BaseEmbeddingConfig) -> tuple[int, int]:
    """Return the blocks of a dynamic table and their rows; (0, 0) for any other one."""
    if table.dynamic is None:
        return 0, 0
    return table.num_embeddings // table.row_multiple, table.row_multiple


def _groups(
    by_key: Mapping[GroupKey, Sequence[Slot]], ways: Mapping[int, Addressing]
) -> tuple[LookupGroup, ...]:
    """Return the groups of one rank's slots."""
    groups: list[LookupGroup] = []
    for key, slots in by_key.items():
        groups.extend(ways[key.collection].arrange(key, slots))
    # every rank must order the groups alike, and a message holds its carriers in this order
    groups.sort(key=lambda g: (g.key.carrier, g.key.collection, g.key.width, repr(g.key)))
    return tuple(groups)


def group_of(
    key: GroupKey,
    slots: Sequence[Slot],
    by_block: bool = True,
    bases: Mapping[Shard, int] | None = None,
    gradient: GradientColumns = OWN_COLUMNS,
) -> LookupGroup:
    """Make one group of some slots; the slots of one shard become neighbours, as kernels want it.

    Args:
        by_block: order shards by their row block first, then by column; else by column alone, so
            that ranks which hold different blocks of the same columns order them alike.
        bases: see `LookupGroup`.
    """
    first: dict[Shard, tuple[int, int]] = {}
    for slot in slots:
        first.setdefault(slot.shard, (slot.block if by_block else 0, slot.column))
    shards = tuple(sorted(first, key=lambda shard: first[shard]))
    rank_of = {shard: i for i, shard in enumerate(shards)}
    ordered = tuple(sorted(slots, key=lambda slot: (rank_of[slot.shard], slot.column)))
    starts = () if bases is None else tuple(bases[shard] for shard in shards)
    return LookupGroup(key, shards, ordered, starts, gradient)
