"""Restore: saved and wanted layouts are two sets of rectangles; copy every intersection.

World size, sharding kinds and cuts may all differ from those that were saved. A rank reads only the
record batches that its shards need and copies them straight into the live tensors; a few batches
are read and verified ahead by threads. All that can be checked without reading rows is checked
before the first row is written. There is no collective: each rank restores alone.

What a row-wise optimizer state becomes when column blocks split or merge is the business of
`rayrec.shards.overlap`.
"""

from __future__ import annotations

import io
import zlib
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pickle import UnpicklingError
from typing import Any, cast

import torch
from pyarrow import fs
from torch import Tensor

from rayrec.checkpoint.chain import Chain, Rectangle
from rayrec.checkpoint.compatibility import (
    check_columns,
    check_files,
    check_optimizer,
    check_tables,
    no_table,
)
from rayrec.checkpoint.entries import FileEntry
from rayrec.checkpoint.manifest import Json, Manifest
from rayrec.checkpoint.paths import open_checkpoint
from rayrec.checkpoint.resized import fill_resized, is_resized
from rayrec.checkpoint.store import Store
from rayrec.dynamic.clock import Instant, clocks_in
from rayrec.errors import CheckpointError, DamagedCheckpointError
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.shards.overlap import OverlapWriter, meet
from rayrec.shards.state import ShardState, describe

