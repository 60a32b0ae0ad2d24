"""One shard <-> one Arrow IPC file.

A file has a column "weight" and one per optimizer state: FixedSizeList<float> for (rows, cols), a
plain column for (rows,). Arrow has no bfloat16, so its bits are written as uint16, and the field
says so ("rayrec.dtype" in its metadata). It is written in record batches of about 8 MiB, so that a
shard is never copied whole and a reader takes only the batches it needs. Reading goes by the
manifest's marks: one range per batch, verified and decoded in place, zero-copy from a memory map.
Of a dynamic table only rows that are not free are written (`rayrec.checkpoint.free_rows`).
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping
from urllib.parse import quote

import pyarrow as pa
import torch
from torch import Tensor

from rayrec.checkpoint.entries import ROW, Checksum, Column, FileEntry
from rayrec.checkpoint.free_rows import blank_free, in_use, with_free
from rayrec.checkpoint.store import TABLES, Store
from rayrec.dynamic.columns import NO_KEY
from rayrec.errors import CheckpointError, DamagedCheckpointError
from rayrec.layout.geometry import Shard
from rayrec.shards.copies import TouchedState
from rayrec.shards.state import IDS, ShardState, describe

BATCH_BYTES = 8 << 20
_MAGIC = b"ARROW1\0\0"
_ARROW = {
    torch.float32: pa.float32(),
    torch.float16: pa.float16(),
    torch.bfloat16: pa.uint16(),
    torch.float64: pa.float64(),
    torch.int32: pa.int32(),
    torch.int64: pa.int64(),
}
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _ARROW}
_BY_NAME = {name: dtype for dtype, name in _NAMES.items()}


def shard_path(shard: Shard) -> str:
    """Path of a shard's file; the table's name is escaped, so that it stays in the directory."""
    name = quote(shard.table, safe="")
    if name.startswith("."):  # quote leaves dots, and "." and ".." are not ours to write
        name = "%2E" + name[1:]
    if len(name) > 128:
        name = f"{name[:96]}-{hashlib.sha256(shard.table.encode()).hexdigest()[:24]}"
    return f"{TABLES}/{name}/{describe(shard)}.arrow"


def columns_of(state: ShardState | TouchedState) -> tuple[Column, ...]:
    """The columns that `state` is written as: the weight, then one per optimizer state.

    A column of a (rows, cols) tensor has the width cols; one of a (rows,) tensor has the width 0.

    Raises:
        CheckpointError: a tensor has a type that has no column type.
    """
    columns = []
    for name, tensor in state.tensors().items():
        if tensor.dtype not in _ARROW:
            raise CheckpointError(
                f"{name!r} of table {state.shard.table!r} has dtype {tensor.dtype}; a checkpoint "
                f"holds {', '.join(_BY_NAME)}."
            )
        columns.append(
            Column(name, _NAMES[tensor.dtype], tensor.shape[1] if tensor.dim() == 2 else 0)
        )
    return tuple(columns)


def schema_of(columns: tuple[Column, ...], *, has_free: bool = False) -> pa.Schema:
    """The Arrow schema of `columns`; nothing in it is nullable.

    Args:
        has_free: some rows have no values, so that their lists are empty.
    """
    fields = []
    for column in columns:
        kind = _ARROW[_BY_NAME[column.dtype]]
        if column.width:
            item = pa.field("item", kind, nullable=False)
            kind = pa.list_(item, -1 if has_free else column.width)
        said = {"rayrec.dtype": column.dtype} if column.dtype == "bfloat16" else None
        fields.append(pa.field(column.name, kind, nullable=False, metadata=said))
    return pa.schema(fields)


def write_shard(store: Store, state: ShardState | TouchedState, batch_bytes: int) -> FileEntry:
    """Write one shard's file: all of its rows, those that are not free, or the touched ones.

    Args:
        batch_bytes: bound on a record batch, of which a row is the least.
    Returns:
        its entry in the manifest.
    Raises:
        CheckpointError: a tensor's type cannot be stored.
        OSError: the filesystem refuses.
    Cost: one pass over the shard; at most one batch of it is copied, and only when it lies on a
    device, is strided or has free rows.
    """
    columns, shard = columns_of(state), state.shard
    is_increment = isinstance(state, TouchedState)
    if is_increment or state.ids:
        if ROW in state.optimizer:
            raise CheckpointError(
                f"an optimizer state of table {shard.table!r} is called {ROW!r}, the name of the "
                "row numbers in increments and of dynamic tables; rename it."
            )
        columns = (Column(ROW, "int64", 0), *columns)
    row_bytes = sum(max(1, column.width) * _BY_NAME[column.dtype].itemsize for column in columns)
    batch_rows = max(1, batch_bytes // row_bytes)
    path, has_free = shard_path(shard), bool(state.ids) and not is_increment
    schema = schema_of(columns, has_free=has_free)
    marks, counts = write_batches(store, path, schema, _chunks(state, batch_rows))
    held: int | None = None
    firsts: tuple[int, ...] | None = None
    if isinstance(state, TouchedState):
        held, firsts = state.rows.numel(), tuple(state.rows[::batch_rows].tolist())
    return FileEntry(
        path=path,
        table=shard.table,
        rows=shard.rows,
        cols=shard.cols,
        columns=columns,
        bytes=marks[-1].end,
        crc32=marks[-1].crc32,
        batch_rows=batch_rows,
        marks=marks,
        held=held,
        firsts=firsts,
        live=counts if has_free else None,
    )


def _chunks(state: ShardState | TouchedState, batch_rows: int) -> Iterator[Mapping[str, Tensor]]:
    """Yield the columns of every record batch of a shard."""
    tensors, rows = state.tensors(), len(state.shard.rows)
    if isinstance(state, TouchedState):
        tensors, rows = {ROW: state.rows, **tensors}, state.rows.numel()
    for start in range(0, rows, batch_rows):
        chunk = {name: tensor[start : start + batch_rows] for name, tensor in tensors.items()}
        if not state.ids:
            yield chunk
        elif isinstance(state, TouchedState):
            yield blank_free(chunk)
        else:
            yield in_use(chunk, state.shard.rows.start + start)


def write_batches(
    store: Store, path: str, schema: pa.Schema, chunks: Iterator[Mapping[str, Tensor]]
) -> tuple[tuple[Checksum, ...], tuple[int, ...]]:
    """Write a file of a record batch per chunk.

    Returns:
        where each ends, and how many rows each holds.
    """
    marks, counts = list[Checksum](), list[int]()
    with store.write(path) as sink, pa.PythonFile(sink, mode="w") as file:
        with pa.ipc.new_file(file, schema) as writer:
            for chunk in chunks:
                arrays = [_to_arrow(chunk, field) for field in schema]
                writer.write_batch(pa.record_batch(arrays, schema=schema))
                marks.append(Checksum(sink.num_bytes, sink.crc32))
                counts.append(len(arrays[0]))
        # closing the writer has added the footer
        marks.append(Checksum(sink.num_bytes, sink.crc32))
    return tuple(marks), tuple(counts)


class ShardReader:
    """Reads the record batches of one shard file; safe to use from several threads.

    Args:
        verify: check the crc32 of every byte that is read, and now that of the footer. Restoring
            does not need it, but other tools do, and a file that only rayrec could read is damaged.
    Raises:
        CheckpointError: the storage refuses.
        DamagedCheckpointError: the file is missing, or its footer is not what was written.
    """

    def __init__(self, store: Store, entry: FileEntry, *, verify: bool) -> None:
        self._entry, self._verify, self._where = entry, verify, store.path
        self._source = store.open(entry.path)
        if verify:
            self._marked(len(entry.marks) - 1)

    def read(self, index: int) -> dict[str, Tensor]:
        """Record batch `index` as read-only CPU tensors, by column name.

        Of a dynamic table it has the free rows, too.

        Raises:
            CheckpointError: the storage refuses.
            DamagedCheckpointError: the bytes are not those that were written.
        """
        entry, where = self._entry, self._where
        data = self._marked(index)
        rows = entry.batch_length(index)
        try:
            reader = pa.BufferReader(data)
            if index == 0:  # the file's magic bytes and schema come first
                reader.seek(len(_MAGIC))
                pa.ipc.read_message(reader)
            schema = schema_of(entry.columns, has_free=entry.live is not None)
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(reader), schema)
            if batch.num_rows != rows:
                raise DamagedCheckpointError(
                    f"{where}/{entry.path} has {batch.num_rows} rows in batch {index}, the "
                    f"manifest says {rows}."
                )
            batch.validate()  # that buffers are as long as their arrays say
            parts = zip(entry.columns, batch.columns, strict=True)
            found = {column.name: _to_torch(array, column) for column, array in parts}
            return found if entry.live is None else with_free(found, entry, index, where)
        except (pa.ArrowException, OSError, EOFError) as error:
            raise DamagedCheckpointError(
                f"{where}/{entry.path}: batch {index} cannot be read: {error}. Restore an earlier "
                "checkpoint."
            ) from error

    def _marked(self, index: int) -> pa.Buffer:
        """The bytes between two marks: a record batch, or the footer behind the last one."""
        entry, where = self._entry, self._where
        before, mark = entry.marks[index - 1] if index else Checksum(0, 0), entry.marks[index]
        try:
            data = self._source.read(before.end, mark.end)
        except OSError as error:
            raise CheckpointError(f"{where}/{entry.path} cannot be read: {error}") from error
        # A mark's crc32 is of all bytes up to it. It continues from the crc32 of the mark before,
        # so nothing in front of that mark is read.
        if self._verify and zlib.crc32(data, before.crc32) != mark.crc32:
            is_footer = index == len(entry.marks) - 1
            what = ", in its footer" if is_footer else ": the crc32 is not that of the manifest"
            raise DamagedCheckpointError(
                f"{where}/{entry.path} is damaged between bytes {before.end} and {mark.end}{what}. "
                "Restore an earlier checkpoint."
            )
        return data


def _to_arrow(chunk: Mapping[str, Tensor], field: pa.Field) -> pa.Array:
    values, kind = chunk[field.name], field.type
    offsets = None
    if pa.types.is_list(kind):
        has_id = chunk[IDS] != NO_KEY
        offsets = torch.zeros(len(has_id) + 1, dtype=torch.int32)
        torch.cumsum(has_id * values.shape[1], 0, out=offsets[1:])
        values = values if bool(has_id.all()) else values[has_id]
    # the buffer is the tensor's own memory, unless it lies on a device or is strided
    values = values.detach().to("cpu").contiguous()
    values = values.view(torch.uint16) if values.dtype is torch.bfloat16 else values
    is_plain = not pa.types.is_list(kind) and not pa.types.is_fixed_size_list(kind)
    item = kind if is_plain else kind.value_type
    flat = pa.Array.from_buffers(item, values.numel(), [None, pa.py_buffer(values.numpy())])
    if is_plain:
        return flat
    if offsets is None:
        return pa.FixedSizeListArray.from_arrays(flat, type=kind)
    return pa.ListArray.from_arrays(pa.array(offsets.numpy()), flat, type=kind)


def _to_torch(array: pa.Array, column: Column) -> Tensor:
    # the lists themselves are not looked at: those of a row are all alike, or empty
    flat = array.values if column.width else array
    if column.width and len(flat) % column.width:
        raise pa.ArrowInvalid(f"lists of {column.name!r} are not of {column.width} values")
    dtype = _BY_NAME[column.dtype]
    values: Tensor = torch.from_dlpack(flat) if len(flat) else torch.empty(0, dtype=dtype)
    values = values.view(torch.bfloat16) if column.dtype == "bfloat16" else values
    return values.view(-1, column.width) if column.width else values
