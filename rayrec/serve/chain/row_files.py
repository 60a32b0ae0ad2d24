"""The packed rows of a delta: Arrow files with the columns `row` and `packed`.

Those of a dynamic table have a column `key`, too: the id that has the row now, or `NO_KEY`. So a
row that was taken back leaves the servers with its id.

A reader takes the bytes of a whole file, compares their sha256, and looks at those bytes only. So a
file that changes while it is read is found, too.

    # U rows of a file
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rayrec.errors import ArtifactError
from rayrec.quant import PackedTable, pack_rows
from rayrec.serve.chain.publication import ChangedTable
from rayrec.serve.files import StoredFile
from rayrec.serve.stored import numbers, read_columns, stored

_CHUNK_ROWS = 1 << 16  # rows of a record batch


class ChangedRows(NamedTuple):
    """Rows of one table.

    Attributes:
        number: of the table in the artifact.
        rows: (U,) int64.
        packed: (U, row bytes) uint8.
        keys: (U,) int64 ids that have the rows, of a dynamic table; else None.
    """

    number: int
    rows: Tensor
    packed: Tensor
    keys: Tensor | None


def write_rows(
    folder: Path,
    path: str,
    table: PackedTable,
    rows: Tensor,
    values: Tensor,
    keys: Tensor | None = None,
) -> StoredFile:
    """Pack rows and write them.

    Args:
        path: path of the file in the folder.
        table: name and packing of the table.
        rows: (U,) int64 row numbers of the table, ascending.
        values: (U, width) of any float type.
        keys: (U,) int64 ids that have the rows, of a dynamic table.
    Raises:
        OSError: the file system refuses.
    """
    columns = _columns(table)
    kind = columns["packed"]
    fields = [pa.field(name, of, nullable=False) for name, of in columns.items()]
    schema = pa.schema(fields, metadata={"rayrec.table": table.name})
    buffer = io.BytesIO()
    with pa.ipc.new_file(buffer, schema) as writer:
        for start in range(0, len(rows), _CHUNK_ROWS):
            part = slice(start, start + _CHUNK_ROWS)
            packed = pack_rows(values[part], table.kind, table.power)
            body = pa.py_buffer(packed.numpy())
            column = pa.FixedSizeBinaryArray.from_buffers(kind, len(packed), [None, body])
            batch = [pa.array(rows[part].numpy()), column]
            if keys is not None:
                batch.append(pa.array(keys[part].numpy()))
            writer.write_batch(pa.record_batch(batch, schema=schema))
    return stored(folder, path, buffer.getbuffer())


def read_rows(
    folder: Path, changed: ChangedTable, table: PackedTable, number: int
) -> Iterator[ChangedRows]:
    """Read the rows of one table of a delta, file by file.

    Args:
        number: number of the table in the artifact.
    Raises:
        ArtifactError: a file is missing or damaged, or holds rows that the table does not have.
    """
    count = 0
    for file in changed.files:
        whole = read_columns(folder, file, _columns(table))
        rows = numbers(whole.column("row"))
        keys = numbers(whole.column("key")) if table.has_ids else None
        packed = _bytes_of(whole.column("packed"), table.row_bytes)
        is_ascending = bool((rows[1:] > rows[:-1]).all())
        if len(rows) and not (is_ascending and int(rows[0]) >= 0 and int(rows[-1]) < table.rows):
            raise ArtifactError(
                f"{folder}/{file.path} holds rows that table {table.name!r} of {table.rows} rows "
                "does not have, or not in order. The publication is of another model."
            )
        count += len(rows)
        yield ChangedRows(number, rows, packed, keys)
    if count != changed.rows:
        raise ArtifactError(
            f"{folder} holds {count} rows of table {table.name!r} and says {changed.rows}."
        )


def _columns(table: PackedTable) -> dict[str, pa.DataType]:
    """Return the columns of a file of rows, with their types."""
    columns = {"row": pa.int64(), "packed": pa.binary(table.row_bytes)}
    return columns | {"key": pa.int64()} if table.has_ids else columns


def _bytes_of(column: pa.ChunkedArray, row_bytes: int) -> Tensor:
    """(U, row_bytes) uint8 of a column of fixed-size binary."""
    parts = [
        np.frombuffer(chunk.buffers()[1], np.uint8)[
            chunk.offset * row_bytes : (chunk.offset + len(chunk)) * row_bytes
        ]
        for chunk in column.chunks
    ]
    flat = np.concatenate(parts) if parts else np.empty(0, np.uint8)
    return torch.from_numpy(flat).view(-1, row_bytes)
