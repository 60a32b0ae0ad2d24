"""Save: every rank writes its shards, rank 0 the dense part, and the manifest comes last.

A rank that fails says so through the same `gather`, so that nobody waits for it and all raise the
same error. What it costs: three small gathers, one pass over the shards, and at most a few record
batches of extra memory. The tensors are read while this runs, so training must stand still; a crash
at any byte leaves a directory without a manifest, which is no checkpoint, and earlier ones
untouched.
"""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
from pyarrow import fs
from torch import Tensor

from rayrec.checkpoint.entries import DenseEntry, FileEntry, Parent, TableEntry
from rayrec.checkpoint.manifest import Json, Manifest
from rayrec.checkpoint.shardfile import BATCH_BYTES, write_shard
from rayrec.checkpoint.store import DENSE, Store
from rayrec.errors import CheckpointError, RayrecError, SaveError
from rayrec.layout.geometry import Replicated, Shard
from rayrec.layout.plan import ShardingPlan
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.modules.names import DTYPES
from rayrec.shards.copies import TouchedState
from rayrec.shards.state import Gather, ShardState, describe

# files that one rank writes at a time; an object store's stream alone does not fill a network card
WRITERS = 4
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # room helps
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    """Result of one rank's part of a save, for the others: a value or an error."""

    value: T | None
    error: str = ""
    mistake: bool = False  # the error is rayrec's own: what was asked for cannot be saved


@dataclass(frozen=True, slots=True)
class _Written:
    """The files of one rank."""

    step: int
    files: tuple[FileEntry, ...]
    dense: DenseEntry | None


def save_checkpoint(
    path: str,
    *,
    shards: Sequence[ShardState | TouchedState],
    tables: Sequence[BaseEmbeddingConfig],
    plan: ShardingPlan,
    rank: int,
    world_size: int,
    gather: Gather,
    dense: Mapping[str, Tensor],
    step: int,
    dense_optimizer: Mapping[str, Any] | None = None,
    cursor: Json | None = None,
    optimizers: Json | None = None,
    extras: Json | None = None,
    filesystem: fs.FileSystem | None = None,
    batch_bytes: int = BATCH_BYTES,
    parent: Parent | None = None,
    random: Sequence[Mapping[str, Any]] = (),
    given_up: Callable[[], bool] = lambda: False,
    check: Callable[[], None] = lambda: None,
) -> Manifest:
    """Write a checkpoint; all ranks call it together.

    Args:
        path: a new directory, or the rest of an unfinished save, that every rank's host sees.
        shards: this rank's shards under `plan`; the lowest rank writes replicated tables.
        gather: called three times, whatever fails.
        dense, dense_optimizer: dense parameters, buffers and optimizer state; rank 0's are written.
        step: global steps done, the same on every rank.
        cursor, extras: place in the data to go on from, and anything else, as JSON.
        optimizers: table name -> {"name": ...}, which a restore compares.
        batch_bytes: bound on one record batch, the least that a restore reads of a file.
        parent: makes it an increment on a checkpoint in the folder beside it, saved under the same
            plan; `shards` are then `TouchedState`, the rows that were touched since.
        random: per rank, the state of its random generators as tensors, numbers, lists and dicts;
            rank 0's are written.
        given_up: asked again and again; once it says yes, this rank fails with SaveError.
        check: called on rank 0 before the first file and before the manifest; its error is raised.
    Raises:
        CheckpointError: on every rank, when what was asked for cannot be saved.
        SaveError: on every rank, when the storage refused. No checkpoint exists then.
    """
    store = Store(path, filesystem, given_up)

    # 1. nothing is written unless every rank's shards are those of the plan
    def prepare() -> None:
        plan.check(tables, world_size)
        _check_shards(shards, tables, plan, rank, parent)
        if rank == 0:
            check()
            store.prepare()

    # 2. all files but the manifest
    def write() -> _Written:
        files = _write_shards(store, shards, plan, rank, batch_bytes)
        return _Written(step, files, _write_dense(store, dense, dense_optimizer, random, rank))

    agree(f"save to {path}: preparing", prepare, gather)
    written = agree(f"save to {path}: writing", write, gather)

    # 3. the manifest, which makes the directory a checkpoint once all files are there
    def publish() -> Manifest:
        free = {"cursor": cursor or {}, "optimizers": optimizers or {}, "extras": extras or {}}
        manifest = _manifest(written, tables, plan, free, parent)
        text = manifest.to_bytes()
        if rank == 0:
            _check_visible(store, manifest)
            check()
            store.publish(text)
        return manifest

    return agree(f"save to {path}: publishing", publish, gather, share=False)[0]


def watch_save(path: str, gather: Gather) -> None:
    """Take part in a save whose files other ranks write, as replicas do; see `save_checkpoint`.

    Args:
        gather: collective of all ranks; those that write come first.
    Raises:
        CheckpointError, SaveError: as on the ranks that write.
    """
    for what in ("preparing", "writing", "publishing"):
        agree(f"save to {path}: {what}", lambda: None, gather)


