"""Entries of a manifest: each file and each table of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayrec.layout.geometry import Shard

Json = Mapping[str, Any]
# the column of an increment's files that has the row numbers
ROW = "row"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a shard file: `width` values of `dtype` per row; 0 means one plain value."""

    name: str
    dtype: str
    width: int


@dataclass(frozen=True, slots=True)
class Checksum:
    """The first `end` bytes of a file have this crc32."""

    end: int
    crc32: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One shard file: an Arrow IPC file with the rows of one rectangle, or those touched in it.

    Every record batch holds `batch_rows` rows; the last may hold fewer.

    `firsts` has the first row number of every record batch of an increment, and `held` is how many
    rows it holds; in a file with all rows, `firsts` is empty and `held` is None.

    `marks` has one entry per record batch, then one for the whole file; batch i spans the bytes
    from mark i-1 (or 0) to mark i.
    """

    path: str
    table: str
    rows: range
    cols: range
    columns: tuple[Column, ...]
    batch_rows: int
    marks: tuple[Checksum, ...]
    held: int | None = None
    firsts: tuple[int, ...] = ()

    @property
    def shard(self) -> Shard:
        """The rectangle; its rank is meaningless once it lies in a file."""
        return Shard(self.table, self.rows, self.cols, 0)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.marks[-1].end

    def batch_range(self, index: int) -> range:
        """The table's rows that record batch `index` holds."""
        start = self.rows.start + index * self.batch_rows
        return range(start, min(start + self.batch_rows, self.rows.stop))

    def batch_length(self, index: int) -> int:
        """Return the number of rows that record batch `index` holds."""
        total = len(self.rows) if self.held is None else self.held
        return min(self.batch_rows, total - index * self.batch_rows)


@dataclass(frozen=True, slots=True)
class DenseEntry:
    """The file of dense parameters and dense optimizer state."""

    path: str
    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A saved table; `data_type` is the name of a `DataType`."""

    name: str
    num_embeddings: int
    embedding_dim: int
    data_type: str


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
    rows = sorted({(f.rows.start, f.rows.stop) for f in files})
    cols = sorted({(f.cols.start, f.cols.stop) for f in files})
    for ranges, size in ((rows, num_rows), (cols, num_cols)):
        if [0, *(stop for _, stop in ranges)] != [*(start for start, _ in ranges), size]:
            return False
    return len({(f.rows, f.cols) for f in files}) == len(files) == len(rows) * len(cols)


def file_json(entry: FileEntry) -> dict[str, object]:
    increment = {} if entry.held is None else {"held": entry.held, "firsts": list(entry.firsts)}
    return {
        "path": entry.path,
        "table": entry.table,
        "rows": [entry.rows.start, entry.rows.stop],
        "cols": [entry.cols.start, entry.cols.stop],
        "columns": [[column.name, column.dtype, column.width] for column in entry.columns],
        "bytes": entry.num_bytes,
        "crc32": entry.marks[-1].crc32,
        "batch_rows": entry.batch_rows,
        "marks": [[mark.end, mark.crc32] for mark in entry.marks],
        **increment,
    }


def file_from_json(entry: Json) -> FileEntry:
    return FileEntry(
        path=entry["path"],
        table=entry["table"],
        rows=range(*entry["rows"]),
        cols=range(*entry["cols"]),
        columns=tuple(Column(*column) for column in entry["columns"]),
        batch_rows=entry["batch_rows"],
        marks=tuple(Checksum(*mark) for mark in entry["marks"]),
        held=entry.get("held"),
        firsts=tuple(entry.get("firsts", ())),
    )
