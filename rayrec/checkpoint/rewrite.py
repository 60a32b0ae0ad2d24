"""A shard's file written anew, with other values in some of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rayrec.checkpoint.entries import ROW, FileEntry
from rayrec.checkpoint.free_rows import in_use
from rayrec.checkpoint.shardfile import ShardReader, schema_of, write_batches
from rayrec.checkpoint.store import Store

Change = Callable[[Tensor, dict[str, Tensor]], None]


def read_numbered(store: Store, entry: FileEntry) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield the row numbers and the columns of each record batch, which may be written to.

    Of a dynamic table they have the free rows, too.

    Raises:
        CheckpointError: the storage refuses.
        DamagedCheckpointError: the bytes are not those that were written.
    """
    reader = ShardReader(store, entry, verify=True)
    for index in range(len(entry.marks) - 1):
        data = {name: tensor.clone() for name, tensor in reader.read(index).items()}
        here = entry.batch_range(index)
        yield (data[ROW] if ROW in data else torch.arange(here.start, here.stop)), data


def rewrite_shard(source: Store, target: Store, entry: FileEntry, change: Change) -> FileEntry:
    """Write a shard's file into another checkpoint.

    Args:
        source: checkpoint that has the file.
        target: checkpoint to write to.
        change: changes the columns of a record batch, which it is given with their row numbers.
    Returns:
        its entry in the manifest.
    Raises:
        CheckpointError, DamagedCheckpointError: the errors of `read_numbered`.
        OSError: the file system refuses.
    """
    has_free = entry.live is not None

    def chunks() -> Iterator[Mapping[str, Tensor]]:
        for rows, data in read_numbered(source, entry):
            change(rows, data)
            yield in_use(data, int(rows[0])) if has_free else data

    schema = schema_of(entry.columns, has_free=has_free)
    marks, counts = write_batches(target, entry.path, schema, chunks())
    return replace(
        entry,
        marks=marks,
        bytes=marks[-1].end,
        crc32=marks[-1].crc32,
        live=counts if has_free else None,
    )
