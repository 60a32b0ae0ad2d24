"""The manifest says which rectangle of which table lies in which file.

It is the last file written and the only one whose presence makes a directory a checkpoint. It is
JSON, one line per file, and guards its own text by a crc32. Each file has `marks`: the end of every
record batch and the crc32 of all bytes up to there. The last mark is the size and crc32 of the
whole file, and because crc32 continues from any mark, one batch can be verified without reading the
others: a rank that wants a tenth of a file reads and checks a tenth. A crc finds damage, not
malice.

An increment holds only the rows that were touched since its parent, another checkpoint beside it
(`rayrec.checkpoint.chain`). Its manifest has version 2 and names the parent; that of a checkpoint
that is whole by itself has version 1, as ever, or 3 where files of dynamic tables hold only the
rows that are not free.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import dataclass
from typing import Any

from rayrec.checkpoint.entries import ROW, DenseEntry, FileEntry, Json, Parent, TableEntry, tile
from rayrec.errors import CheckpointError, DamagedCheckpointError
from rayrec.fields.misfit import Misfit
from rayrec.fields.reading import read_record
from rayrec.fields.writing import record_of
from rayrec.layout.plan import ShardingPlan
from rayrec.shards.state import IDS

MANIFEST = "manifest.json"
FORMAT = "rayrec.checkpoint"
WHOLE, INCREMENT, IN_USE = 1, 2, 3  # versions
# fields of a manifest that hold any JSON
_FREE = ("plan", "cursor", "optimizers", "extras")


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Everything that a checkpoint says about itself.

    Attributes:
        step: global steps done.
        world_size: ranks that wrote it.
        parent: what an increment adds to; None where all rows are here.
        plan: the sharding plan as JSON; `sharding_plan()` parses it.
        cursor: place in the data at which a run goes on.
        optimizers: table name -> sparse optimizer, as JSON.
        extras: seeds and whatever else the run wants back.
        tables: the saved tables.
        dense: the dense part.
        files: one entry per rectangle; the rectangles of a table tile it exactly once.
    """

    step: int
    world_size: int
    parent: Parent | None = None
    plan: Json
    cursor: Json
    optimizers: Json
    extras: Json
    tables: tuple[TableEntry, ...]
    dense: DenseEntry
    files: tuple[FileEntry, ...]

    def sharding_plan(self) -> ShardingPlan:
        """The plan that the ranks which wrote it obeyed.

        Raises:
            PlanError: it is of a version that this rayrec does not read.
        """
        return ShardingPlan.from_json(json.dumps(self.plan), source=f"the plan in {MANIFEST}")

    def table(self, name: str) -> TableEntry | None:
        """The entry of table `name`, or None when it was not saved."""
        return next((table for table in self.tables if table.name == name), None)

    def files_by_table(self) -> dict[str, list[FileEntry]]:
        """Table -> its files by first row, then first column; tables in saved order."""
        files: dict[str, list[FileEntry]] = {table.name: [] for table in self.tables}
        for entry in sorted(self.files, key=lambda f: (f.rows.start, f.cols.start)):
            files.setdefault(entry.table, []).append(entry)
        return files

    def paths(self) -> dict[str, int]:
        """Path of every file but the manifest -> its size in bytes."""
        return {**{f.path: f.num_bytes for f in self.files}, self.dense.path: self.dense.bytes}

    def to_bytes(self) -> bytes:
        """The text of manifest.json.

        Raises:
            CheckpointError: plan, cursor, optimizers or extras hold what JSON cannot.
        """
        version = WHOLE if self.parent is None else INCREMENT
        if any(entry.live is not None for entry in self.files):
            version = IN_USE
        body: dict[str, Any] = {"format": FORMAT, "version": version, **record_of(self)}
        for key in _FREE:
            try:
                # as it will be read: JSON makes text of keys, and the crc32 sees those
                body[key] = json.loads(json.dumps(body[key], allow_nan=False))
            except (TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{key} cannot be written as JSON: {error}. Use numbers, strings, lists and "
                    "dicts."
                ) from error
        crc32 = _fingerprint(body)
        entries = ",\n  ".join(json.dumps(entry) for entry in body.pop("files"))
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in body.items()]
        lines += [f'"crc32": {crc32}', f'"files": [\n  {entries}]']
        return ("{" + ",\n ".join(lines) + "}\n").encode()

    @classmethod
    def from_bytes(cls, text: bytes, where: str) -> Manifest:
        """Parse manifest.json.

        Raises:
            CheckpointError: not a manifest, of another version, or its rectangles do not tile the
                tables.
            DamagedCheckpointError: its text is not what was written.
        """
        try:
            body = json.loads(text)
            if body.get("format") != FORMAT:
                raise CheckpointError(
                    f"{where}/{MANIFEST} is no {FORMAT} manifest but says "
                    f"format={body.get('format')!r}. Name a checkpoint that a run has saved."
                )
            if body["version"] not in (WHOLE, INCREMENT, IN_USE):
                raise CheckpointError(
                    f"{where} has format version {body['version']}; this rayrec reads versions "
                    f"{WHOLE} to {IN_USE}. Use the rayrec that wrote it."
                )
            crc32 = body.pop("crc32")
            if crc32 != _fingerprint(body):
                raise DamagedCheckpointError(
                    f"{where}/{MANIFEST} is damaged: crc32 {_fingerprint(body)}, it should be "
                    f"{crc32}. Restore an earlier one."
                )
            if (body["version"] == INCREMENT) != ("parent" in body):
                raise ValueError("an increment has a parent, and only an increment")
            del body["format"], body["version"]
            manifest: Manifest = read_record(cls, body)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = str(error) if isinstance(error, Misfit) else f"{error!r}."
            raise DamagedCheckpointError(
                f"{where}/{MANIFEST} cannot be read: {what} Restore an earlier checkpoint."
            ) from error
        manifest.check(where)
        return manifest

    def sha256(self) -> str:
        """Return the hash of the text of manifest.json, by which an increment names its parent."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def check(self, where: str) -> None:
        """Check that paths stay inside the directory and that every table is tiled exactly once.

        Raises:
            CheckpointError: names the path or the table.
        """
        for path in self.paths():
            if path.startswith("/") or ".." in path.split("/"):
                raise CheckpointError(
                    f"{where}/{MANIFEST} names file {path!r}, which lies outside of the checkpoint."
                )
        name = None if self.parent is None else self.parent.name
        if name is not None and (not name or "/" in name or name in (".", "..")):
            raise CheckpointError(f"{where}/{MANIFEST} has a parent {name!r}, which is no folder.")
        kinds = {(entry.held is None, entry.firsts is None) for entry in self.files}
        if kinds - {(name is None, name is None)}:
            raise CheckpointError(
                f"{where}/{MANIFEST} mixes files of an increment with files of all rows; it was "
                "edited or written wrongly. Restore an earlier checkpoint."
            )
        for entry in self.files:
            if entry.live is not None and (name is not None or not _counts_all(entry)):
                raise CheckpointError(
                    f"{where}/{MANIFEST} counts other rows of {entry.path} than its parts have; it "
                    "was edited or written wrongly. Restore an earlier checkpoint."
                )
        by_table = self.files_by_table()
        for table in self.tables:
            files = by_table[table.name]
            if not tile(files, table.num_embeddings, table.embedding_dim):
                raise CheckpointError(
                    f"{where}: the {len(files)} files of table {table.name!r} do not tile its "
                    f"{table.num_embeddings} rows x {table.embedding_dim} columns; the manifest "
                    "was edited or written wrongly. Restore an earlier checkpoint."
                )


def _fingerprint(body: Json) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _counts_all(entry: FileEntry) -> bool:
    """Return True if a file without free rows says of every record batch what it holds."""
    counts, batches = entry.live or (), len(entry.marks) - 1
    if not {ROW, IDS} <= {column.name for column in entry.columns}:
        return False
    return len(counts) == batches == -(-len(entry.rows) // entry.batch_rows) and all(
        0 <= n <= len(entry.batch_range(i)) for i, n in enumerate(counts)
    )
