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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pickle import UnpicklingError
from typing import Any, cast

import torch
from pyarrow import fs
from torch import Tensor

from rayrec.checkpoint.manifest import MANIFEST, FileEntry, Json, Manifest
from rayrec.checkpoint.shardfile import check_footer, read_batch
from rayrec.checkpoint.store import Store
from rayrec.errors import CheckpointError, DamagedCheckpointError
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.shards.overlap import OverlapWriter
from rayrec.shards.state import WEIGHT, ShardState, describe

READ_AHEAD = 4  # record batches in flight
_STATE_REMEDY = (
    "Restore with the optimizer that was saved, or the weights alone, without optimizer state "
    "(init_from, --init-from)."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredCheckpoint:
    """What a run needs besides its shards; tensors are on the CPU.

    Attributes:
        dense: name -> dense parameter or buffer.
        dense_optimizer: the dense optimizer's state dict, or None when none was saved.
    """

    manifest: Manifest
    dense: dict[str, Tensor]
    dense_optimizer: dict[str, Any] | None

    @property
    def step(self) -> int:
        """Global steps done."""
        return self.manifest.step

    @property
    def cursor(self) -> Json:
        """Where the data goes on."""
        return self.manifest.cursor

    @property
    def extras(self) -> Json:
        """What the run saved besides."""
        return self.manifest.extras


@dataclass(frozen=True, slots=True)
class _Read:
    """One record batch and the shards it goes to."""

    entry: FileEntry
    batch: int
    targets: tuple[ShardState, ...]


def read_manifest(path: str, *, filesystem: fs.FileSystem | None = None) -> Manifest:
    """The manifest of the checkpoint at `path`.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    store = Store(path, filesystem)
    return Manifest.from_bytes(store.read_all(MANIFEST), store.path)


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
        shards: what this rank wants; written in place. With an empty `optimizer` only the weight is
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
    store = Store(path, filesystem)
    manifest = Manifest.from_bytes(store.read_all(MANIFEST), store.path)
    check_tables(manifest, tables or (), {}, store.path)
    reads = _plan_reads(manifest, shards, optimizers or {}, store.path)
    _check_files(store, manifest, {read.entry.path for read in reads})
    dense = _read_dense(store, manifest, verify)
    # all that can be refused has been; from here on live rows are overwritten
    writer = OverlapWriter()
    for read, data in _read_ahead(store, reads, verify):
        for state in read.targets:
            writer.put(read.entry.batch_range(read.batch), read.entry.cols, data, state)
    writer.finish(shards)
    parts = {"dense": dense["model"], "dense_optimizer": dense["optimizer"]}
    return RestoredCheckpoint(manifest=manifest, **parts)


def check_tables(
    manifest: Manifest, tables: Sequence[BaseEmbeddingConfig], optimizers: Json, where: str
) -> None:
    """Check by its manifest alone that a checkpoint is of these tables.

    Args:
        tables: the model's tables.
        optimizers: table name -> {"name": ...}, where optimizer state is wanted; else empty.
        where: the checkpoint's path, for messages.
    Raises:
        CheckpointError: names the first table that was not saved, or was saved with another size or
            optimizer.
    """
    for table in tables:
        saved = manifest.table(table.name)
        if saved is None:
            raise _no_table(manifest, table.name, where)
        theirs = f"{saved.num_embeddings} x {saved.embedding_dim}"
        ours = f"{table.num_embeddings} x {table.embedding_dim}"
        if theirs != ours:
            raise CheckpointError(
                f"table {table.name!r} is {theirs} in {where} and {ours} in the model. Give the "
                "model the saved sizes."
            )
        _check_optimizer(manifest, table.name, optimizers.get(table.name), where)


def check_whole(path: str, manifest: Manifest, *, filesystem: fs.FileSystem | None = None) -> None:
    """Check that every file of a checkpoint exists and has its size; nothing is read.

    Raises:
        DamagedCheckpointError: a file is missing or truncated.
    """
    _check_files(Store(path, filesystem), manifest, set(manifest.paths()))


def _no_table(manifest: Manifest, table: str, where: str) -> CheckpointError:
    names = ", ".join(t.name for t in manifest.tables[:10])
    if len(manifest.tables) > 10:
        names += ", ..."
    return CheckpointError(
        f"{where} has no table {table!r} among its {len(manifest.tables)}: {names}. Was it "
        "renamed or added?"
    )


def _check_optimizer(manifest: Manifest, table: str, wanted: object, where: str) -> None:
    saved = manifest.optimizers.get(table)
    if not isinstance(saved, Mapping) or not isinstance(wanted, Mapping):
        return
    names = saved.get("name"), wanted.get("name")
    if None not in names and names[0] != names[1]:
        raise CheckpointError(
            f"{where}: table {table!r} was trained with {names[0]!r}, {names[1]!r} is wanted. "
            f"{_STATE_REMEDY}"
        )


def _plan_reads(
    manifest: Manifest, shards: Sequence[ShardState], optimizers: Json, where: str
) -> list[_Read]:
    """Which record batches to read, file by file, after checking that they fit what is wanted."""
    wanted: dict[str, list[ShardState]] = defaultdict(list)
    for state in shards:
        wanted[state.shard.table].append(state)
    reads, files = [], manifest.files_by_table()
    for table, states in wanted.items():
        saved = manifest.table(table)
        if saved is None:
            raise _no_table(manifest, table, where)
        for state in states:
            shard = state.shard
            if shard.rows.stop > saved.num_embeddings or shard.cols.stop > saved.embedding_dim:
                raise CheckpointError(
                    f"{where}: table {table!r} was saved as {saved.num_embeddings} x "
                    f"{saved.embedding_dim}, and {describe(state.shard)} is wanted. Give the "
                    "model the saved sizes."
                )
        for entry in files[table]:
            near = [state for state in states if entry.shard.intersect(state.shard)]
            for state in near:
                if state.optimizer:
                    _check_optimizer(manifest, table, optimizers.get(table), where)
                _check_columns(entry, state, where)
            for batch in range(len(entry.marks) - 1):
                rows = entry.batch_range(batch)
                targets = tuple(s for s in near if _overlap(rows, s.shard.rows))
                if targets:
                    reads.append(_Read(entry, batch, targets))
    return reads


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def _check_columns(entry: FileEntry, state: ShardState, where: str) -> None:
    """Check that a saved file holds every wanted tensor, in a shape and type that convert."""
    saved = {column.name: column for column in entry.columns}
    for name, tensor in state.tensors().items():
        if name not in saved:
            held = ", ".join(column for column in saved if column != WEIGHT) or "none"
            raise CheckpointError(
                f"{where}: table {entry.table!r} has no optimizer state {name!r}; it was saved "
                f"with: {held}. {_STATE_REMEDY}"
            )
        if (saved[name].width > 0) != (tensor.dim() == 2):
            kinds = "one value per row (row-wise)", "one value per element"
            raise CheckpointError(
                f"{where}: optimizer state {name!r} of table {entry.table!r} was saved with "
                f"{kinds[saved[name].width > 0]}, wanted is {kinds[tensor.dim() == 2]}: another "
                f"optimizer. {_STATE_REMEDY}"
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != saved[name].dtype and not ("float" in dtype and "float" in saved[name].dtype):
            raise CheckpointError(
                f"{where}: {name!r} of table {entry.table!r} was saved as {saved[name].dtype}, "
                f"wanted is {dtype}."
            )


def _check_files(store: Store, manifest: Manifest, paths: set[str]) -> None:
    """Missing and truncated files, found by one listing before anything is read."""
    sizes = manifest.paths()
    wanted = {path: sizes[path] for path in sizes if path in paths or path == manifest.dense.path}
    on_disk = store.sizes(list(wanted))
    for path, size in wanted.items():
        if path not in on_disk:
            raise DamagedCheckpointError(
                f"{store.path} has no file {path}, which its manifest names. Restore an earlier "
                "checkpoint."
            )
        if on_disk[path] != size:
            raise DamagedCheckpointError(
                f"{store.path}/{path} has {on_disk[path]} bytes, not {size}: it is truncated. "
                "Restore an earlier one."
            )


def _read_dense(store: Store, manifest: Manifest, verify: bool) -> dict[str, Any]:
    data = store.read_all(manifest.dense.path)
    if verify and zlib.crc32(data) != manifest.dense.crc32:
        raise DamagedCheckpointError(
            f"{store.path}/{manifest.dense.path} is damaged: its crc32 is not the manifest's. "
            "Restore an earlier one."
        )
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return cast("dict[str, Any]", content)
    except (RuntimeError, UnpicklingError, EOFError, ValueError) as error:
        raise DamagedCheckpointError(
            f"{store.path}/{manifest.dense.path} cannot be loaded: {error}"
        ) from error


def _read_ahead(
    store: Store, reads: Sequence[_Read], verify: bool
) -> Iterator[tuple[_Read, dict[str, Tensor]]]:
    """Give the batches in the order of `reads`, with a few of them in flight.

    A file closes when its last read drops the `Source`.
    """
    pending: deque[tuple[_Read, Future[dict[str, Tensor]]]] = deque()
    with ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="restore") as pool:
        path, source = "", None
        for read in reads:
            if source is None or path != read.entry.path:
                path, source = read.entry.path, store.open(read.entry.path)
                if verify:
                    check_footer(source, read.entry, store.path)
            task = partial(read_batch, source, read.entry, read.batch)
            pending.append((read, pool.submit(task, verify=verify, where=store.path)))
            # one batch is copied into the shards while the others are read
            if len(pending) == READ_AHEAD:
                done, future = pending.popleft()
                yield done, future.result()
        for done, future in pending:
            yield done, future.result()
