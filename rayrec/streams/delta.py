"""`DeltaSource`: the rows that are appended to a Delta Lake table, version after version.

The log of the table says which files a version adds; the reader of `deltalake` reads them, in the
order of their paths. Compaction changes no rows and is passed over. A version that takes rows away
ends the run, since rows that were trained on cannot be taken back.
"""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow import fs

from rayrec.errors import InputError
from rayrec.storage import one_line
from rayrec.streams.source import Cursor, SourceLag, StreamRows, StreamSource, library

_FORMAT = ds.ParquetFileFormat(
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(pre_buffer=True)
)


class _Part(NamedTuple):
    """A row group of a file that a version adds."""

    fragment: Any
    rows: int
    schema: pa.Schema


class _Commit(NamedTuple):
    """What a version adds: files with the values of their partition, and when (seconds since 1970),
    if the log says so; and if it says anew what the columns are.
    """

    files: dict[str, dict[str, str | None]]
    written: float | None
    has_schema: bool


class DeltaSource(StreamSource):
    """Delta Lake table that is appended to.

    A cursor has a version, the rows of it that are done, and the id of the table.

    Args:
        table: folder or URI of the table.
        first_version: a run that begins reads what this version and later ones add.
    Raises:
        ConfigError: deltalake is not installed.
    """

    def __init__(self, table: str, first_version: int = 0) -> None:
        self._library = library("deltalake", "delta")
        self.name, self.table, self._first = f"Delta table {table}", table, first_version
        self._faults = (self._library.exceptions.DeltaError, pa.ArrowException, OSError, ValueError)
        self._files = library("deltalake.fs", "delta").DeltaStorageHandler
        self._table: Any = None  # as it was when it was opened last
        self._schema: tuple[int, pa.Schema] | None = None  # of a version
        self._parts: tuple[int, list[_Part]] | None = None  # of one version
        self._held: tuple[int, int, pa.Table] | None = None  # the rows of one of them

    def start(self) -> Cursor:
        """Return the cursor before the first version."""
        return {"version": self._first, "row": 0, "table": ""}

    def read(self, cursor: Cursor, most: int) -> StreamRows | None:
        """Return rows of one version; see `StreamSource.read`."""
        row = int(cursor["row"])  # of a version that has more, or 0
        table, first_version = self._table, int(cursor["version"])
        # opening costs the reading of a log; `lag` does it at the end of each window
        if table is None or first_version > table.version():
            table = self._newest(cursor)
        for version in range(first_version, table.version() + 1):
            parts = self._added(version)
            first = 0
            for number, part in enumerate(parts):
                if row < first + part.rows:
                    rows = self._read(version, number).slice(row - first, most)
                    path = part.fragment.path
                    before = sum(one.rows for one in parts[:number] if one.fragment.path == path)
                    start, row = before + row - first, row + rows.num_rows
                    is_done = row == sum(one.rows for one in parts)
                    past = (version + 1, 0) if is_done else (version, row)
                    place = f"version {version}, {path}"
                    return StreamRows(rows, self._cursor(table, *past), place, first=start)
                first += part.rows
        if first_version > table.version():
            return None
        # told, so that no look reads their log again
        passed = table.version()
        place = f"version {passed}, which adds none"
        return StreamRows(None, self._cursor(table, passed + 1, 0), place)

    def lag(self, cursor: Cursor) -> SourceLag:
        """Return the rows that the log counts behind the cursor, and the age of the first."""
        table = self._newest(cursor)
        for begun in range(int(cursor["version"]), table.version() + 1):
            commit = self._commit(begun)
            if commit.files:
                break
        else:
            return SourceLag(0, 0.0)
        # a table that is only appended to has grown by what waits
        newest, own = self._counts(table), self._counts(self._open(begun))
        rows = None
        if None not in (*newest.values(), *own.values()):
            new = sum(count for path, count in own.items() if unquote(path) in commit.files)
            grown = sum(newest.values()) - sum(own.values())
            # a later version may take rows away, which ends the run when it comes to it
            rows = max(0, grown + new - int(cursor["row"]))
        # clocks of two machines differ, and a clock may jump
        written = commit.written
        return SourceLag(rows, None if written is None else max(0.0, time.time() - written))

    def _cursor(self, table: Any, version: int, row: int) -> Cursor:
        return {"version": version, "row": row, "table": str(table.metadata().id)}

    def _failed(self, what: str, error: Exception, hint: str) -> InputError:
        return InputError(f"stream {self.name}: {what}: {one_line(error)}. {hint}")

    def _newest(self, cursor: Cursor) -> Any:
        """Return the table as it is now, once it is known to be that of the cursor."""
        table, version = self._open(None), int(cursor["version"])
        if cursor["table"] not in ("", str(table.metadata().id)) or version > table.version() + 1:
            raise InputError(
                f"stream {self.name}: the run goes on at version {version}, and this table, whose "
                f"newest version is {table.version()}, is not the one it has read; give a new run "
                "the table, or a first_version that is there."
            )
        self._table = table
        return table

    def _open(self, version: int | None) -> Any:
        try:
            return self._library.DeltaTable(self.table, version=version)
        except self._faults as error:
            which = "it" if version is None else f"version {version}"
            hint = "Make the table first, or begin a new run at a first_version that is there."
            raise self._failed(f"{which} cannot be opened", error, hint) from error

    def _counts(self, table: Any) -> dict[str, Any]:
        actions = pa.table(table.get_add_actions())
        names = actions["path"].to_pylist()
        return dict(zip(names, actions["num_records"].to_pylist(), strict=True))

    def _commit(self, version: int) -> _Commit:
        """Return what a version adds, by the log: `history()` counts back and can be off by one."""
        try:
            files = fs.PyFileSystem(self._files(self.table))
            with files.open_input_file(f"_delta_log/{version:020d}.json") as file:
                actions = [json.loads(line) for line in file.read().splitlines() if line.strip()]
        except self._faults as error:
            hint = "If the log was cleaned, begin a new run at a first_version that is there."
            raise self._failed(f"the log of version {version} is lost", error, hint) from error
        info: dict[str, Any] = {}
        for action in actions:
            info.update(action.get("commitInfo", {}))
        operation = info.get("operation")
        adds = [one["add"] for one in actions if one.get("add", {}).get("dataChange", False)]
        removes = any(one.get("remove", {}).get("dataChange", False) for one in actions)
        if removes or operation == "RESTORE" or any(one.get("deletionVector") for one in adds):
            raise InputError(
                f"stream {self.name}: version {version} ({operation}) takes rows away or puts them "
                "back, which cannot be untrained; append only, or begin a new run with "
                f"first_version = {version + 1}."
            )
        stamp = info.get("timestamp")
        written = None if stamp is None else stamp / 1000
        files = {unquote(one["path"]): one.get("partitionValues") or {} for one in adds}
        has_schema = any("metaData" in one or "protocol" in one for one in actions)
        return _Commit(files, written, has_schema)

    def _added(self, version: int) -> list[_Part]:
        """Return the row groups that a version adds; they are held, since many reads end in one."""
        if self._parts is not None and self._parts[0] == version:
            return self._parts[1]
        commit, parts = self._commit(version), list[_Part]()
        if self._schema is None or self._schema[0] != version - 1 or commit.has_schema:
            self._schema = version, self._schema_of(version)
        schema = self._schema[1]
        self._schema = version, schema
        hint = "If it was vacuumed, begin a new run at a later first_version."
        try:
            for path in sorted(commit.files):
                if "://" in path or path.startswith("/"):
                    raise ValueError(f"file {path} lies outside of the table")
                file = _FORMAT.make_fragment(
                    path,
                    filesystem=fs.PyFileSystem(self._files(self.table)),
                    partition_expression=_expression(commit.files[path], schema),
                )
                for group in file.split_by_row_group():
                    parts.append(_Part(group, group.row_groups[0].num_rows, schema))
        except self._faults as error:
            raise self._failed(f"version {version} cannot be read", error, hint) from error
        self._parts = version, parts
        return parts

    def _schema_of(self, version: int) -> pa.Schema:
        """Return the columns of a version, whose files can be read as they are."""
        table = self._open(version)
        mapping = table.metadata().configuration.get("delta.columnMapping.mode", "none")
        features = {*(table.protocol().reader_features or ())} & {
            "columnMapping",
            "deletionVectors",
        }
        if mapping != "none" or features:
            what = ", ".join(sorted(features)) or f"columnMapping by {mapping}"
            error = ValueError(f"its files are read by {what}")
            raise self._failed(f"version {version} cannot be read", error, "Read another table.")
        return pa.schema(table.schema().to_arrow())

    def _read(self, version: int, number: int) -> pa.Table:
        """Return the rows of a row group of the version that is held."""
        if self._held is None or self._held[:2] != (version, number):
            self._held = None  # before another is read
            part = self._added(version)[number]
            try:
                # Arrow's threads would take the core of the training beside this one
                rows = part.fragment.to_table(schema=part.schema, use_threads=False)
            except self._faults as error:
                hint = "If it was vacuumed, begin a new run at a later first_version."
                raise self._failed(f"version {version} cannot be read", error, hint) from error
            self._held = version, number, rows
        return self._held[2]


def _expression(values: dict[str, str | None], schema: pa.Schema) -> pc.Expression:
    """Return what the log says of the columns of a partition, which lie in no file."""
    found = pc.scalar(True)
    for name, value in values.items():
        field = pc.field(name)
        if not value:  # an empty text is a null, too, as Delta's protocol says
            found &= field.is_null()
        else:
            kind = schema.field(name).type
            if pa.types.is_timestamp(kind) and kind.tz is not None:
                value = value.removesuffix("Z") + "Z"  # without a zone it is of UTC
            found &= field == pa.scalar(value).cast(kind)
    return found