def agree(what: str, action: Callable[[], T], gather: Gather, *, share: bool = True) -> list[T]:
    """Run `action` on every rank; return all results, or raise the same error everywhere.

    With `share=False` only this rank's own result is returned.
    """
    cause: Exception | None = None
    value: T | None = None
    try:
        value = action()
        outcome: _Outcome[T] = _Outcome(value if share else None)
    except Exception as error:
        cause = error
        mistake = isinstance(error, RayrecError) and not isinstance(error, SaveError)
        is_full = isinstance(error, OSError) and error.errno in _FULL
        hint = ". Make room; what was whole is whole still." if is_full else ""
        outcome = _Outcome(None, f"{type(error).__name__}: {error}{hint}", mistake)
    # every rank comes here, whatever failed, or the others would wait for it
    outcomes = gather(outcome)
    failed = {rank: one.error for rank, one in enumerate(outcomes) if one.error}
    if failed:
        # All ranks name the same rank, since all see the same outcomes.
        first = min(failed)
        others = f" ({len(failed)} ranks failed: {sorted(failed)})" if len(failed) > 1 else ""
        kind = CheckpointError if outcomes[first].mistake else SaveError
        raise kind(
            f"{what} failed on rank {first} of {len(outcomes)}{others}: {failed[first]}"
        ) from cause
    return cast("list[T]", [one.value for one in outcomes] if share else [value])


def _check_shards(
    shards: Sequence[ShardState | TouchedState],
    tables: Sequence[BaseEmbeddingConfig],
    plan: ShardingPlan,
    rank: int,
    parent: Parent | None,
) -> None:
    for state in shards:
        if isinstance(state, TouchedState) != (parent is not None):
            wants = "ShardState of all rows" if parent is None else "TouchedState of an increment"
            raise CheckpointError(
                f"{describe(state.shard)} of table {state.shard.table!r} on rank {rank} is a "
                f"{type(state).__name__}; this save wants a {wants}."
            )
    # A shard that nobody saved would only be missed at a restore.
    wanted, given = set(plan.shards(rank)), {state.shard for state in shards}
    for shard in sorted(wanted ^ given, key=lambda s: (s.table, s.rows.start, s.cols.start)):
        what = "was given but is not in the plan"
        if shard in wanted:
            what = "is in the plan but was not given"
        raise CheckpointError(
            f"{describe(shard)} of table {shard.table!r} {what} for rank {rank}; save with the "
            "plan that the ranks obey."
        )
    if len(shards) != len(given):
        raise CheckpointError(
            f"rank {rank} gave {len(shards)} shards of which {len(given)} differ; give each once."
        )
    types = {table.name: table.data_type for table in tables}
    for state in shards:
        data_type = types[state.shard.table]
        if state.weight.dtype is not DTYPES[data_type]:
            raise CheckpointError(
                f"table {state.shard.table!r} is {data_type.value} by its config, "
                f"its weight on rank {rank} is {state.weight.dtype}."
            )


def writes(plan: ShardingPlan, shard: Shard, rank: int) -> bool:
    """Return True if a rank writes a shard that it has, so that of replicas one does."""
    layout = plan.tables[shard.table].layout
    # Replicas are equal bit for bit, so one is enough.
    return not isinstance(layout, Replicated) or rank == min(layout.ranks)


def _write_shards(
    store: Store,
    shards: Sequence[ShardState | TouchedState],
    plan: ShardingPlan,
    rank: int,
    batch_bytes: int,
) -> tuple[FileEntry, ...]:
    mine = [state for state in shards if writes(plan, state.shard, rank)]
    with ThreadPoolExecutor(WRITERS, thread_name_prefix="save") as pool:
        return tuple(pool.map(lambda state: write_shard(store, state, batch_bytes), mine))


def _write_dense(
    store: Store,
    dense: Mapping[str, Tensor],
    optimizer: Mapping[str, Any] | None,
    random: Sequence[Mapping[str, Any]],
    rank: int,
) -> DenseEntry | None:
    """Write the dense part on rank 0, when it is sure to load again without unpickling."""
    if rank != 0:
        return None
    # .clone(): a view would take its whole storage along
    model = {name: tensor.detach().to("cpu").clone() for name, tensor in dense.items()}
    buffer = io.BytesIO()
    content = {"model": model, "optimizer": optimizer}
    torch.save({**content, "random": list(random)} if random else content, buffer)
    buffer.seek(0)
    # A checkpoint may come from anywhere, so loading it must not run code.
    foreign = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    if foreign:
        raise CheckpointError(
            f"the dense optimizer's state holds {', '.join(foreign)}, which "
            "torch.load(weights_only=True) refuses; keep tensors, numbers, strings, lists and "
            "dicts in it."
        )
    with store.write(DENSE) as sink:
        sink.write(buffer.getbuffer())
        return DenseEntry(DENSE, sink.num_bytes, sink.crc32)


def _manifest(
    written: Sequence[_Written],
    tables: Sequence[BaseEmbeddingConfig],
    plan: ShardingPlan,
    free: Mapping[str, Json],
    parent: Parent | None,
) -> Manifest:
    steps = [one.step for one in written]
    # Rows of two steps in one checkpoint would be no state that training ever had.
    if len(set(steps)) > 1:
        raise CheckpointError(
            f"ranks are at different steps, by rank: {steps}; save after the same step on all of "
            "them."
        )
    dense = written[0].dense
    assert dense is not None, "rank 0 writes the dense part"
    manifest = Manifest(
        step=steps[0],
        world_size=len(written),
        tables=tuple(TableEntry.of(table) for table in tables),
        files=tuple(entry for one in written for entry in one.files),
        dense=dense,
        plan=json.loads(plan.to_json()),
        parent=parent,
        **free,
    )
    manifest.check("the checkpoint to be written")
    return manifest


def _check_visible(store: Store, manifest: Manifest) -> None:
    """Check that rank 0 sees the others' files: one host's own disk would lose their shards."""
    wanted = manifest.paths()
    visible = store.sizes(list(wanted))
    for path, size in wanted.items():
        if visible.get(path) != size:
            what = f"sees {visible[path]} bytes of it" if path in visible else "does not see it"
            raise CheckpointError(
                f"{path} was written with {size} bytes, but rank 0 {what} under {store.path}. The "
                "path must be shared by all hosts: a network mount, s3:// or gs://."
            )
