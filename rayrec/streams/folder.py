"""`FolderSource`: Parquet files that are put into a folder, in the order of their names.

A file counts once it is whole: Parquet writes its footer last. Reading waits for a file that still
grows, also if later ones are whole, so that the order is that of the names. Names that start with
'.' or '_' are left out, which is how a producer writes aside before it renames. The cursor has the
names of the newest 1,000 files that were read, so that a file whose name sorts before one of them
is read when it comes, also if no process ran then.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from rayrec.errors import InputError
from rayrec.storage import one_line, resolve
from rayrec.streams.source import Cursor, Refusal, SourceLag, StreamRows, StreamSource

SUFFIX = ".parquet"
MOST_NAMES = 1_000  # of files that were read, in a cursor


class _Seen(NamedTuple):
    """A file that was not whole: its size, and when it was first seen with it (monotonic)."""

    size: int
    since: float


class FolderSource(StreamSource):
    """Growing folder of Parquet files.

    A cursor names the file that was read last, its size and rows, and the rows of it that are done;
    the files that were "read", and the name up to which ("bound") none is read any more.

    Args:
        path: folder or URI; files of its subfolders are not read.
        patience_s: a file that is not whole and has not grown for so long is refused.
    Raises:
        CheckpointError: there is no file system for the URI.
    """

    def __init__(self, path: str, patience_s: float = 30.0) -> None:
        self.name, self._patience_s = f"folder {path}", patience_s
        self._filesystem, self._root = resolve(path)
        self._partial: dict[str, _Seen] = {}
        self._rows: dict[tuple[str, int], int] = {}  # of whole files that wait, for the lag
        self._groups: tuple[tuple[str, int, list[int]], pa.Table] | None = None
        self._passed: set[str] | None = None  # names of the last look

    def start(self) -> Cursor:
        """Return the cursor before the first file."""
        return {"file": "", "size": 0, "rows": 0, "row": 0, "bound": "", "read": []}

    def read(self, cursor: Cursor, most: int) -> StreamRows | None:
        """Return rows of one file; see `StreamSource.read`."""
        files = self._list()
        refused = self._out_of_order(files, cursor)
        if refused:
            return StreamRows(None, cursor, self.name, refused)
        if cursor["row"] < cursor["rows"]:
            return self._rest(files, cursor, most)
        return self._next(files, cursor, most)

    def lag(self, cursor: Cursor) -> SourceLag:
        """Return the rows of whole files behind the cursor, and the age of the first."""
        rows, oldest = int(cursor["rows"]) - int(cursor["row"]), None
        waiting = {}
        for name, info in self._list().items():
            behind = _is_new(cursor, name)
            if behind:
                key = (name, info.size)
                try:
                    waiting[key] = self._rows.get(key) or self._open(name)[0].metadata.num_rows
                except (pa.ArrowException, OSError, UnicodeDecodeError):
                    continue
                rows += waiting[key]
            if (behind or (rows and name == cursor["file"])) and info.mtime is not None:
                written = info.mtime.timestamp()
                oldest = written if oldest is None else min(oldest, written)
        self._rows = waiting
        # clocks of two machines differ, and a clock may jump
        seconds = 0.0 if not rows else None if oldest is None else max(0.0, time.time() - oldest)
        return SourceLag(rows, seconds)

    def _list(self) -> dict[str, fs.FileInfo]:
        try:
            found = self._filesystem.get_file_info(fs.FileSelector(self._root))
        except (OSError, pa.ArrowException) as error:
            raise InputError(
                f"stream {self.name} cannot be listed: {one_line(error)}. Make the folder, or give "
                "its place in [data.stream] folder."
            ) from error
        names = ((self._name_of(info), info) for info in found if info.is_file)
        files = {
            name: info for name, info in names if name.endswith(SUFFIX) and name[0] not in "._"
        }
        return dict(sorted(files.items()))

    def _name_of(self, info: fs.FileInfo) -> str:
        """Return the name of a file; "" of one that is no Parquet file, and whose name is no text.

        Raises:
            InputError: a Parquet file has such a name, which no cursor can have.
        """
        try:
            return str(info.base_name)
        except UnicodeDecodeError as error:
            name = error.object
            if name.endswith(SUFFIX.encode()) and name[:1] not in b"._":
                raise InputError(
                    f"stream {self.name} has the file {name!r}, whose name is no UTF-8. Rename it."
                ) from None
            return ""

    def _out_of_order(self, files: dict[str, fs.FileInfo], cursor: Cursor) -> tuple[Refusal, ...]:
        """Return the files that have come with a name before all that the cursor knows."""
        bound = cursor["bound"]
        # what an earlier process has read cannot be told from what came after it
        new = [name for name in files if name <= bound and name not in (self._passed or files)]
        self._passed = set(files)
        why = f"its name sorts before {MOST_NAMES:,} that have been read; name files in order"
        return tuple(Refusal(name, why) for name in new)

    def _open(self, name: str) -> tuple[pq.ParquetFile, int]:
        """Open a file; returns its size, too, which may have changed since it was listed."""
        source = self._filesystem.open_input_file(f"{self._root}/{name}")
        return pq.ParquetFile(source), source.size()

    def _next(self, files: dict[str, fs.FileInfo], cursor: Cursor, most: int) -> StreamRows | None:
        for name, info in files.items():
            if not _is_new(cursor, name):
                continue
            try:
                file, size = self._open(name)
            except FileNotFoundError:
                continue  # renamed or taken away just now
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                refusal = self._not_whole(name, info.size, one_line(error))
                if refusal is None:
                    return None
                past = _in_file(cursor, name, info.size, 0)
                return StreamRows(None, past, name, (refusal,))
            self._partial.pop(name, None)
            begun = _in_file(cursor, name, size, file.metadata.num_rows)
            return self._rows_of(file, begun, most)
        return None

    def _not_whole(self, name: str, size: int, why: str) -> Refusal | None:
        now, seen = time.monotonic(), self._partial.get(name)
        if seen is None or seen.size != size:
            self._partial = {name: _Seen(size, now)}
            return None
        if now - seen.since < self._patience_s:
            return None
        return Refusal(name, f"no whole Parquet file, and does not grow: {why}")

    def _rest(self, files: dict[str, fs.FileInfo], cursor: Cursor, most: int) -> StreamRows:
        """Return further rows of the file that the cursor is in."""
        name, left = str(cursor["file"]), int(cursor["rows"]) - int(cursor["row"])
        past = {**cursor, "row": cursor["rows"]}
        info = files.get(name)
        try:
            if info is None:
                why = "is gone"
            elif info.size != cursor["size"]:
                why = f"has {info.size} bytes now, and had {cursor['size']}"
            else:
                file, _ = self._open(name)
                if file.metadata.num_rows == cursor["rows"]:
                    return self._rows_of(file, cursor, most)
                why = f"has {file.metadata.num_rows} rows now, and had {cursor['rows']}"
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            why = f"cannot be read: {one_line(error)}"
        refusal = Refusal(name, f"{why}; its last {left} rows are not trained on", left)
        return StreamRows(None, past, name, (refusal,))

    def _rows_of(self, file: pq.ParquetFile, cursor: Cursor, most: int) -> StreamRows:
        """Return the rows of a file from the cursor's on, at most so many."""
        name, row = str(cursor["file"]), int(cursor["row"])
        total, stop = file.metadata.num_rows, min(file.metadata.num_rows, row + most)
        groups: list[int] = []
        first = before = 0
        for group in range(file.num_row_groups):
            end = first + file.metadata.row_group(group).num_rows
            if end > row and first < stop:
                if not groups:
                    before = first
                groups.append(group)
            first = end
        try:
            rows = self._read(file, name, int(cursor["size"]), groups).slice(
                row - before, stop - row
            )
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            past = {**cursor, "row": total}
            why = f"cannot be read: {one_line(error)}"
            return StreamRows(None, past, name, (Refusal(name, why, total - row),))
        return StreamRows(rows, {**cursor, "row": stop}, name, first=row)

    def _read(self, file: pq.ParquetFile, name: str, size: int, groups: list[int]) -> pa.Table:
        """Return row groups of a file; the last ones are held, since many windows end in one."""
        key = (name, size, groups)
        if self._groups is None or self._groups[0] != key:
            self._groups = None  # before others are read
            # Arrow's threads would take the core of the training beside this one
            self._groups = key, file.read_row_groups(groups, use_threads=False)
        return self._groups[1]


def _is_new(cursor: Cursor, name: str) -> bool:
    """Return True for a file that is still to be read."""
    return name > cursor["bound"] and name not in cursor["read"]


def _in_file(cursor: Cursor, name: str, size: int, rows: int) -> Cursor:
    """Return the cursor before the first row of a file."""
    read = sorted([*cursor["read"], name])
    bound = max([cursor["bound"], *read[:-MOST_NAMES]])
    read = [one for one in read if one > bound]
    return {"file": name, "size": size, "rows": rows, "row": 0, "bound": bound, "read": read}
