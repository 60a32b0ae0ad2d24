"""Entries of a manifest: each file and each table of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rayrec.layout.geometry import Shard
from rayrec.layout.tables import BaseEmbeddingConfig

Json = Mapping[str, Any]
# the column that has the row numbers, in files that do not hold all rows
ROW = "row"


class Column(NamedTuple):
    """A column of a shard file: `width` values of `dtype` per row; 0 means one plain value."""

    name: str
    dtype: str
    width: int


class Checksum(NamedTuple):
    """The first `end` bytes of a file have this crc32."""

    end: int
    crc32: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One shard file: an Arrow IPC file with the rows of one rectangle, or some of them.

    Every record batch holds `batch_rows` rows; the last may hold fewer.

    An increment holds the rows that were touched: `firsts` has the first row number of every record
    batch, and `held` is how many rows it holds. Of a dynamic table, a record batch holds those of
    its rows that are not free, and `live` is how many each of them holds. All three are None in a
    file with all rows.

    `marks` has one entry per record batch, then one for the whole file; batch i spans the bytes
    from mark i-1 (or 0) to mark i. `bytes` and `crc32` repeat the last mark for people.
    """

    path: str
    table: str
    rows: range
    cols: range
    columns: tuple[Column, ...]
    bytes: int
    crc32: int
    batch_rows: int
    marks: tuple[Checksum, ...]
    held: int | None = None
    firsts: tuple[int, ...] | None = None
    live: tuple[int, ...] | None = None

    @property
    def shard(self) -> Shard:
        """The rectangle; its rank is meaningless once it lies in a file."""
        return Shard(self.table, self.rows, self.cols, 0)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.marks[-1].end

    def batch_range(self, index: int) -> range:
        """The table's rows of which record batch `index` holds all, or those that are not free."""
        start = self.rows.start + index * self.batch_rows
        return range(start, min(start + self.batch_rows, self.rows.stop))

    def batch_length(self, index: int) -> int:
        """Return the number of rows that record batch `index` holds."""
        if self.live is not None:
            return self.live[index]
        total = len(self.rows) if self.held is None else self.held
        return min(self.batch_rows, total - index * self.batch_rows)


@dataclass(frozen=True, slots=True)
class DenseEntry:
    """The file of dense parameters and dense optimizer state."""

    path: str
    bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A saved table.

    Attributes:
        data_type: name of a `DataType`.
        blocks: number of blocks of a dynamic table; None of others.
        counter_capacity: candidates that it keeps; None where they are as many as its rows.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    data_type: str
    blocks: int | None = None
    counter_capacity: int | None = None

    @classmethod
    def of(cls, table: BaseEmbeddingConfig) -> TableEntry:
        """Return the entry of a table."""
        rows, width = table.num_embeddings, table.embedding_dim
        blocks = capacity = None
        if table.dynamic is not None:
            blocks, capacity = rows // table.row_multiple, table.dynamic.counter_capacity
        return cls(table.name, rows, width, table.data_type.value, blocks, capacity)


@dataclass(frozen=True, slots=True)
class Parent:
    """The checkpoint that an increment adds to.

    Attributes:
        name: name of its folder, which lies beside that of the increment.
        sha256: hash of the bytes of its manifest.
    """

    name: str
    sha256: str


def tile(files: Sequence[FileEntry], num_rows: int, num_cols: int) -> bool:
    """Return True if the files are the cells of a product grid over the table, each once."""
    cells = {(f.rows.start, f.rows.stop, f.cols.start, f.cols.stop) for f in files}
    rows, cols = sorted({cell[:2] for cell in cells}), sorted({cell[2:] for cell in cells})
    for ranges, size in ((rows, num_rows), (cols, num_cols)):
        if [0, *(stop for _, stop in ranges)] != [*(start for start, _ in ranges), size]:
            return False
    return len(cells) == len(files) == len(rows) * len(cols)
