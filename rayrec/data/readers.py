"""Open files and their chunks: Parquet row groups and Arrow IPC record batches, only the columns asked for.

A local IPC file is memory-mapped, so an uncompressed batch costs nothing until its rows are read. A Parquet row group is decoded whole,
or in pieces when it has more than `STREAM_ROWS` rows: memory stays bounded, but seeking into it decodes what comes before. IPC *streams*
are refused, because they have no index of their batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

STREAM_ROWS = 262_144


class FileReader(Protocol):
    """An open file; closed by garbage collection."""

    schema: pa.Schema
    chunk_rows: tuple[int, ...]

    def read(self, chunk: int, columns: list[str]) -> pa.Table | pa.RecordBatch:
        """One chunk, whole."""

    def pieces(self, chunk: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """One chunk in consecutive pieces."""


class ParquetReader:
    """A Parquet file; chunks are its row groups."""

    PIECE_ROWS = 65_536

    def __init__(self, filesystem: pafs.FileSystem, path: str) -> None:
        local = isinstance(filesystem, pafs.LocalFileSystem)
        self._file = pq.ParquetFile(path if local else filesystem.open_input_file(path), memory_map=local, pre_buffer=not local)
        self.schema: pa.Schema = self._file.schema_arrow
        metadata = self._file.metadata
        self.chunk_rows = tuple(metadata.row_group(g).num_rows for g in range(metadata.num_row_groups))

    def read(self, chunk: int, columns: list[str]) -> pa.Table:
        return self._file.read_row_group(chunk, columns=columns, use_threads=False)

    def pieces(self, chunk: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        yield from self._file.iter_batches(self.PIECE_ROWS, row_groups=[chunk], columns=columns, use_threads=False)


class ArrowReader:
    """An Arrow IPC (Feather v2) file; chunks are its record batches, views of the file where it is local and uncompressed."""

    def __init__(self, filesystem: pafs.FileSystem, path: str) -> None:
        local = isinstance(filesystem, pafs.LocalFileSystem)
        self._source = pa.memory_map(path) if local else filesystem.open_input_file(path)
        self.schema: pa.Schema = ipc.open_file(self._source).schema
        self._projected: dict[tuple[str, ...], ipc.RecordBatchFileReader] = {}
        self.chunk_rows = self._count_rows()

    def read(self, chunk: int, columns: list[str]) -> pa.RecordBatch:
        key = tuple(columns)
        if key not in self._projected:
            self._projected[key] = self._project(sorted(self.schema.get_field_index(name) for name in columns))
        return self._projected[key].get_batch(chunk)

    def pieces(self, chunk: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        yield self.read(chunk, columns)

    def _project(self, fields: list[int]) -> ipc.RecordBatchFileReader:
        return ipc.open_file(self._source, options=ipc.IpcReadOptions(included_fields=fields, use_threads=False))

    def _count_rows(self) -> tuple[int, ...]:
        """Rows of each record batch. The footer does not say, so one narrow column is read: nothing when mapped and uncompressed."""
        narrow = [i for i, field in enumerate(self.schema) if pa.types.is_primitive(field.type)]
        reader = self._project((narrow or [0])[:1])
        return tuple(reader.get_batch(i).num_rows for i in range(reader.num_record_batches))
