"""A file with the columns of its folders, and of its rows those that `where` takes.

`Selection` is what a data set knows of both. `SelectedReader` stands before a `ParquetReader` or an
`ArrowReader` and looks like one; its chunks are those of the file with fewer rows. The rows of each
chunk are counted when the data set is made, so the files must not change from then on. A chunk is
decoded whole for the rows that it keeps, in pieces where it is large. The rows that are taken may
carry their numbers in the file (`ROW`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayrec.data.filters import check_terms, compile_predicate, mask_of, simplify
from rayrec.data.partitions import Partitions, Value
from rayrec.data.predicate import Predicate, columns_of, terms_of
from rayrec.data.readers import STREAM_ROWS, FileReader

ROW = "rayrec.row"  # name of the column of row numbers, int64


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows of a data set are taken, and the columns that its folders spell."""

    predicate: Predicate
    partitions: Partitions

    def check_folders(self, path: str) -> None:
        """Check that the columns of folders can be compared as the predicate asks.

        Args:
            path: of the data set, for messages.
        Raises:
            InputError: see `check_terms`.
        """
        types = self.partitions.schema
        terms = [term for term in terms_of(self.predicate) if term.column in types.names]
        check_terms(terms, types, f"folders of {path!r}")

    @property
    def filters_rows(self) -> bool:
        """True when columns of the files themselves decide which rows are taken."""
        return not set(columns_of(self.predicate)) <= set(self.partitions.schema.names)

    def check(self, reader: FileReader, folders: Mapping[str, Value], path: str) -> None:
        """Check that the predicate can be asked of a file.

        Args:
            folders: what the folders of the file spell; they count before its own columns.
        Raises:
            InputError: see `check_terms`.
        """
        types = self.partitions.schema
        told = [field for field in types if field.name in folders]
        own = [field for field in reader.schema if field.name not in types.names]
        check_terms(terms_of(self.predicate), pa.schema([*own, *told]), f"file {path!r}")

    def may_take(self, folders: Mapping[str, Value]) -> bool:
        """Return False where what the folders of a file spell leaves all of its rows out."""
        rest = simplify(self.predicate, folders)
        return rest is not False and rest is not None

    def reader(self, reader: FileReader, folders: Mapping[str, Value]) -> FileReader:
        """A file as its chunks are read: itself, or with rows left out and columns added.

        Args:
            folders: what the folders of the file spell.
        """
        rest = simplify(self.predicate, folders)
        # a column that the file itself has is read as it is, whatever the folder says
        added = {name: v for name, v in folders.items() if name not in reader.schema.names}
        # where rows of other files are numbered, those of this file are, too
        if not added and rest is True and not self.filters_rows:
            return reader
        return SelectedReader(reader, added, self.partitions.schema, rest)


class SelectedReader:
    """The rows of a file that a predicate takes, with the columns that its folders spell.

    Args:
        reader: the file.
        folders: the columns of the folders that the file itself has not, with their values.
        types: the types of these.
        predicate: which rows are taken; the columns of folders are worked out in it, and the
            others can be compared as it asks (`check_terms`).
    """

    def __init__(
        self,
        reader: FileReader,
        folders: Mapping[str, Value],
        types: pa.Schema,
        predicate: Predicate,
    ) -> None:
        self._reader, self._folders, self._types = reader, folders, types
        self._asked = columns_of(predicate)
        self._taken: pc.Expression | None = None
        if predicate is not True:
            self._taken = compile_predicate(predicate, reader.schema)
        self.schema: pa.Schema = reader.schema
        for name in folders:
            self.schema = self.schema.append(types.field(name))
        # of the file, before rows are left out
        self.chunk_rows = reader.chunk_rows
        self.metadata: pq.FileMetaData | None = reader.metadata
        self._starts = tuple(accumulate(reader.chunk_rows, initial=0))

    def count(self) -> tuple[int, ...]:
        """The rows of each chunk that are taken.

        Cost: the columns of the predicate are read; nothing where every row is taken.
        """
        if self._taken is None:
            return self.chunk_rows
        counts = []
        for chunk in range(len(self.chunk_rows)):
            pieces = self._reader.pieces(chunk, self._of_file([]))
            counts.append(sum(int(mask_of(piece, self._taken).sum()) for piece in pieces))
        return tuple(counts)

    def read(self, chunk: int, columns: list[str]) -> pa.Table | pa.RecordBatch:
        """The rows of one chunk that are taken.

        Args:
            columns: of the file, of its folders, or `ROW`.
        """
        if self.chunk_rows[chunk] > STREAM_ROWS:
            return pa.Table.from_batches(list(self.pieces(chunk, columns)))
        return self._select(self._reader.read(chunk, self._of_file(columns)), chunk, 0, columns)

    def pieces(self, chunk: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """The rows of one chunk that are taken, in consecutive pieces, some of them empty."""
        first = 0
        for piece in self._reader.pieces(chunk, self._of_file(columns)):
            yield self._select(piece, chunk, first, columns)
            first += piece.num_rows

    def _of_file(self, columns: list[str]) -> list[str]:
        """The columns to read of the file, at least one, which tells the number of rows."""
        wanted = dict.fromkeys([*columns, *self._asked])
        names = [name for name in wanted if name in self._reader.schema.names]
        return names or self._reader.schema.names[:1]

    def _select(
        self, rows: pa.Table | pa.RecordBatch, chunk: int, first: int, columns: list[str]
    ) -> pa.Table | pa.RecordBatch:
        """Of the rows of a chunk from `first` on those that are taken, with the columns wanted."""
        places = None
        if self._taken is not None:
            taken = mask_of(rows, self._taken)
            if not taken.all():
                places = np.flatnonzero(taken)
                rows = rows.filter(pa.array(taken))
        count = rows.num_rows
        added: dict[str, Any] = {}
        for name, value in self._folders.items():
            added[name] = pa.repeat(pa.scalar(value, self._types.field(name).type), count)
        if ROW in columns:
            start = self._starts[chunk] + first
            numbers = np.arange(count, dtype=np.int64) if places is None else places
            added[ROW] = pa.array(numbers + start)
        arrays = [added[name] if name in added else rows.column(name) for name in columns]
        return type(rows).from_arrays(arrays, names=columns)
