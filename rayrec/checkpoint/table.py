"""Read one table of a checkpoint as an Arrow table, for notebooks, serving and other tools.

The files are plain Arrow IPC, so pyarrow alone reads them (docs/checkpoints.md shows how);
`load_table` puts the rectangles together. It holds the whole table in memory: for one that does not
fit, walk `read_manifest(path).files_by_table()`, one file at a time.
"""

from __future__ import annotations

import zlib
from itertools import groupby

import numpy as np
import pyarrow as pa
from pyarrow import fs

from rayrec.checkpoint.chain import Chain
from rayrec.checkpoint.entries import ROW, FileEntry
from rayrec.checkpoint.store import Store
from rayrec.errors import CheckpointError, DamagedCheckpointError


def load_table(
    path: str, table: str, *, verify: bool = True, filesystem: fs.FileSystem | None = None
) -> pa.Table:
    """Read a whole table of a checkpoint as an Arrow table.

    Its columns are "row" (int64), "weight" (FixedSizeList of the table's width), and one per
    optimizer state.

    bfloat16 becomes float32, since Arrow has none.

    Row-wise state of several column blocks becomes their mean weighted by width, as in a restore.

    Args:
        path: the checkpoint; local path or URI.
        verify: check the crc32 of every byte that is read.
    Returns:
        one row per embedding, by row number; a chunk per row block.
    Raises:
        CheckpointError: no checkpoint, or no such table in it.
        DamagedCheckpointError: a file is missing, or its bytes are not those that were written.
    """
    chain = Chain.read(path, filesystem)
    if chain.newest.table(table) is None:
        names = ", ".join(t.name for t in chain.newest.tables)
        raise CheckpointError(f"{path} has no table {table!r}; it has {names}.")
    row_blocks = groupby(chain.base.files_by_table()[table], key=lambda entry: entry.rows.start)
    return pa.concat_tables([_row_block(chain, list(files), verify) for _, files in row_blocks])


def _row_block(chain: Chain, files: list[FileEntry], verify: bool) -> pa.Table:
    """Join the column blocks of one row block."""
    parts = [_rectangle(chain, entry, verify) for entry in files]
    rows = files[0].rows
    columns: dict[str, pa.Array] = {"row": pa.array(np.arange(rows.start, rows.stop))}
    for i, column in enumerate(files[0].columns):
        arrays = [_widened(part.column(i).combine_chunks(), column.dtype) for part in parts]
        if len(arrays) == 1:
            columns[column.name] = arrays[0]
        elif column.width:
            # (rows, columns of each block) side by side
            parts_2d = [array.flatten().to_numpy().reshape(len(array), -1) for array in arrays]
            joined, width = np.concatenate(parts_2d, axis=1), sum(len(e.cols) for e in files)
            columns[column.name] = pa.FixedSizeListArray.from_arrays(joined.reshape(-1), width)
        else:
            # One value per row stands for the mean over the columns of its block, so blocks count
            # by their widths.
            widths = [len(entry.cols) for entry in files]
            mean = np.average([array.to_numpy() for array in arrays], axis=0, weights=widths)
            columns[column.name] = pa.array(mean.astype(arrays[0].to_numpy().dtype))
    schema = pa.schema([pa.field(name, _nullable(array.type)) for name, array in columns.items()])
    return pa.table(list(columns.values()), names=list(columns)).cast(schema)


def _widened(array: pa.Array, dtype: str) -> pa.Array:
    """Bits of bfloat16 as float32, whose upper half they are."""
    if dtype != "bfloat16":
        return array
    wide = pa.types.is_fixed_size_list(array.type)
    bits = (array.flatten() if wide else array).to_numpy().astype(np.uint32) << np.uint32(16)
    values = pa.array(bits.view(np.float32))
    return pa.FixedSizeListArray.from_arrays(values, array.type.list_size) if wide else values


def _rectangle(chain: Chain, entry: FileEntry, verify: bool) -> pa.Table:
    """All rows of one rectangle, with the rows that increments hold in their places."""
    base, *increments = chain.links
    whole = _read(base.store, entry, verify)
    for link in increments:
        touched = _read(link.store, link.file_of(entry), verify)
        places = touched[ROW].to_numpy() - entry.rows.start
        columns = [_replaced(whole[name], touched[name], places) for name in whole.column_names]
        whole = pa.table(columns, schema=whole.schema)
    return whole


def _replaced(old: pa.ChunkedArray, new: pa.ChunkedArray, places: np.ndarray) -> pa.Array:
    """A column in which some places have new values."""
    if not len(places):
        return old.combine_chunks()
    if not pa.types.is_fixed_size_list(old.type):
        values = old.to_numpy().copy()
        values[places] = new.to_numpy()
        return pa.array(values, type=old.type)
    width = old.type.list_size
    values_2d = old.combine_chunks().flatten().to_numpy().reshape(len(old), width).copy()
    values_2d[places] = new.combine_chunks().flatten().to_numpy().reshape(len(new), width)
    return pa.FixedSizeListArray.from_arrays(pa.array(values_2d.reshape(-1)), type=old.type)


def _read(store: Store, entry: FileEntry, verify: bool) -> pa.Table:
    size = store.sizes([entry.path]).get(entry.path)
    if size != entry.num_bytes:  # a mapped file that is too short would end this process
        raise DamagedCheckpointError(
            f"{store.path}/{entry.path} has {size or 0} bytes, not {entry.num_bytes}: it is "
            "truncated or gone. Restore an earlier checkpoint."
        )
    try:
        data = store.open(entry.path).read(0, entry.num_bytes)
        if verify and zlib.crc32(data) != entry.marks[-1].crc32:
            raise DamagedCheckpointError(
                f"{store.path}/{entry.path} is damaged: its crc32 is not the manifest's. Restore "
                "an earlier checkpoint."
            )
        return pa.ipc.open_file(data).read_all()
    except (pa.ArrowException, OSError) as error:
        raise DamagedCheckpointError(
            f"{store.path}/{entry.path} cannot be read: {error}. Restore an earlier checkpoint."
        ) from error


def _nullable(kind: pa.DataType) -> pa.DataType:
    """The type with nullable items, so that blocks read and blocks made here have one type."""
    return pa.list_(kind.value_type, kind.list_size) if pa.types.is_fixed_size_list(kind) else kind
