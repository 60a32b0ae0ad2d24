"""Contents of a checkpoint from its manifest alone: tables, sizes, optimizers, settings, cursor.

No row is read and no file but the manifest is opened, so this costs one small read, also in an
object store. Whether the files are whole, `check_whole` says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rayrec.checkpoint.entries import ROW, FileEntry
from rayrec.checkpoint.manifest import Manifest
from rayrec.checkpoint.restore import read_manifest
from rayrec.layout.tables import DataType
from rayrec.layout.units import aligned, fit, format_bytes

Json = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTable:
    """A table of a checkpoint.

    Attributes:
        rows, width: shape of its weight.
        data_type: type of its rows: fp32, fp16 or bf16.
        weight_bytes: rows x width in that type.
        file_bytes: bytes of all of its files, with the state of its optimizer.
        files: number of its files.
        kind: name of its sharding kind; "replicated" and so on, as plans name it.
        optimizer: its name and options; None where it was not trained.
        state: names of the optimizer's columns.
        touched: rows that an increment holds; None where all rows are here.
    """

    name: str
    rows: int
    width: int
    data_type: str
    weight_bytes: int
    file_bytes: int
    files: int
    kind: str
    optimizer: Json | None
    state: tuple[str, ...]
    touched: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointReport:
    """Contents of a checkpoint, as its manifest tells them.

    Attributes:
        path: the checkpoint's folder.
        step: global steps done.
        world_size: ranks that wrote it.
        tables: tables in the order of the model.
        dense_bytes: the file of dense parameters and their optimizer.
        num_bytes: all files but the manifest.
        cursor: place in the data at which a run goes on, with what that place depends on.
        settings: further values of the run, such as the dense optimizer and the model's recipe.
        parent: folder of the checkpoint that an increment adds to; None where all rows are here.
    """

    path: str
    step: int
    world_size: int
    tables: tuple[SavedTable, ...]
    dense_bytes: int
    num_bytes: int
    cursor: Json
    settings: Json
    parent: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        return asdict(self)

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def to_text(self) -> str:
        """The report for people: sums, a line for each table, the place, and the settings."""
        rows = sum(table.rows for table in self.tables)
        lines = [
            f"{self.path}: step {self.step:,}, written by {self.world_size} ranks, "
            f"{len(self.tables)} tables of {rows:,} rows, {format_bytes(self.num_bytes)}",
            *self._increment(),
            "",
            *aligned([_HEAD, *(_cells(table) for table in self.tables)]),
            "",
            f"dense part: {format_bytes(self.dense_bytes)}",
        ]
        for title, values in (("data", self.cursor), ("settings", self.settings)):
            told = [f"  {key} = {fit(json.dumps(value), 76)}" for key, value in values.items()]
            lines += [f"{title}:", *(told or ["  none"])]
        return "\n".join(lines)

    def _increment(self) -> list[str]:
        """The line that says what an increment holds; none for a whole checkpoint."""
        if self.parent is None:
            return []
        touched = sum(table.touched or 0 for table in self.tables)
        return [f"an increment on {self.parent}: {touched:,} rows, those touched since"]


def inspect_checkpoint(path: str) -> CheckpointReport:
    """Look at a checkpoint.

    Args:
        path: its folder, or a URI of it, such as runs/a/step-00000012.
    Raises:
        CheckpointError: there is no checkpoint, or its manifest cannot be read.
    Cost: one read of the manifest.
    """
    manifest = read_manifest(path)
    files = manifest.files_by_table()
    tables = [_table(manifest, name, entries) for name, entries in files.items()]
    return CheckpointReport(
        path=str(path),
        step=manifest.step,
        world_size=manifest.world_size,
        tables=tuple(tables),
        dense_bytes=manifest.dense.bytes,
        num_bytes=sum(manifest.paths().values()),
        cursor=manifest.cursor,
        settings=manifest.extras,
        parent=None if manifest.parent is None else manifest.parent.name,
    )


def _table(manifest: Manifest, name: str, files: Sequence[FileEntry]) -> SavedTable:
    entry = manifest.table(name)
    assert entry is not None, "the manifest was checked when it was read"
    placed = manifest.plan.get("tables", {}).get(name, {})
    element = DataType(entry.data_type).num_bytes
    columns = [column.name for column in files[0].columns] if files else []
    state = [name for name in columns if name not in ("weight", ROW)]
    # every column block holds the same rows
    held = [file.held or 0 for file in files if file.cols.start == 0]
    return SavedTable(
        name=name,
        rows=entry.num_embeddings,
        width=entry.embedding_dim,
        data_type=entry.data_type.lower(),
        weight_bytes=entry.num_embeddings * entry.embedding_dim * element,
        file_bytes=sum(file.num_bytes for file in files),
        files=len(files),
        kind=str(placed.get("kind", "")),
        optimizer=manifest.optimizers.get(name),
        state=tuple(state),
        touched=None if manifest.parent is None else sum(held),
    )


_HEAD = ("table", "rows", "width", "type", "weight", "files", "sharded", "optimizer")


def _cells(table: SavedTable) -> tuple[str, ...]:
    options = dict(table.optimizer or {})
    optimizer = str(options.pop("name", "none"))
    told = ", ".join(f"{key}={value}" for key, value in options.items())
    return (
        fit(table.name, 32),
        f"{table.rows:,}",
        str(table.width),
        table.data_type,
        format_bytes(table.weight_bytes),
        f"{table.files} of {format_bytes(table.file_bytes)}",
        table.kind,
        f"{optimizer}({told})" if told else optimizer,
    )
