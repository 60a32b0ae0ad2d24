"""The words of the slot table: what every rank looks up and what travels to it.

A *use* is one feature looked up in one table of one collection. A *slot* is one use looked up in
one shard. A *piece* is what travels: the bags of one feature, restricted to one row block. Slots of
the same feature and the same row cuts share a piece, so an id crosses the wire once per destination
rank, however many column blocks or tables read it there. A *group* holds the slots that one kernel
serves. The *carrier* of a group brings its rows to the ranks that asked for them; its *way* says
what that means (`rayrec.distributed.ways`).

A replicated table has a slot on every rank: each replica sees the ids of all ranks and makes the
same updates. A use of a sequence collection is looked up id by id: every id is a bag of its own,
its pieces carry no lengths, and its slots have as many rows as ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rayrec.layout import BaseEmbeddingConfig, DataType, Shard, Storage
from rayrec.optim import RowWiseAdagrad, SparseOptimizer


@dataclass(frozen=True)
class CollectionSpec:
    """Description of one collection for the runtime.

    Attributes:
        name: its path in the model.
        tables: its tables, in their order.
        weighted: bags carry a weight per id.
        sequence: rows are returned one per id.
    """

    name: str
    tables: tuple[BaseEmbeddingConfig, ...]
    weighted: bool = False
    sequence: bool = False

    @property
    def features(self) -> frozenset[str]:
        """The features that its tables look up."""
        return frozenset(name for table in self.tables for name in table.feature_names)

    @cached_property
    def uses_time(self) -> bool:
        """True if a table of it asks for the time of the data."""
        return any(t.dynamic is not None and t.dynamic.uses_time for t in self.tables)


@dataclass(frozen=True)
class Use:
    """One feature looked up in one table: `width` columns of the output of `collection`.

    Attributes:
        lag: of the feature in its dynamic table; see `DynamicConfig`.
    """

    index: int  # within its collection
    collection: int
    table: str
    feature: str
    column: int  # the first one
    width: int
    lag: int = 0


@dataclass(frozen=True)
class Piece:
    """The ids of one feature that lie in one row block; `cuts` is None when there is only one.

    Attributes:
        sequence: the piece carries no lengths.
        leaves_out: bags without ids may stay at home.
        dynamic: blocks of a dynamic table, and the rows of each: ids are cut by the block that
            their hash says, and travel as they are; (0, 0) for any other table.
    """

    feature: str
    cuts: tuple[int, ...] | None
    block: int
    sequence: bool = False
    weighted: bool = False
    leaves_out: bool = False
    dynamic: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class GroupKey:
    """Properties that all slots of one kernel share.

    Attributes:
        collection: the collection whose rows they are.
        carrier: the name of what brings the rows home; a way gives it, and nobody else reads it.
        sequence: every id is a bag of its own.
        width: the width of every slot, where a kernel needs rows of one width: of a sequence, or of
            rows with a cache. It is 0 elsewhere.
        part: tells groups of one carrier apart that are alike otherwise.
        odd: widths are no multiples of 4, which FBGEMM's kernels for GPUs need.
        dynamic: the tables are dynamic.
    """

    collection: int
    carrier: str
    data_type: DataType
    weighted: bool
    storage: Storage
    optimizer: SparseOptimizer
    sequence: bool = False
    width: int = 0
    part: int = 0
    odd: bool = False
    dynamic: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Steps look keys up, so the hash is kept. Few keys differ in storage alone.
        address = self.collection, self.carrier, self.part, self.sequence, self.width
        return hash((*address, self.data_type, self.weighted, self.optimizer))


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
        """The first output column of this slot in its collection."""
        return self.use.column + self.shard.cols.start

    @property
    def width(self) -> int:
        """The output columns of this slot."""
        return len(self.shard.cols)


@dataclass(frozen=True)
class GradientColumns:
    """Columns of a kernel's slots in a matrix of gradients that has those of other slots, too.

    Attributes:
        first: the column of the first slot.
        gaps: per slot, the columns between the slot before and it; empty where there are none.
        gathered: the kernel needs the columns of its slots side by side.
    """

    first: int = 0
    gaps: tuple[int, ...] = ()
    gathered: bool = False


OWN_COLUMNS = GradientColumns()  # of a matrix that is the kernel's own


@dataclass(frozen=True)
class LookupGroup:
    """The slots of one rank that one kernel serves.

    Attributes:
        bases: for a sequence group whose shards lie in memory with others: the row of that memory
            where each shard begins.
        gradient: columns of the gradients to read; by default it is given exactly its own.
    """

    key: GroupKey
    shards: tuple[Shard, ...]
    slots: tuple[Slot, ...]
    bases: tuple[int, ...] = ()
    gradient: GradientColumns = OWN_COLUMNS

    @cached_property
    def slot_shards(self) -> tuple[int, ...]:
        """Return per slot the index of its shard, ascending."""
        index = {shard: i for i, shard in enumerate(self.shards)}
        return tuple(index[slot.shard] for slot in self.slots)

    @cached_property
    def lanes(self) -> tuple[int | None, ...]:
        """Return the index of the shard of every lane of pooled ids.

        A gap before a slot is a lane of its own, None, whose bags are empty; see
        `unpack.pooled_ids`.
        """
        lanes: list[int | None] = []
        for shard, gap in zip(self.slot_shards, self.gaps, strict=True):
            lanes += [None, shard] if gap else [shard]
        return tuple(lanes)

    @property
    def lane_widths(self) -> list[int]:
        """The columns of every lane."""
        widths: list[int] = []
        for slot, gap in zip(self.slots, self.gaps, strict=True):
            widths += [gap, slot.width] if gap else [slot.width]
        return widths

    @cached_property
    def has_lags(self) -> bool:
        """Return True if a slot has a lag; see `Use`."""
        return any(slot.use.lag for slot in self.slots)

    @cached_property
    def width(self) -> int:
        """The columns of all slots side by side."""
        return sum(slot.width for slot in self.slots)

    @cached_property
    def gaps(self) -> tuple[int, ...]:
        """Return per slot the columns between the one before and it in its gradients."""
        return self.gradient.gaps or (0,) * len(self.slots)


def is_vectorized(optimizer: SparseOptimizer, data_type: DataType) -> bool:
    """Return whether FBGEMM's vectorized CPU kernel makes exactly this optimizer's update.

    The kernel reads the gradients of any columns where they lie; every other update on CPU wants
    those of its slots side by side.
    """
    # FBGEMM's CPU kernel leaves out weight decay for tables of one feature; see `lookup`.
    plain = isinstance(optimizer, RowWiseAdagrad) and not optimizer.weight_decay
    return plain and data_type is DataType.FP32 and optimizer.max_row_norm is None
