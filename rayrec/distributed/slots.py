"""What every rank looks up and what travels: the vocabulary of the slot table, which `compile` makes once per plan.

A *use* is one feature looked up in one table of one collection. A *slot* is one use looked up in one shard. A *piece* is what travels:
one feature's bags restricted to one row block; slots of the same feature and row cuts share it, so ids cross the wire once per
destination rank however many column blocks or tables read them there. Slots are grouped by what one kernel can serve (`GroupKey`);
inside a pooled group they are ordered by (row block, output column), so that neighbours merge into few wide copies. Pooled rows travel as
matrices: those of row blocks apart, since bags without ids may be left out of them (`compact`). Where all ranks share the memory of a
collection's tables, no row travels at all (`in_place`).

A replicated table has a slot on every rank: each replica sees the ids of all ranks and makes the same updates, while its rows go only
home, so that only its gradient crosses the wire. A sequence (unpooled) use is a lookup whose every id is a bag of its own: its pieces
carry no lengths, and its slots have as many rows as ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

from rayrec.layout import BaseEmbeddingConfig, DataType, Shard, Storage
from rayrec.optim import SparseOptimizer


@dataclass(frozen=True)
class CollectionSpec:
    """What the runtime must know of one collection.

    Attributes:
        name: its path in the model.
        tables: in order.
        weighted: bags carry a weight per id.
        sequence: rows are returned one per id.
    """

    name: str
    tables: tuple[BaseEmbeddingConfig, ...]
    weighted: bool = False
    sequence: bool = False


@dataclass(frozen=True)
class Use:
    """One feature looked up in one table: `width` columns of the output of `collection`, from `column` on."""

    index: int  # within its collection
    collection: int
    table: str
    feature: str
    column: int
    width: int


@dataclass(frozen=True)
class Piece:
    """The ids of one feature that lie in one row block; `cuts` is None when there is only one block."""

    feature: str
    cuts: tuple[int, ...] | None
    block: int
    sequence: bool = False
    weighted: bool = False
    compact: bool = False  # bags without ids may stay at home


@dataclass(frozen=True)
class GroupKey:
    """What the slots of one kernel have in common.

    Attributes:
        width: that of every slot of a sequence group, or of one with a cache, whose rows are all of one width; 0 in others.
        two_hop: rows are summed inside the host before they go home; see `two_hop`.
        compact: row blocks, whose bags without ids may stay at home; see `compact`.
        chain: of tables in memory that all ranks share, see `in_place`: slots whose output columns ascend have one chain, so that a kernel
            reads their gradients where they lie; -1 where these must be gathered first. Of sequences the first column. None for other
            tables.
    """

    collection: int
    replicated: bool
    data_type: DataType
    weighted: bool
    storage: Storage
    optimizer: SparseOptimizer
    sequence: bool = False
    width: int = 0
    two_hop: bool = False
    compact: bool = False
    chain: int | None = None

    @property
    def in_place(self) -> bool:
        """Whether every rank reads these tables where they lie."""
        return self.chain is not None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        what = self.collection, self.chain, self.sequence, self.width
        return hash((*what, self.replicated, self.data_type, self.weighted, self.optimizer))


@dataclass(frozen=True)
class Slot:
    """One use looked up in one shard."""

    use: Use
    shard: Shard
    block: int
    piece: int  # index into the pieces of the shard's rank
    whole: bool = True  # the shard has all rows of the table

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
    """The slots of one rank that one kernel serves.

    Attributes:
        bases: of a sequence group that is read in place: the row of the shared memory where each shard begins.
    """

    key: GroupKey
    shards: tuple[Shard, ...]
    slots: tuple[Slot, ...]
    bases: tuple[int, ...] = ()

    @cached_property
    def slot_shards(self) -> tuple[int, ...]:
        """Per slot the index of its shard, ascending."""
        index = {shard: i for i, shard in enumerate(self.shards)}
        return tuple(index[slot.shard] for slot in self.slots)

    @cached_property
    def width(self) -> int:
        """Columns of all slots side by side."""
        return sum(slot.width for slot in self.slots)

    @cached_property
    def gaps(self) -> tuple[int, ...]:
        """Per slot, output columns between the one before and it, where gradients are read in place; else 0."""
        if self.key.chain is None or self.key.chain < 0 or self.key.sequence:
            return (0,) * len(self.slots)
        return 0, *(b.column - a.column - a.width for a, b in pairwise(self.slots))


@dataclass(frozen=True)
class Sizes:
    """What one rank sends to another in one step: ids and bags per piece, in the receiver's piece order; sequences have no bags.

    Attributes:
        extents: of the sender's outputs that are read in place, collection by collection: rows of a pooled one, which are the most bags
            of any key; ids of every use of a sequence.
    """

    extents: tuple[int, ...]
    ids: tuple[int, ...]
    bags: tuple[int, ...]
    _most: dict[tuple[int, ...], int] = field(default_factory=dict, repr=False, compare=False)

    def most_bags(self, pieces: tuple[int, ...]) -> int:
        """Bags of the fullest of some pieces; asked many times a step."""
        if pieces not in self._most:
            self._most[pieces] = max((self.bags[piece] for piece in pieces), default=0)
        return self._most[pieces]

    @staticmethod
    def of(header: Sequence[int], extents: int) -> Sizes:
        """From a header: so many extents, ids per piece, bags per piece."""
        half = extents + (len(header) - extents) // 2
        return Sizes(tuple(header[:extents]), tuple(header[extents:half]), tuple(header[half:]))


@dataclass(frozen=True)
class Matrix:
    """Pooled groups whose rows lie side by side in a message; pieces with fewer bags than the fullest are padded by empty ones."""

    groups: tuple[LookupGroup, ...]

    @cached_property
    def pieces(self) -> tuple[int, ...]:
        """The pieces that the groups read."""
        return tuple(sorted({slot.piece for group in self.groups for slot in group.slots}))

    @cached_property
    def width(self) -> int:
        """Columns of all groups."""
        return sum(group.width for group in self.groups)

    @cached_property
    def compact(self) -> bool:
        """Whether these are row blocks, whose bags without ids may stay at home."""
        return any(group.key.compact for group in self.groups)

    def rows(self, sizes: Sizes) -> int:
        """Rows for one message: the most bags of any piece."""
        return sizes.most_bags(self.pieces)

    def values(self, sizes: Sizes) -> int:
        """Rows times columns."""
        return self.rows(sizes) * self.width


@dataclass(frozen=True)
class RankSlots:
    """All that one rank looks up: its pieces as they arrive, and its groups, pooled before sequence, sharded before replicated."""

    pieces: tuple[Piece, ...]
    groups: tuple[LookupGroup, ...]

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """What leaves for other ranks in the forward pass: sharded pooled groups, and apart those of row blocks, by collection."""
        found: dict[int | None, list[LookupGroup]] = {}
        for group in self.groups:
            if not (group.key.sequence or group.key.replicated or group.key.two_hop or group.key.in_place):
                found.setdefault(group.key.collection if group.key.compact else None, []).append(group)
        return tuple(Matrix(tuple(groups)) for groups in found.values())

    @cached_property
    def replicas(self) -> Matrix:
        """Replicated pooled groups."""
        return Matrix(tuple(g for g in self.groups if g.key.replicated and not (g.key.sequence or g.key.in_place)))

    @cached_property
    def hop(self) -> Matrix:
        """Pooled groups of the two-hop route; the same columns and rows on every rank of a host, since all read the same features."""
        return Matrix(tuple(g for g in self.groups if g.key.two_hop))

    @cached_property
    def pooled(self) -> tuple[LookupGroup, ...]:
        """Pooled groups of the flat route, matrix by matrix and then the replicated ones."""
        return tuple(group for matrix in (*self.matrices, self.replicas) for group in matrix.groups)

    @cached_property
    def matrix_of(self) -> dict[GroupKey, Matrix]:
        """Pooled group -> the matrix that it is a part of."""
        return {group.key: matrix for matrix in (*self.matrices, self.replicas, self.hop) for group in matrix.groups}

    @cached_property
    def exchanged(self) -> tuple[LookupGroup, ...]:
        """Groups whose rows travel."""
        return tuple(group for group in self.groups if not group.key.in_place)

    @cached_property
    def in_place(self) -> tuple[LookupGroup, ...]:
        """Groups whose rows every rank reads where they lie."""
        return tuple(group for group in self.groups if group.key.in_place)

    @cached_property
    def weighted_pieces(self) -> frozenset[int]:
        """Pieces with weights that groups read whose rows travel."""
        return frozenset(slot.piece for group in self.exchanged if group.key.weighted for slot in group.slots)

    @cached_property
    def sequences(self) -> tuple[LookupGroup, ...]:
        """Sequence groups whose rows travel, sharded ones first."""
        return tuple(g for g in self.groups if g.key.sequence and not g.key.in_place)

    def rows_out(self, sizes: Sizes) -> int:
        """Values that leave for the sender of a message in the forward pass."""
        return sum(matrix.values(sizes) for matrix in self.matrices) + self._sequence_values(sizes, replicated=False)

    def grads_in(self, sizes: Sizes) -> tuple[int, int, int, int]:
        """Values that arrive from the sender of a message in the backward pass: pooled sharded, pooled replicated, then sequences alike.

        Sections apart, so that a codec with blocks gives every replica the same values.
        """
        pooled = sum(matrix.values(sizes) for matrix in self.matrices), self.replicas.values(sizes)
        return *pooled, self._sequence_values(sizes, replicated=False), self._sequence_values(sizes, replicated=True)

    def _sequence_values(self, sizes: Sizes, replicated: bool) -> int:
        groups = (g for g in self.sequences if g.key.replicated == replicated)
        return sum(sizes.ids[slot.piece] * slot.width for group in groups for slot in group.slots)


@dataclass(frozen=True)
class SlotTable:
    """What every rank looks up, for a set of collections that share one exchange.

    Attributes:
        ranks: per rank, its pieces and groups.
        collections: the specs by index, ascending.
        uses: per collection its uses in output order.
        features: every feature that is looked up, in order of first use.
        limits: feature -> rows of the smallest table it looks up; its ids must be below.
        hosts: ranks by host.
        granules: collection -> columns of the blocks that its compact matrices consist of.
        in_place: collections whose tables lie in memory that all ranks share.
    """

    ranks: tuple[RankSlots, ...]
    collections: dict[int, CollectionSpec]
    uses: dict[int, tuple[Use, ...]] = field(repr=False)
    features: tuple[str, ...]
    limits: dict[str, int]
    hosts: tuple[tuple[int, ...], ...]
    granules: dict[int, int] = field(default_factory=dict)
    in_place: frozenset[int] = frozenset()

    @cached_property
    def extents(self) -> dict[int, slice]:
        """Collection that is read in place -> where its extents are; see `Sizes`."""
        counts = {c: len(self.uses[c]) if self.collections[c].sequence else 1 for c in self.collections if c in self.in_place}
        bounds = [0, *accumulate(counts.values())]
        return {c: slice(a, b) for c, a, b in zip(counts, bounds, bounds[1:], strict=False)}

    @cached_property
    def exchanged(self) -> tuple[int, ...]:
        """Collections whose rows travel."""
        return tuple(c for c in self.collections if c not in self.in_place)

    @property
    def two_hop(self) -> bool:
        """Whether any table takes the two-hop route."""
        return any(rank.hop.groups for rank in self.ranks)

    @cached_property
    def widths(self) -> dict[int, int]:
        """Pooled collection whose rows travel -> columns of its output."""
        return {c: sum(u.width for u in self.uses[c]) for c in self.exchanged if not self.collections[c].sequence}

    @property
    def weighted(self) -> bool:
        """Whether any collection reads weights."""
        return any(spec.weighted for spec in self.collections.values())
