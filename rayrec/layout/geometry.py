"""The one geometry: a table's layout is row cuts x column cuts x owner ranks.

Every sharding kind is a value of it. A `Shard` is a rectangle of one table on one rank. A
`TableLayout` tiles a table by a product grid: all column blocks share the row cuts, so that one
bucketize per feature serves every column block. `Replicated` is the data-parallel case: the whole
table on every rank. Uneven cuts and grids that have no TorchRec name are layouts like any other.
Standard library only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rayrec.errors import PlanError

COLUMN_MULTIPLE = 4  # between column cuts: FBGEMM kernels move rows in vectors of four elements


@dataclass(frozen=True)
class Shard:
    """A rectangle of one table on one rank: half-open ranges of rows and columns."""

    table: str
    rows: range
    cols: range
    rank: int

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return len(self.rows), len(self.cols)

    def intersect(self, other: Shard) -> tuple[range, range] | None:
        """Rows and columns of one table that both rectangles cover, or None."""
        if self.table != other.table:
            return None
        # A range whose stop lies below its start is empty, so disjoint rectangles need no case
        # here.
        rows = range(max(self.rows.start, other.rows.start), min(self.rows.stop, other.rows.stop))
        cols = range(max(self.cols.start, other.cols.start), min(self.cols.stop, other.cols.stop))
        return (rows, cols) if len(rows) and len(cols) else None


@dataclass(frozen=True)
class TableLayout:
    """Row blocks x column blocks, each cell owned by one rank; they tile the table exactly once.

    Attributes:
        row_cuts: 0 .. num_embeddings, strictly increasing.
        col_cuts: 0 .. embedding_dim, strictly increasing; all but the last are multiples of 4.
        owners: `owners[row block][column block]` -> rank.
    Raises:
        PlanError: the cuts do not tile a table or the owners do not match the cuts.
    """

    row_cuts: tuple[int, ...]
    col_cuts: tuple[int, ...]
    owners: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for what, cuts in (("row_cuts", self.row_cuts), ("col_cuts", self.col_cuts)):
            if len(cuts) < 2 or cuts[0] != 0 or any(a >= b for a, b in pairwise(cuts)):
                raise PlanError(
                    f"{what}={cuts} do not tile a table: they must start at 0 and strictly "
                    "increase."
                )
        if any(cut % COLUMN_MULTIPLE for cut in self.col_cuts[:-1]):
            raise PlanError(
                f"col_cuts={self.col_cuts} cut at what is no multiple of {COLUMN_MULTIPLE} "
                "columns; only the last may end so."
            )
        rows, cols = self.num_row_blocks, self.num_col_blocks
        if len(self.owners) != rows or any(len(row) != cols for row in self.owners):
            raise PlanError(
                f"owners={self.owners} must have {rows} rows of {cols} ranks, one per block of the "
                "cuts."
            )
        if any(rank < 0 for row in self.owners for rank in row):
            raise PlanError(f"owners={self.owners} name a negative rank.")

    @property
    def num_row_blocks(self) -> int:
        """Blocks along the rows."""
        return len(self.row_cuts) - 1

    @property
    def num_col_blocks(self) -> int:
        """Blocks along the columns."""
        return len(self.col_cuts) - 1

    @property
    def shape(self) -> tuple[int, int]:
        """(num_embeddings, embedding_dim) of the table that this layout tiles."""
        return self.row_cuts[-1], self.col_cuts[-1]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that own a shard, ascending."""
        return tuple(sorted({rank for row in self.owners for rank in row}))

    def shards(self, table: str) -> tuple[Shard, ...]:
        """The rectangles, row block by row block."""
        rectangles = []
        for (r0, r1), owners in zip(pairwise(self.row_cuts), self.owners, strict=True):
            for (c0, c1), rank in zip(pairwise(self.col_cuts), owners, strict=True):
                rectangles.append(Shard(table, range(r0, r1), range(c0, c1), rank))
        return tuple(rectangles)

    def row_block(self, row: int) -> int:
        """Index of the row block that holds `row`."""
        return bisect_right(self.row_cuts, row) - 1


@dataclass(frozen=True)
class Replicated:
    """The whole table on each of `ranks`, which are all ranks that train: data parallel."""

    num_embeddings: int
    embedding_dim: int
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ranks or len(set(self.ranks)) != len(self.ranks):
            raise PlanError(f"a replicated table needs distinct ranks, got {self.ranks}.")

    @property
    def shape(self) -> tuple[int, int]:
        """(num_embeddings, embedding_dim)."""
        return self.num_embeddings, self.embedding_dim

    def shards(self, table: str) -> tuple[Shard, ...]:
        """One whole-table rectangle per rank; they overlap, unlike those of a `TableLayout`."""
        rows, cols = range(self.num_embeddings), range(self.embedding_dim)
        return tuple(Shard(table, rows, cols, rank) for rank in self.ranks)


Layout = TableLayout | Replicated


def even_cuts(size: int, blocks: int, multiple: int = 1) -> tuple[int, ...]:
    """Cut `size` into at most `blocks` near-equal parts whose sizes are multiples of `multiple`.

    The last part may be short of a multiple. Fewer parts result when there is not enough to cut; no
    part is ever empty.

    Raises:
        PlanError: a number is not positive.
    """
    if size < 1 or blocks < 1:
        raise PlanError(f"cannot cut {size} into {blocks} parts of multiples of {multiple}.")
    # The units are spread evenly; the product comes before the division, so that no part differs
    # from another by more than one unit.
    units = -(-size // multiple)
    parts = min(blocks, units)
    return (*(units * i // parts * multiple for i in range(parts)), size)


def weighted_cuts(size: int, weights: Sequence[float], multiple: int = 1) -> tuple[int, ...]:
    """Cuts of `size` into one block per weight, each as large as its share but never empty.

    Args:
        size: a multiple of `multiple`, and at least so many of it as there are weights.
        multiple: sizes of blocks are multiples of it.
    """
    if multiple > 1:
        return tuple(cut * multiple for cut in weighted_cuts(size // multiple, weights))
    total, blocks = sum(weights), len(weights)
    cuts, below = [0], 0.0
    for i, weight in enumerate(weights[:-1], start=1):
        # Cuts follow the sum of the weights so far, so rounding errors do not add up.
        below += weight
        cut = max(round(size * below / total), cuts[-1] + 1)
        cuts.append(min(cut, size - (blocks - i)))  # room for the blocks that follow
    return (*cuts, size)
