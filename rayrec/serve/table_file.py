"""The Arrow files of packed tables: one column of fixed-size binary rows, in one record batch.

A dynamic table has a second file, of the id of every row.

The rows come from a checkpoint, chunk by chunk; those of a sample are kept on the way.

A column is contiguous inside a record batch only, and a lookup wants all rows of a table as one
stretch of bytes. pyarrow writes a batch from memory that holds all of it. So it is given memory
that is reserved and never touched, and where it hands that over to be written, the packed chunks
are written in its place. A table of any size passes through bounded memory, in one pass.
"""

from __future__ import annotations

import hashlib
import io
import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import torch
from torch import Tensor

from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.quant import PackedTable, QuantType, TableRange, pack_rows
from rayrec.quant.tables import chunks
from rayrec.serve.files import StoredFile
from rayrec.serve.live_rows import LiveRows
from rayrec.serve.manifest import StoredTable
from rayrec.serve.sample import SampledRows
from rayrec.serve.stored import stored
from rayrec.storage import Sink

TABLES = "tables"
_MAX_NAME = 100


def table_path(name: str, number: int) -> str:
    """Path of a table's file in an artifact; the name is escaped, so that it stays there."""
    escaped = quote(name, safe="")
    if escaped.startswith("."):  # quote leaves dots, and "." and ".." are not ours to write
        escaped = "%2E" + escaped[1:]
    return f"{TABLES}/{number:04d}-{escaped[:_MAX_NAME]}.arrow"


def ids_path(path: str) -> str:
    """Path of the file of ids beside the file of a dynamic table's rows."""
    return f"{path.removesuffix('.arrow')}-ids.arrow"


def measured(
    reader: LiveRows, tables: Iterable[BaseEmbeddingConfig], types: Mapping[str, QuantType]
) -> list[PackedTable]:
    """Read every row of every table, and return the packing of each table.

    Raises:
        InputError: a row cannot be packed; names table and row.
        CheckpointError: the checkpoint cannot be read, or is damaged.
    """
    packed = []
    for table in tables:
        rows, width, kind = table.num_embeddings, table.embedding_dim, types[table.name]
        span = TableRange(table.name, kind)
        for part in chunks(rows, width):
            span.add(reader.read(table.name, range(part.start, part.stop)), part.start)
        is_dynamic = table.dynamic is not None
        packed.append(PackedTable(table.name, rows, width, kind, span.power(), has_ids=is_dynamic))
    return packed


def write_packed(
    reader: LiveRows, folder: Path, tables: Iterable[PackedTable], wanted: Mapping[str, Tensor]
) -> tuple[list[StoredTable], dict[str, SampledRows]]:
    """Write the files of every table.

    Args:
        wanted: table -> (n,) ids, ascending, whose float32 rows are kept on the way.
    Returns:
        the written tables, and the kept rows by table.
    Raises:
        OSError: the file system refuses.
        CheckpointError: the checkpoint cannot be read, or is damaged.
    """
    written, kept = [], {}
    for number, table in enumerate(tables):
        ids = wanted[table.name]
        values = torch.zeros(len(ids), table.width)
        parts = _packed_parts(reader, table, reader.rows_of(table.name, ids), values)
        path = table_path(table.name, number)
        one = write_table(folder, path, table, parts)
        if table.has_ids:
            one = replace(one, ids=write_ids(folder, ids_path(path), reader.keys[table.name]))
        written.append(one)
        kept[table.name] = SampledRows(ids, values)
    return written, kept


def _packed_parts(
    reader: LiveRows, table: PackedTable, wanted: Tensor, values: Tensor
) -> Iterator[Tensor]:
    """Yield the packed chunks of a table, and copy the wanted rows among them to `values`."""
    for part in chunks(table.rows, table.width):
        rows = reader.read(table.name, range(part.start, part.stop))
        (here,) = ((wanted >= part.start) & (wanted < part.stop)).nonzero(as_tuple=True)
        values[here] = rows[wanted[here] - part.start]
        yield pack_rows(rows, table.kind, table.power)


def write_table(
    folder: Path, path: str, table: PackedTable, parts: Iterable[Tensor]
) -> StoredTable:
    """Write the file of one table.

    Args:
        parts: (N, row_bytes) uint8 each; together all rows of the table.
    Raises:
        OSError: the file system refuses.
    """
    kind = pa.binary(table.row_bytes)
    about = {"table": table.name, "type": table.kind.name, "width": table.width}
    about["power"] = table.power
    said = {f"rayrec.{key}": str(value) for key, value in about.items()}
    schema = pa.schema([pa.field("row", kind, nullable=False)], metadata=said)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    untouched = pa.py_buffer(mmap.mmap(-1, table.num_bytes, flags=flags, prot=mmap.PROT_READ))
    rows = pa.FixedSizeBinaryArray.from_buffers(kind, table.rows, [None, untouched])
    with open(folder / path, "wb") as file:
        sink = _Sink(file, untouched, parts)
        with pa.PythonFile(sink, mode="w") as stream, pa.ipc.new_file(stream, schema) as writer:
            writer.write_batch(pa.record_batch([rows], schema=schema))
    assert sink.body is not None, "pyarrow has written the rows as one buffer"
    whole = StoredFile(path, sink.num_bytes, sink.hash.hexdigest())
    sizes = table.name, table.rows, table.width, table.kind, table.power
    return StoredTable(*sizes, sink.body, whole)


def write_ids(folder: Path, path: str, keys: Tensor) -> StoredFile:
    """Write (R,) int64 keys of all rows, -1 of rows without an id.

    Raises:
        OSError: the file system refuses.
    """
    schema = pa.schema([pa.field("key", pa.int64(), nullable=False)])
    buffer = io.BytesIO()
    with pa.ipc.new_file(buffer, schema) as writer:
        writer.write_batch(pa.record_batch([pa.array(keys.numpy())], schema=schema))
    return stored(folder, path, buffer.getbuffer())


class _Sink(Sink):
    """A file object that writes parts where it is given the untouched memory.

    Attributes:
        body: byte at which the rows begin, once they are written.
    """

    def __init__(self, file: Any, untouched: pa.Buffer, parts: Iterable[Tensor]) -> None:
        super().__init__()
        self._file, self._untouched, self._parts = file, untouched, parts
        self.hash = hashlib.sha256()
        self.body: int | None = None

    def write(self, data: bytes | pa.Buffer) -> int:
        """Write all of `data`, or the parts in its place."""
        view = memoryview(data)
        is_body = isinstance(data, pa.Buffer) and data.address == self._untouched.address
        if not is_body:
            self._put(view)
            return view.nbytes
        self.body = self.num_bytes
        for part in self._parts:
            self._put(part.contiguous().view(-1).numpy().data)
        assert self.num_bytes - self.body == view.nbytes, "the parts are all rows of the table"
        return view.nbytes

    def _put(self, view: memoryview) -> None:
        self._file.write(view)
        self.hash.update(view)
        self.num_bytes += view.nbytes
