"""Checks that a checkpoint fits what is wanted of it, made before the first row is read.

Sizes, optimizers and columns are compared by the manifest alone; files by their sizes on disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyarrow import fs

from rayrec.checkpoint.chain import Chain, Link
from rayrec.checkpoint.entries import ROW, FileEntry
from rayrec.checkpoint.manifest import Json, Manifest
from rayrec.checkpoint.resized import is_resized
from rayrec.dynamic.columns import lanes_of
from rayrec.errors import CheckpointError, DamagedCheckpointError
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.shards.state import IDS, WEIGHT, ShardState, is_time

_STATE_REMEDY = (
    "Restore with the optimizer that was saved, or the weights alone, without optimizer state "
    "(init_from, --init-from)."
)


def check_tables(
    manifest: Manifest,
    tables: Sequence[BaseEmbeddingConfig],
    optimizers: Json,
    where: str,
    *,
    may_resize: bool = True,
) -> None:
    """Check by its manifest alone that a checkpoint is of these tables.

    Args:
        optimizers: table name -> {"name": ...}, where optimizer state is wanted; else empty.
        may_resize: a dynamic table may have other rows or blocks than were saved.
    Raises:
        CheckpointError: names the first table that was not saved, or was saved with another size or
            optimizer.
    """
    for table in tables:
        saved = manifest.table(table.name)
        if saved is None:
            raise no_table(manifest, table.name, where)
        theirs = f"{saved.num_embeddings} x {saved.embedding_dim}"
        ours = f"{table.num_embeddings} x {table.embedding_dim}"
        resized = is_resized(table, saved)
        may_differ = may_resize and resized and saved.embedding_dim == table.embedding_dim
        if (resized or theirs != ours) and not may_differ:
            raise CheckpointError(
                f"table {table.name!r} is {theirs} in {where} and {ours} in the model. Give the "
                "model the saved sizes."
            )
        check_optimizer(manifest, table.name, optimizers.get(table.name), where)


def check_whole(path: str, manifest: Manifest, *, filesystem: fs.FileSystem | None = None) -> None:
    """Check that every file of a checkpoint exists and has its size; only manifests are read.

    Of an increment all checkpoints are checked that it adds to.

    Raises:
        DamagedCheckpointError: a file is missing or truncated, or a parent is not what was saved.
    """
    for link in Chain.of(path, manifest, filesystem).links:
        check_files(link, set(link.manifest.paths()))


def no_table(manifest: Manifest, table: str, where: str) -> CheckpointError:
    """Return the error for a checkpoint without a table of the model."""
    names = ", ".join(t.name for t in manifest.tables[:10])
    if len(manifest.tables) > 10:
        names += ", ..."
    return CheckpointError(
        f"{where} has no table {table!r} among its {len(manifest.tables)}: {names}. Was it "
        "renamed or added?"
    )


def check_optimizer(manifest: Manifest, table: str, wanted: object, where: str) -> None:
    """Raise `CheckpointError` if a table was trained by another optimizer than the wanted one."""
    saved = manifest.optimizers.get(table)
    # Nothing is compared where one side does not say its optimizer.
    if not isinstance(saved, Mapping) or not isinstance(wanted, Mapping):
        return
    names = saved.get("name"), wanted.get("name")
    if None not in names and names[0] != names[1]:
        raise CheckpointError(
            f"{where}: table {table!r} was trained with {names[0]!r}, {names[1]!r} is wanted. "
            f"{_STATE_REMEDY}"
        )


def check_columns(entry: FileEntry, state: ShardState, where: str) -> None:
    """Check that a saved file holds every wanted tensor, in a shape and type that convert."""
    saved = {column.name: column for column in entry.columns}
    if IDS in saved and not state.ids:
        raise CheckpointError(
            f"{where}: table {entry.table!r} was saved as one that is dynamic, and the model's is "
            "not dynamic. Give the table the `dynamic` that it had."
        )
    # the ids of a table that was not dynamic are the numbers of its rows
    ids = dict(state.ids) if IDS in saved else {}
    # and where no times were saved, the next one that data tells is that of all ids
    ids = {name: one for name, one in ids.items() if name in saved or not is_time(name)}
    # where a table kept another number of candidates, rows had more of their places, or fewer
    lanes = [lane for lane in lanes_of("candidate", ids) if f"{lane}_key" not in saved]
    if "candidate_key" in saved:
        ids = {name: one for name, one in ids.items() if name.rpartition("_")[0] not in lanes}
    for name, tensor in {WEIGHT: state.weight, **ids, **state.optimizer}.items():
        if name not in saved and name in state.ids:
            raise CheckpointError(
                f"{where}: table {entry.table!r} was saved with admission_threshold=1, without "
                "counts of candidates, and the model's counts them. Give the table the "
                "admission_threshold that it had."
            )
        if name not in saved:
            others = (ROW, WEIGHT, *state.ids)
            held = ", ".join(column for column in saved if column not in others) or "none"
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
        # Floats convert into each other; a counter of another type would mean something else.
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != saved[name].dtype and not ("float" in dtype and "float" in saved[name].dtype):
            raise CheckpointError(
                f"{where}: {name!r} of table {entry.table!r} was saved as {saved[name].dtype}, "
                f"wanted is {dtype}."
            )


def check_files(link: Link, paths: set[str]) -> None:
    """Raise for missing and truncated files, found by one listing before anything is read."""
    store = link.store
    wanted = {path: size for path, size in link.manifest.paths().items() if path in paths}
    on_disk = store.sizes(list(wanted))
    for path, size in wanted.items():
        if path not in on_disk:
            raise store.missing(path)
        if on_disk[path] != size:
            raise DamagedCheckpointError(
                f"{store.path}/{path} has {on_disk[path]} bytes, not {size}: it is truncated. "
                "Restore an earlier one."
            )
