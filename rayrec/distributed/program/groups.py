"""What every rank looks up and what travels: the vocabulary of the slot table, which `compile`
makes once per plan.

A *use* is one feature looked up in one table of one collection. A *slot* is one use looked up in
one shard. A *piece* is what travels: one feature's bags restricted to one row block; slots of the
same feature and row cuts share it, so ids cross the wire once per destination rank however many
column blocks or tables read them there. Slots are grouped by what one kernel can serve
(`GroupKey`); inside a pooled group they are ordered by (row block, output column), so that
neighbours merge into few wide copies. Pooled rows travel as matrices: those of row blocks apart,
since bags without ids may be left out of them (`compact`). Where all ranks share the memory of a
collection's tables, no row travels at all (`in_place`).

A replicated table has a slot on every rank: each replica sees the ids of all ranks and makes the
same updates, while its rows go only home, so that only its gradient crosses the wire. A sequence
(unpooled) use is a lookup whose every id is a bag of its own: its pieces carry no lengths, and its
slots have as many rows as ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from rayrec.layout import BaseEmbeddingConfig, DataType, Shard, Storage
from rayrec.optim import RowWiseAdagrad, SparseOptimizer

GATHERED = -1  # in place of a chain


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
    """One feature looked up in one table: `width` columns of the output of `collection`, from
    `column` on.
    """

    index: int  # within its collection
    collection: int
    table: str
    feature: str
    column: int
    width: int


@dataclass(frozen=True)
class Piece:
    """The ids of one feature that lie in one row block; `cuts` is None when there is only one
    block.
    """

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
        width: that of every slot of a sequence group, or of one with a cache, whose rows are all of
            one width; 0 in others.
        two_hop: rows are summed inside the host before they go home; see `two_hop`.
        compact: row blocks, whose bags without ids may stay at home; see `compact`.
        chain: of tables in memory that all ranks share, see `in_place`: slots whose output columns
            ascend have one chain, so that a kernel reads their gradients where they lie; GATHERED
            where these must be gathered first. Of sequences the first column. None for other
            tables.
        odd: widths are no multiple of 4, which FBGEMM's kernels for GPUs need.
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
    odd: bool = False

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
        bases: of a sequence group that is read in place: the row of the shared memory where each
            shard begins.
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

    @property
    def first_column(self) -> int:
        """Where the columns of this group begin in the gradients that its kernel is given."""
        if self.key.chain is None or self.key.chain == GATHERED:
            return 0
        return self.key.chain if self.key.sequence else self.slots[0].column

    @cached_property
    def gaps(self) -> tuple[int, ...]:
        """Per slot, output columns between the one before and it, where gradients are read in
        place; else 0.
        """
        if self.key.chain in (None, GATHERED) or self.key.sequence:
            return (0,) * len(self.slots)
        return 0, *(b.column - a.column - a.width for a, b in pairwise(self.slots))


def is_vectorized(optimizer: SparseOptimizer, data_type: DataType) -> bool:
    """Return whether FBGEMM's vectorized CPU kernel makes exactly this optimizer's update.

    The kernel reads the gradients of any columns where they lie; every other update on CPU wants
    those of its slots side by side.
    """
    plain = isinstance(optimizer, RowWiseAdagrad) and not optimizer.weight_decay
    return plain and data_type is DataType.FP32 and optimizer.max_row_norm is None
