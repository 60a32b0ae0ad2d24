"""Read one table of a checkpoint as an Arrow table, for notebooks, serving and other tools.

The files are plain Arrow IPC, so pyarrow alone reads them (docs/checkpoints.md shows how);
`load_table` puts the rectangles together, as a restore does. It holds the whole table in memory:
for one that does not fit, walk `read_manifest(path).files_by_table()`, one file at a time.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch
from pyarrow import fs

from rayrec.checkpoint.chain import Chain, Rectangle
from rayrec.checkpoint.compatibility import check_files, no_table
from rayrec.checkpoint.entries import ROW, FileEntry
from rayrec.checkpoint.paths import open_checkpoint
from rayrec.layout.geometry import Shard
from rayrec.shards.overlap import OverlapWriter
from rayrec.shards.state import WEIGHT, ShardState


def load_table(
    path: str, table: str, *, verify: bool = True, filesystem: fs.FileSystem | None = None
) -> pa.Table:
    """Read a whole table of a checkpoint as an Arrow table.

    Its columns are "row" (int64), "weight" (FixedSizeList of the table's width), and one per
    optimizer state.

    A dynamic table has "id_key" (int64), "id_seen" and "id_hits" (int32) beside these: whose id has
    the row, in which step it was last seen, and how often since it has the row. Where "id_key" is
    `NO_KEY` (-1, of `rayrec.dynamic.columns`) the row belongs to no id and its values mean nothing.
    With an admission threshold above 1 there are "candidate_key", "candidate_seen" and
    "candidate_hits", which say the same of ids that are counted before they get a row; such an id
    lies at a place of its own, which has nothing to do with the row of that number.

    bfloat16 becomes float32, since Arrow has none.

    Row-wise state of several column blocks becomes their mean weighted by width, as in a restore.

    Args:
        path: the checkpoint; local path or URI.
        verify: check the crc32 of every byte that is read.
    Returns:
        one row per row of the table, by its number; a chunk per row block.
    Raises:
        CheckpointError: no checkpoint, or no such table in it.
        DamagedCheckpointError: a file is missing, or its bytes are not those that were written.
    """
    store, manifest = open_checkpoint(path, filesystem)
    chain = Chain.of(store.path, manifest, filesystem)
    saved = manifest.table(table)
    if saved is None:
        raise no_table(manifest, table, path)
    for link in chain.links:
        files = {entry.path for entry in link.manifest.files if entry.table == table}
        check_files(link, files)
    writer, blocks = OverlapWriter(), list[ShardState]()
    for entry in chain.base.files_by_table()[table]:
        if not blocks or blocks[-1].shard.rows != entry.rows:
            blocks.append(_empty(entry, saved.embedding_dim))
        rectangle = Rectangle(chain, entry, verify=verify)
        for batch in range(len(entry.marks) - 1):
            data = rectangle.read(batch)
            writer.put(entry.batch_range(batch), entry.cols, data, blocks[-1])
    writer.finish(blocks)
    return pa.concat_tables(map(_arrow_table, blocks))


def _empty(entry: FileEntry, width: int) -> ShardState:
    """Return memory for all columns of the row block of a file."""
    rows, tensors = len(entry.rows), {}
    for column in (column for column in entry.columns if column.name != ROW):
        dtype = torch.float32 if column.dtype == "bfloat16" else getattr(torch, column.dtype)
        tensors[column.name] = torch.empty((rows, width) if column.width else rows, dtype=dtype)
    shard = Shard(entry.table, entry.rows, range(width), 0)
    return ShardState(shard, tensors.pop(WEIGHT), tensors)


def _arrow_table(block: ShardState) -> pa.Table:
    rows = block.shard.rows
    columns: dict[str, pa.Array] = {"row": pa.array(np.arange(rows.start, rows.stop))}
    for name, tensor in block.tensors().items():
        flat = pa.array(tensor.view(-1).numpy())
        two_d = tensor.dim() == 2
        columns[name] = pa.FixedSizeListArray.from_arrays(flat, tensor.shape[1]) if two_d else flat
    return pa.table(columns)
