"""Files that a manifest names, written and read: what is checked is what is kept, and nothing else.

A file is read once. The bytes that were hashed are those that the caller gets, so that whoever
writes to a folder while it is read is found, and whoever writes to it later changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rayrec.errors import ArtifactError
from rayrec.serve.files import StoredFile, open_plain
from rayrec.serve.manifest import StoredTable
from rayrec.storage import one_line

_PIECE = 1 << 20  # stays in the processor's cache between the read, the hash and the write
_AGAIN = "Copy it again, or export the checkpoint again."


def stored(folder: Path, path: str, content: bytes | memoryview | None = None) -> StoredFile:
    """Return the record of a file; one whose content is given is written first.

    Raises:
        OSError: the file system refuses.
    """
    if content is None:
        content = (folder / path).read_bytes()
    else:
        (folder / path).write_bytes(content)
    return StoredFile(path, len(content), hashlib.sha256(content).hexdigest())


def read_stored(folder: Path, file: StoredFile, *, verify: bool = True) -> bytes:
    """Read the bytes of a small file, as they were written.

    Raises:
        ArtifactError: it is missing, truncated or damaged.
    """
    content = bytearray()
    _read(folder, file, lambda piece, place: content.extend(piece), verify)
    return bytes(content)


def read_table(
    folder: Path, table: StoredTable, put: Callable[[memoryview, int], None], *, verify: bool = True
) -> None:
    """Read the rows of a table, as they were written.

    Args:
        put: called with some bytes, which are reused afterwards, and their place among all rows.
        verify: compare the sha256 of the file, after its last byte was put.
    Raises:
        ArtifactError: the file is missing, truncated or damaged.
        OSError: an error that `put` raised.
    """
    end = table.offset + table.packed.num_bytes

    def rows(piece: memoryview, place: int) -> None:
        first, last = max(place, table.offset), min(place + len(piece), end)
        if first < last:
            put(piece[first - place : last - place], first - table.offset)

    _read(folder, table.file, rows, verify)


def read_columns(
    folder: Path, file: StoredFile, columns: Mapping[str, pa.DataType], *, verify: bool = True
) -> pa.Table:
    """Read an Arrow file of these columns, without nulls, as it was written.

    Raises:
        ArtifactError: the file is missing, truncated or damaged, or has other columns.
    """
    content = read_stored(folder, file, verify=verify)
    try:
        whole = pa.ipc.open_file(pa.BufferReader(content)).read_all()
        if [(field.name, field.type) for field in whole.schema] != [*columns.items()]:
            raise ValueError(f"its columns are {' '.join(str(whole.schema).split())}")
        whole.validate(full=True)
        if any(column.null_count for column in whole.columns):
            raise ValueError("it has nulls")
        return whole.combine_chunks()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ArtifactError(
            f"{folder}/{file.path} is no file of {', '.join(columns)}: {error}. {_AGAIN}"
        ) from error


def numbers(column: pa.ChunkedArray) -> Tensor:
    """Return a column of whole numbers as a tensor of its own."""
    return torch.from_numpy(np.array(column.to_numpy(), copy=True))


def read_keys(folder: Path, file: StoredFile, rows: int, *, verify: bool = True) -> Tensor:
    """Read the ids of the rows of a dynamic table, (rows,) int64, as they were written.

    Raises:
        ArtifactError: the file is missing, truncated or damaged, or of another table.
    """
    keys = numbers(read_columns(folder, file, {"key": pa.int64()}, verify=verify).column("key"))
    if len(keys) != rows:
        raise ArtifactError(f"{folder}/{file.path} has {len(keys)} ids for {rows} rows. {_AGAIN}")
    return keys


def _read(
    folder: Path, file: StoredFile, take: Callable[[memoryview, int], object], verify: bool
) -> None:
    path, place, digest = folder / file.path, 0, hashlib.sha256()
    buffer = memoryview(bytearray(min(_PIECE, file.bytes)))
    try:
        stream = open_plain(path)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {one_line(error)}. {_AGAIN}") from None
    with stream:
        while place < file.bytes:
            try:
                count = stream.readinto(buffer[: file.bytes - place])
            except OSError as error:
                raise ArtifactError(f"{path} cannot be read: {one_line(error)}. {_AGAIN}") from None
            if not count:
                raise ArtifactError(
                    f"{path} has {place} bytes, not {file.bytes}: it is truncated. {_AGAIN}"
                )
            piece = buffer[:count]
            if verify:
                digest.update(piece)
            take(piece, place)
            place += count
        if stream.read(1):
            raise ArtifactError(f"{path} is damaged: it has more than {place} bytes. {_AGAIN}")
    if verify and digest.hexdigest() != file.sha256:
        raise ArtifactError(f"{path} is damaged: its sha256 is not the manifest's. {_AGAIN}")
