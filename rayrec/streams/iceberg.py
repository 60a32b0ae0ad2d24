"""`IcebergSource`: the rows that are appended to an Apache Iceberg table, snapshot after snapshot.

The manifests of a snapshot say which files it adds; the reader of `pyiceberg` reads them, in the
order of their paths, a file at a time. Compaction changes no rows and is passed over. A snapshot
that takes rows away ends the run, since rows that were trained on cannot be taken back. Branches
other than main, and files of deletes, are left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import pyarrow as pa

from rayrec.errors import InputError
from rayrec.storage import one_line
from rayrec.streams.source import Cursor, SourceLag, StreamRows, StreamSource, library

DATA = 0  # the content of files of rows, in manifests
LOST = "Begin a new run with an after_snapshot whose later snapshots are all there."


class _Begun(NamedTuple):
    """A snapshot that is being read: the table when it was opened, and the files that it adds."""

    table: Any
    snapshot: Any
    files: list[Any]


class IcebergSource(StreamSource):
    """Iceberg table that is appended to.

    A cursor has a snapshot with its number in sequence, the rows of it that are done, whether these
    are all, and the table's id. Nothing is written to the table or to its catalog.

    Args:
        table: namespace and name of the table, with dots between them.
        catalog: name of the catalog in pyiceberg's configuration; None takes its default.
        properties: properties of the catalog, beside those of the configuration.
        after_snapshot: a run that begins reads what is appended behind this snapshot; None reads
            the whole history.
    Raises:
        ConfigError: pyiceberg is not installed.
    """

    def __init__(
        self,
        table: str,
        catalog: str | None = None,
        properties: Mapping[str, str] | None = None,
        after_snapshot: int | None = None,
    ) -> None:
        library("pyiceberg.io.pyarrow", "iceberg")
        self.name, self.table = f"Iceberg table {table}", table
        self._catalog_name, self._after = catalog, after_snapshot
        # a SQL catalog would make its tables where there are none
        self._properties = {"init_catalog_tables": "false", **(properties or {})}
        self._catalog: Any = None
        self._begun: _Begun | None = None
        self._ahead: tuple[Any, list[Any]] = (None, [])
        self._held: tuple[int, str, pa.Table] | None = None  # the rows of a file of a snapshot

    def start(self) -> Cursor:
        """Return the cursor behind the snapshot that a new run begins after."""
        return {"snapshot": self._after, "sequence": None, "row": 0, "done": True, "table": ""}

    def read(self, cursor: Cursor, most: int) -> StreamRows | None:
        """Return rows of one snapshot, or none and a cursor behind what changes no rows."""
        begun = self._begun
        if begun and not cursor["done"] and begun.snapshot.snapshot_id == cursor["snapshot"]:
            table, behind = begun.table, [begun.snapshot]
        else:
            table, behind = self._ahead_of(cursor)
        row = 0 if cursor["done"] else int(cursor["row"])
        for snapshot in behind:
            files, first = self._files(table, snapshot), 0
            for file in files:
                if row < first + file.record_count:
                    rows = self._read(table, snapshot, file).slice(row - first, most)
                    start, row = row - first, row + rows.num_rows
                    is_done = row == sum(one.record_count for one in files)
                    place = f"snapshot {snapshot.snapshot_id}, {file.file_path}"
                    past = _cursor(table, snapshot, row, is_done)
                    return StreamRows(rows, past, place, first=start)
                first += file.record_count
        if not behind:
            return None
        # told, so that they may expire
        passed = behind[-1]
        return StreamRows(
            None, _cursor(table, passed, 0, True), f"snapshot {passed.snapshot_id}, which adds none"
        )

    def lag(self, cursor: Cursor) -> SourceLag:
        """Return the rows that the snapshots count behind the cursor, and the age of the first."""
        table, behind = self._behind(cursor)
        counts = [self._count(table, snapshot) for snapshot in behind]
        # a later snapshot may take rows away, which ends the run when it comes to it
        rows = sum(counts) - (0 if cursor["done"] else int(cursor["row"]))
        waiting = [one for one, count in zip(behind, counts, strict=True) if count]
        if not waiting:
            return SourceLag(0, 0.0)
        # clocks of two machines differ, and a clock may jump
        return SourceLag(rows, max(0.0, time.time() - waiting[0].timestamp_ms / 1000))

    def close(self) -> None:
        """Close the connections of the catalog."""
        self._begun = self._held = None
        if self._catalog is not None:
            self._catalog.close()

    @contextmanager
    def _reading(self, what: str, hint: str) -> Iterator[None]:
        """Make an InputError of what fails; catalogs and stores of each kind raise their own."""
        try:
            yield
        except Exception as error:
            raise InputError(f"stream {self.name}: {what}: {one_line(error)}. {hint}") from error

    def _open(self) -> Any:
        """Return the table as it is now."""
        hint = "Make the table first, or give the catalog and its properties as pyiceberg has them."
        with self._reading("it cannot be opened", hint):
            if self._catalog is None:
                from pyiceberg.catalog import load_catalog

                self._catalog = load_catalog(self._catalog_name, **self._properties)
            return self._catalog.load_table(self.table)

    def _ahead_of(self, cursor: Cursor) -> tuple[Any, list[Any]]:
        """Return what `_behind` does, of the table as it was opened last if that has more.

        What has become of the table since then is seen by `lag`, at the end of each window.
        """
        table, behind = self._ahead
        numbers = [one.snapshot_id for one in behind]
        if cursor["done"] and cursor["snapshot"] in numbers[:-1]:
            return table, behind[numbers.index(cursor["snapshot"]) + 1 :]
        self._ahead = self._behind(cursor)
        return self._ahead

    def _behind(self, cursor: Cursor) -> tuple[Any, list[Any]]:
        """Return the table, and its snapshots from the cursor to the end of main, oldest first.

        The cursor's own snapshot is among them if it has more rows; else it need not be there.
        """
        table = self._open()
        if cursor["table"] not in ("", str(table.metadata.table_uuid)):
            raise InputError(
                f"stream {self.name}: this is not the table that the run has read, whose id is "
                f"{cursor['table']}; give the run that table, or begin a new run."
            )
        known = {one.snapshot_id: one for one in table.metadata.snapshots}
        last, is_done, behind = cursor["snapshot"], cursor["done"], list[Any]()
        head = table.current_snapshot()
        at = None if head is None else head.snapshot_id
        while at in known and at != last:
            behind.append(known[at])
            at = known[at].parent_snapshot_id
        is_there = at == last and (is_done or at in known)
        if behind and last is None:
            is_there = self._is_first(table, behind[-1])
        elif behind and at is None and is_done and cursor["sequence"]:
            # pyiceberg forgets a parent that it expires; format version 1 has no numbers but 0
            is_there = behind[-1].sequence_number == cursor["sequence"] + 1
        if is_there:
            return table, [*([] if is_done else [known[at]]), *reversed(behind)]
        # all that main still has may be later than the cursor's snapshot
        number = cursor["sequence"] or 0
        is_later = behind and 0 < number < behind[-1].sequence_number
        if not behind or (last in known and not is_later):
            raise InputError(
                f"stream {self.name}: snapshot {last}, where the run goes on, is not on main, "
                "which was rolled back or moved; bring main back to it or to one that follows it, "
                "or begin a new run."
            )
        place = "its first snapshot" if last is None else f"snapshot {last}, where the run goes on"
        raise InputError(
            f"stream {self.name}: main does not lead back to {place}, since snapshots were expired "
            "before their rows were read; begin a new run with after_snapshot = "
            f"{behind[-1].snapshot_id}, the oldest that is there."
        )

    def _is_first(self, table: Any, snapshot: Any) -> bool:
        """Return True if no rows of earlier snapshots are in a snapshot."""
        number = snapshot.snapshot_id
        with self._reading(f"the manifests of snapshot {number} cannot be read", LOST):
            manifests = snapshot.manifests(table.io)
        return _operation(snapshot) != "replace" and not any(
            one.added_snapshot_id != number or one.has_existing_files() for one in manifests
        )

    def _files(self, table: Any, snapshot: Any) -> list[Any]:
        """Return the data files that a snapshot adds, in the order of their paths."""
        number = snapshot.snapshot_id
        if self._begun is not None and self._begun.snapshot.snapshot_id == number:
            return self._begun.files
        added, operation = list[Any](), _operation(snapshot)
        if operation != "replace":
            with self._reading(f"the manifests of snapshot {number} cannot be read", LOST):
                changes = [
                    entry
                    for manifest in snapshot.manifests(table.io)
                    if manifest.added_snapshot_id == number
                    for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False)
                    if entry.snapshot_id == number  # the others were merged into its manifest
                ]
            added = [one.data_file for one in changes if one.status.name == "ADDED"]
            if len(added) < len(changes) or any(file.content != DATA for file in added):
                raise InputError(
                    f"stream {self.name}: snapshot {number} ({operation}) takes rows away or puts "
                    "them back, which cannot be untrained; append only, or begin a new run with "
                    f"after_snapshot = {number}."
                )
        self._begun = _Begun(table, snapshot, sorted(added, key=lambda one: str(one.file_path)))
        return self._begun.files

    def _count(self, table: Any, snapshot: Any) -> int:
        """Return the number of rows that a snapshot adds, by its summary if that has it."""
        if _operation(snapshot) == "replace":
            return 0
        told = None if snapshot.summary is None else snapshot.summary["added-records"]
        if told is not None:
            return int(told)
        return sum(file.record_count for file in self._files(table, snapshot))

    def _read(self, table: Any, snapshot: Any, file: Any) -> pa.Table:
        """Return the rows of a file: the columns that its snapshot has, by their current names."""
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan
        from pyiceberg.schema import Schema
        from pyiceberg.table import FileScanTask

        place = snapshot.snapshot_id, file.file_path
        if self._held is None or self._held[:2] != place:
            self._held = None  # before another is read
            with self._reading(f"snapshot {snapshot.snapshot_id} cannot be read", LOST):
                now = table.schema()
                own = table.schemas().get(snapshot.schema_id, now)
                fields = [one for one in now.fields if one.field_id in own.field_ids]
                scan = ArrowScan(table.metadata, table.io, Schema(*fields), AlwaysTrue())
                rows = scan.to_table([FileScanTask(file)])
                if rows.num_rows != file.record_count:
                    counts = f"{rows.num_rows} rows in place of {file.record_count}"
                    raise ValueError(f"{file.file_path} has {counts}")
            self._held = *place, rows
        return self._held[2]


def _cursor(table: Any, snapshot: Any, row: int, is_done: bool) -> Cursor:
    return {
        "snapshot": snapshot.snapshot_id,
        "sequence": snapshot.sequence_number,
        "row": row,
        "done": is_done,
        "table": str(table.metadata.table_uuid),
    }


def _operation(snapshot: Any) -> str:
    return "unknown" if snapshot.summary is None else str(snapshot.summary.operation.value)
