"""The Arrow file of one packed table: one column of fixed-size binary rows, in one record batch.

A column is contiguous inside a record batch only, and a lookup wants all rows of a table as one
stretch of bytes. pyarrow writes a batch from memory that holds all of it. So it is given memory
that is reserved and never touched, and where it hands that over to be written, the packed chunks
are written in its place. A table of any size passes through bounded memory, in one pass.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
from torch import Tensor

from rayrec.quant import PackedTable
from rayrec.serve.manifest import StoredFile, StoredTable
from rayrec.storage import Sink

TABLES = "tables"
_MAX_NAME = 100


def table_path(name: str, number: int) -> str:
    """Path of a table's file in an artifact; the name is escaped, so that it stays there."""
    escaped = quote(name, safe="")
    if escaped.startswith("."):  # quote leaves dots, and "." and ".." are not ours to write
        escaped = "%2E" + escaped[1:]
    return f"{TABLES}/{number:04d}-{escaped[:_MAX_NAME]}.arrow"


def write_table(
    folder: Path, path: str, table: PackedTable, chunks: Iterable[Tensor]
) -> StoredTable:
    """Write the file of one table.

    Args:
        chunks: (N, row_bytes) uint8 each; together all rows of the table.
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
        sink = _Sink(file, untouched, chunks)
        with pa.PythonFile(sink, mode="w") as stream, pa.ipc.new_file(stream, schema) as writer:
            writer.write_batch(pa.record_batch([rows], schema=schema))
    assert sink.body is not None, "pyarrow has written the rows as one buffer"
    stored = StoredFile(path, sink.num_bytes, sink.hash.hexdigest())
    sizes = table.name, table.rows, table.width, table.kind, table.power
    return StoredTable(*sizes, sink.body, stored)


class _Sink(Sink):
    """A file object that writes chunks where it is given the untouched memory.

    Attributes:
        body: byte at which the rows begin, once they are written.
    """

    def __init__(self, file: Any, untouched: pa.Buffer, chunks: Iterable[Tensor]) -> None:
        super().__init__()
        self._file, self._untouched, self._chunks = file, untouched, chunks
        self.hash = hashlib.sha256()
        self.body: int | None = None

    def write(self, data: bytes | pa.Buffer) -> int:
        """Write all of `data`, or the chunks in its place."""
        view = memoryview(data)
        is_body = isinstance(data, pa.Buffer) and data.address == self._untouched.address
        if not is_body:
            self._put(view)
            return view.nbytes
        self.body = self.num_bytes
        for chunk in self._chunks:
            self._put(chunk.contiguous().view(-1).numpy().data)
        assert self.num_bytes - self.body == view.nbytes, "the chunks are all rows of the table"
        return view.nbytes

    def _put(self, view: memoryview) -> None:
        self._file.write(view)
        self.hash.update(view)
        self.num_bytes += view.nbytes
