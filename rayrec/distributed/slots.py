"""From (plan, uses) every rank compiles the same slot table once; the step loop only follows it.

A *use* is one feature looked up in one table of one collection: a run of output columns. A *slot* is one use looked up in one shard. A
*piece* is what travels: one feature's bags restricted to one row block; slots of the same feature and row cuts share it, so ids cross the
wire once per destination rank however many column blocks or tables read them there. Slots are grouped by what one fused kernel can
serve (`GroupKey`); inside a group they are ordered by (row block, output column), so that neighbours merge into few wide copies.

A replicated table has a slot on every rank: each replica sees the ids of all ranks and makes the same updates, while its rows go only
home, so that only its gradient crosses the wire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rayrec.layout import BaseEmbeddingConfig, DataType, Replicated, Shard, ShardingPlan, TableLayout
from rayrec.layout.plan import StorageKind


@dataclass(frozen=True)
class Use:
    """One feature looked up in one table: `width` columns of the output of `collection`, from `column` on."""

    index: int
    collection: int
    table: str
    feature: str
    column: int
    width: int


@dataclass(frozen=True)
class Piece:
    """The bags of one feature whose ids lie in one row block; `cuts` is None when there is only one block."""

    feature: str
    cuts: tuple[int, ...] | None
    block: int


@dataclass(frozen=True)
class GroupKey:
    """What the slots of one fused kernel have in common."""

    collection: int
    replicated: bool
    data_type: DataType
    weighted: bool
    storage: StorageKind


@dataclass(frozen=True)
class Slot:
    """One use looked up in one shard."""

    use: Use
    shard: Shard
    block: int
    piece: int  # index into the pieces of the shard's rank

    @property
    def column(self) -> int:
        """First output column of this slot in its collection."""
        return self.use.column + self.shard.cols.start

    @property
    def width(self) -> int:
        """Output columns of this slot."""
        return len(self.shard.cols)


@dataclass(frozen=True)
class LookupGroup:
    """The slots of one rank that one fused kernel serves; `slot_shards[i]` is the shard of slot i."""

    key: GroupKey
    shards: tuple[Shard, ...]
    slots: tuple[Slot, ...]

    @property
    def slot_shards(self) -> tuple[int, ...]:
        """Index into `shards` per slot, ascending."""
        index = {shard: i for i, shard in enumerate(self.shards)}
        return tuple(index[slot.shard] for slot in self.slots)

    @property
    def width(self) -> int:
        """Output columns of the kernel."""
        return sum(slot.width for slot in self.slots)


@dataclass(frozen=True)
class RankSlots:
    """All that one rank looks up: its pieces as they arrive and its groups, sharded ones first."""

    pieces: tuple[Piece, ...]
    groups: tuple[LookupGroup, ...]

    @property
    def exchanged_width(self) -> int:
        """Columns of sharded groups: those that leave for other ranks in the forward pass."""
        return sum(g.width for g in self.groups if not g.key.replicated)

    @property
    def width(self) -> int:
        """Columns of all groups: those whose gradients arrive in the backward pass."""
        return sum(g.width for g in self.groups)


@dataclass(frozen=True)
class SlotTable:
    """What every rank looks up, for a set of collections that share one exchange.

    Attributes:
        ranks: per rank, its pieces and groups.
        collections: indices of the collections, ascending.
        widths: collection -> columns of its output.
        features: every feature that is looked up, in order of first use.
        limits: feature -> rows of the smallest table it looks up; its ids must be below.
    """

    ranks: tuple[RankSlots, ...]
    collections: tuple[int, ...]
    widths: dict[int, int]
    features: tuple[str, ...]
    limits: dict[str, int]
    weighted: bool = False
    uses: tuple[Use, ...] = field(default=(), repr=False)


def uses_of(collection: int, tables: Sequence[BaseEmbeddingConfig]) -> tuple[Use, ...]:
    """The uses of one collection in output order: tables in order, the features of each in order."""
    uses: list[Use] = []
    column = 0
    for table in tables:
        for feature in table.feature_names:
            uses.append(Use(len(uses), collection, table.name, feature, column, table.embedding_dim))
            column += table.embedding_dim
    return tuple(uses)


def compile_slots(
    plan: ShardingPlan, tables: Mapping[int, Sequence[BaseEmbeddingConfig]], weighted: Mapping[int, bool], world_size: int
) -> SlotTable:
    """Compile the slot table of some collections; a pure function, so that every rank gets the same one.

    Args:
        plan: covers every table.
        tables: collection index -> its tables in order.
        weighted: collection index -> whether its bags carry weights.
        world_size: W.
    """
    uses = tuple(use for c in sorted(tables) for use in uses_of(c, tables[c]))
    configs = {t.name: t for c in tables for t in tables[c]}
    builders = [_RankBuilder() for _ in range(world_size)]
    limits: dict[str, int] = {}
    for use in uses:
        config = configs[use.table]
        limits[use.feature] = min(limits.get(use.feature, config.num_embeddings), config.num_embeddings)
        placement = plan.tables[use.table]
        layout, storage = placement.layout, placement.storage.kind
        key = GroupKey(use.collection, isinstance(layout, Replicated), config.data_type, weighted[use.collection], storage)
        cuts = layout.row_cuts if isinstance(layout, TableLayout) and layout.num_row_blocks > 1 else None
        for shard in layout.shards(use.table):
            block = layout.row_block(shard.rows.start) if isinstance(layout, TableLayout) else 0
            builders[shard.rank].add(key, use, shard, block, Piece(use.feature, cuts, block))
    return SlotTable(
        ranks=tuple(builder.build() for builder in builders),
        collections=tuple(sorted(tables)),
        widths={c: sum(u.width for u in uses if u.collection == c) for c in sorted(tables)},
        features=tuple(limits),
        limits=limits,
        weighted=any(weighted[c] for c in tables),
        uses=uses,
    )


class _RankBuilder:
    def __init__(self) -> None:
        self.pieces: dict[Piece, int] = {}
        self.groups: dict[GroupKey, list[Slot]] = {}

    def add(self, key: GroupKey, use: Use, shard: Shard, block: int, piece: Piece) -> None:
        index = self.pieces.setdefault(piece, len(self.pieces))
        self.groups.setdefault(key, []).append(Slot(use, shard, block, index))

    def build(self) -> RankSlots:
        # sharded groups first: their columns lead in the gradient buffer, so that the forward send is a prefix of the same order
        keys = sorted(self.groups, key=lambda k: (k.replicated, k.collection, k.data_type.value, k.weighted, k.storage))
        return RankSlots(tuple(self.pieces), tuple(_group(key, self.groups[key]) for key in keys))


def _group(key: GroupKey, slots: list[Slot]) -> LookupGroup:
    first: dict[Shard, tuple[int, int]] = {}
    for slot in slots:
        first.setdefault(slot.shard, (slot.block, slot.column))
    # the kernel wants the slots of one shard side by side
    shards = tuple(sorted(first, key=lambda s: first[s]))
    rank_of = {shard: i for i, shard in enumerate(shards)}
    return LookupGroup(key, shards, tuple(sorted(slots, key=lambda s: (rank_of[s.shard], s.column))))
