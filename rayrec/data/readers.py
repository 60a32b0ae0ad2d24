"""Open files and their chunks: Parquet row groups and Arrow IPC record batches.

Only the columns that are asked for are read. A local IPC file is memory-mapped, so an uncompressed
batch costs nothing until its rows are read. A Parquet row group is decoded whole, or in pieces when
it has more than `STREAM_ROWS` rows: memory stays bounded, but seeking into it decodes what comes
before. With `threads` the columns of a chunk are decoded by Arrow's threads. IPC *streams* are
refused, because they have no index of their batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

from rayrec.data.column_types import plain_schema, plain_text

STREAM_ROWS = 262_144


class FileReader(Protocol):
    """An open file; closed by garbage collection."""

    schema: pa.Schema
    chunk_rows: tuple[int, ...]
    metadata: pq.FileMetaData | None  # None for a kind of file that keeps no statistics

    def read(self, chunk: int, columns: list[str]) -> pa.Table | pa.RecordBatch:
        """One chunk, whole."""

    def pieces(self, chunk: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """One chunk in consecutive pieces."""


def column_statistics(metadata: pq.FileMetaData, group: int) -> Iterator[tuple[str, Any]]:
    """Names of the columns of a row group and their statistics, None where the file has none."""
    columns = metadata.row_group(group)
    for index in range(columns.num_columns):
        column = columns.column(index)
        # a list's values lie below the column's name
        yield column.path_in_schema.split(".")[0], column.statistics


class ParquetReader:
    """A Parquet file; chunks are its row groups."""

    KIND = "Parquet"
    SUFFIXES = (".parquet", ".pq", ".parq")
    PIECE_ROWS = 65_536

    def __init__(self, filesystem: pafs.FileSystem, path: str, threads: bool) -> None:
        local = isinstance(filesystem, pafs.LocalFileSystem)
        self._threads = threads
        self._file = pq.ParquetFile(
            path if local else filesystem.open_input_file(path),
            memory_map=local,
            pre_buffer=not local,
            # of pages that have one, as those of a stream's windows
            page_checksum_verification=True,
        )
        self.schema = plain_schema(self._file.schema_arrow)
        metadata: pq.FileMetaData = self._file.metadata
        self.metadata: pq.FileMetaData | None = metadata
        self.chunk_rows = tuple(
            metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)
        )

    def read(self, chunk: int, columns: list[str]) -> pa.Table:
        """Return a row group, whole."""
        own = self._file.read_row_group(chunk, columns=columns, use_threads=self._threads)
        return plain_text(own)

    def pieces(self, chunk: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield a row group in pieces, so that it is never decoded as a whole."""
        pieces = self._file.iter_batches(
            self.PIECE_ROWS, row_groups=[chunk], columns=columns, use_threads=self._threads
        )
        yield from map(plain_text, pieces)


class ArrowReader:
    """An Arrow IPC (Feather v2) file, whose chunks are its record batches.

    They are views of the file where it is local and uncompressed.
    """

    KIND = "Arrow IPC"
    SUFFIXES = (".arrow", ".feather", ".ipc")

    def __init__(self, filesystem: pafs.FileSystem, path: str, threads: bool) -> None:
        local = isinstance(filesystem, pafs.LocalFileSystem)
        self._threads = threads
        self._source = pa.memory_map(path) if local else filesystem.open_input_file(path)
        self._whole = ipc.open_file(self._source)
        self.schema = plain_schema(self._whole.schema)
        self._projected: dict[tuple[int, ...], ipc.RecordBatchFileReader] = {}
        # Arrow copies the columns of a projection even out of a mapped file, so there whole batches
        # are read, which costs nothing
        self._mapped = local and self._lies_in_map()
        self.chunk_rows = self._count_rows()
        self.metadata: pq.FileMetaData | None = None

    def read(self, chunk: int, columns: list[str]) -> pa.RecordBatch:
        """Return a record batch, whole."""
        fields = sorted(self.schema.get_field_index(name) for name in columns)
        return plain_text(self._read(chunk, fields))

    def pieces(self, chunk: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield a record batch, which is a piece itself."""
        yield self.read(chunk, columns)

    def _read(self, chunk: int, fields: list[int]) -> pa.RecordBatch:
        if self._mapped:
            return self._whole.get_batch(chunk).select(fields)
        key = tuple(fields)
        if key not in self._projected:
            options = ipc.IpcReadOptions(included_fields=fields, use_threads=self._threads)
            self._projected[key] = ipc.open_file(self._source, options=options)
        return self._projected[key].get_batch(chunk)

    def _lies_in_map(self) -> bool:
        """True when the first batch is a view of the mapped file, as uncompressed ones are."""
        if not self._whole.num_record_batches:
            return True
        self._source.seek(0)
        mapped = self._source.read_buffer()
        addresses = range(mapped.address, mapped.address + mapped.size)
        for column in self._whole.get_batch(0).columns:
            for buffer in column.buffers():
                if buffer is not None and buffer.size and buffer.address not in addresses:
                    return False
        return True

    def _count_rows(self) -> tuple[int, ...]:
        """Rows of each record batch.

        The footer does not say, so one narrow column is read, which costs nothing when mapped.
        """
        narrow = [i for i, field in enumerate(self.schema) if pa.types.is_primitive(field.type)]
        column = (narrow or [0])[:1]
        batches = range(self._whole.num_record_batches)
        return tuple(self._read(i, column).num_rows for i in batches)