READ_AHEAD = 4  # record batches in flight


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredCheckpoint:
    """State of a run besides its shards; tensors are on the CPU.

    Attributes:
        dense: name -> dense parameter or buffer.
        dense_optimizer: the dense optimizer's state dict, or None when none was saved.
        random: per rank that saved, the state of its random generators; empty where none was saved.
        left_out: by dynamic table that has shards here and another size than the saved one, the
            ids of the whole table that have no row any more.
    """

    manifest: Manifest
    dense: dict[str, Tensor]
    dense_optimizer: dict[str, Any] | None
    random: tuple[dict[str, Any], ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Global steps done."""
        return self.manifest.step

    @property
    def cursor(self) -> Json:
        """Place in the data at which the run goes on."""
        return self.manifest.cursor

    @property
    def extras(self) -> Json:
        """Further values that the run saved."""
        return self.manifest.extras


@dataclass(frozen=True, slots=True)
class _Read:
    """One record batch and the shards it goes to."""

    entry: FileEntry
    batch: int
    targets: tuple[ShardState, ...]


def read_manifest(path: str, *, filesystem: fs.FileSystem | None = None) -> Manifest:
    """The manifest of the checkpoint at `path`, which may be RUN@latest or RUN@best, too.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    return open_checkpoint(path, filesystem)[1]


@torch.no_grad()
def restore_checkpoint(
    path: str,
    shards: Sequence[ShardState],
    *,
    verify: bool = True,
    tables: Sequence[BaseEmbeddingConfig] | None = None,
    optimizers: Json | None = None,
    filesystem: fs.FileSystem | None = None,
) -> RestoredCheckpoint:
    """Fill live weights and optimizer state from a checkpoint, whatever plan and world wrote it.

    Args:
        shards: shards of this rank, written in place. With an empty `optimizer` only the weight is
            restored, so that a checkpoint can be evaluated without optimizer state. float32,
            float16, bfloat16 and float64 convert into each other.
        verify: check the crc32 of every byte that is read.
        tables: the model's tables; their sizes are compared with the saved ones. Without it only
            rectangles outside of a saved table are found out.
        optimizers: table name -> {"name": ...}; compared with the saved ones where both are known
            and the shard has state.
    Raises:
        CheckpointError: no checkpoint at `path`; a table or a state is missing; shapes, types or
            optimizers do not fit.
        DamagedCheckpointError: a file is missing or its bytes are damaged. Damaged bytes are found
            after rows have been written: the live tensors then hold a mixture and must be restored
            again, from another checkpoint, before they are used.
    """
    store, manifest = open_checkpoint(path, filesystem)
    check_tables(manifest, tables or (), {}, store.path)
    chain = Chain.of(store.path, manifest, filesystem)
    resized = {
        table.name: table
        for table in tables or ()
        if (saved := manifest.table(table.name)) is not None and is_resized(table, saved)
    }
    reads = _plan_reads(chain, shards, resized, optimizers or {}, store.path)
    rectangles = {read.entry.shard for read in reads}
    rectangles |= {entry.shard for entry in chain.base.files if entry.table in resized}
    for link in chain.links:
        wanted = {entry.path for entry in link.manifest.files if entry.shard in rectangles}
        check_files(link, wanted | {link.manifest.dense.path})
    dense = _read_dense(store, manifest, verify)
    # all that can be refused has been; from here on live rows are overwritten
    writer = OverlapWriter()
    for read, data in _read_ahead(chain, reads, verify):
        for state in read.targets:
            writer.put(read.entry.batch_range(read.batch), read.entry.cols, data, state)
    left_out, clocks = dict[str, int](), clocks_in(manifest.extras)
    for name, table in resized.items():
        own = [one for one in shards if one.shard.table == name]
        if own:
            now = clocks.get(name, Instant())
            left_out[name] = fill_resized(chain, table, own, now, writer, verify=verify)
    writer.finish(shards)
    parts = {"dense": dense["model"], "dense_optimizer": dense["optimizer"]}
    random = tuple(dense.get("random", ()))
    return RestoredCheckpoint(manifest=manifest, random=random, left_out=left_out, **parts)


def _plan_reads(
    chain: Chain,
    shards: Sequence[ShardState],
    resized: Collection[str],
    optimizers: Json,
    where: str,
) -> list[_Read]:
    """List the record batches of the base to read, file by file, after checking that they fit.

    Args:
        resized: tables of which no batch is listed.
    """
    manifest = chain.links[-1].manifest
    wanted: dict[str, list[ShardState]] = defaultdict(list)
    for state in shards:
        wanted[state.shard.table].append(state)
    # file by file, so that each is open once and read forwards
    reads, files = [], chain.base.files_by_table()
    for table, states in wanted.items():
        saved = manifest.table(table)
        if saved is None:
            raise no_table(manifest, table, where)
        for state in states:
            shard = state.shard
            if table in resized:
                continue
            if shard.rows.stop > saved.num_embeddings or shard.cols.stop > saved.embedding_dim:
                raise CheckpointError(
                    f"{where}: table {table!r} was saved as {saved.num_embeddings} x "
                    f"{saved.embedding_dim}, and {describe(state.shard)} is wanted. Give the "
                    "model the saved sizes."
                )
        for entry in files[table]:
            near = [s for s in states if table in resized or entry.shard.intersect(s.shard)]
            for state in near:
                if state.optimizer:
                    check_optimizer(manifest, table, optimizers.get(table), where)
                check_columns(entry, state, where)
            for batch in range(0 if table in resized else len(entry.marks) - 1):
                rows = entry.batch_range(batch)
                targets = tuple(s for s in near if meet(rows, s.shard.rows))
                if targets:
                    reads.append(_Read(entry, batch, targets))
    return reads


def check_dense(path: str, filesystem: fs.FileSystem | None = None) -> None:
    """Check that the dense part of a checkpoint has the bytes that were saved.

    Raises:
        CheckpointError, DamagedCheckpointError: it cannot be read, or is damaged.
    """
    _dense_bytes(*open_checkpoint(path, filesystem), verify=True)


def _dense_bytes(store: Store, manifest: Manifest, verify: bool) -> bytes:
    data = store.read_all(manifest.dense.path)
    if verify and zlib.crc32(data) != manifest.dense.crc32:
        raise DamagedCheckpointError(
            f"{store.path}/{manifest.dense.path} is damaged: its crc32 is not the manifest's. "
            "Restore an earlier one."
        )
    return data


def _read_dense(store: Store, manifest: Manifest, verify: bool) -> dict[str, Any]:
    data = _dense_bytes(store, manifest, verify)
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return cast("dict[str, Any]", content)
    except (RuntimeError, UnpicklingError, EOFError, ValueError) as error:
        raise DamagedCheckpointError(
            f"{store.path}/{manifest.dense.path} cannot be loaded: {error}"
        ) from error


def _read_ahead(
    chain: Chain, reads: Sequence[_Read], verify: bool
) -> Iterator[tuple[_Read, dict[str, Tensor]]]:
    """Yield the batches in the order of `reads`, with a few of them in flight.

    A file closes when its last read drops the `Rectangle`.
    """
    pending: deque[tuple[_Read, Future[dict[str, Tensor]]]] = deque()
    with ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="restore") as pool:
        path, rectangle = "", None
        for read in reads:
            if rectangle is None or path != read.entry.path:
                path, rectangle = read.entry.path, Rectangle(chain, read.entry, verify=verify)
            pending.append((read, pool.submit(rectangle.read, read.batch)))
            # one batch is copied into the shards while the others are read
            if len(pending) == READ_AHEAD:
                done, future = pending.popleft()
                yield done, future.result()
        for done, future in pending:
            yield done, future.result()
