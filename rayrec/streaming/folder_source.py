"""`FolderSource`: a growing folder of Parquet files as the source of a stream.

A file counts once it is whole: its name and those of its folders begin with neither a dot nor an
underscore, and its size and time have not changed for `settle_s`. Whole files are taken in the
order of their names below the folder. The cursor holds the names of the newest 1,000 files taken,
so files may come in any order within these; a file whose name sorts before all of them is too late,
and refused. A file is read whole, into the memory of rank 0.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.checks import absolute_path, is_uri, seconds
from rayrec.errors import ConfigError, InputError
from rayrec.fields.typed import check_fields
from rayrec.streaming.source import Cursor, Lag, Polled, Refusal

SUFFIXES = (".parquet", ".pq")
# names that a cursor holds
KEPT_NAMES = 1_000
# seconds between two looks at the folder
LOOK_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderSource:
    """Growing folder of Parquet files.

    Attributes:
        path: local folder; a producer writes each file under a hidden name and renames it, or lets
            it grow in place.
        settle_s: seconds without a change after which a file is looked at.
        give_up_s: seconds without a change after which a file that cannot be read is refused.
    """

    path: str
    settle_s: float = 1.0
    give_up_s: float = 60.0

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "path", absolute_path("FolderSource has path", self.path))
        if is_uri(self.path):
            raise ConfigError(
                f"FolderSource has path={self.path!r}; a stream follows a local folder. Mount it, "
                "or copy new files to one."
            )
        seconds("FolderSource has settle_s", self.settle_s)
        seconds("FolderSource has give_up_s", self.give_up_s)


class _Look(NamedTuple):
    """Size and time of a file, and the moment since which they have not changed."""

    size: int
    changed: int
    since: float


class FolderStream:
    """Stream of the rows of a growing folder.

    Args:
        clock: seconds of a clock that never jumps.
    """

    def __init__(self, config: FolderSource, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self._config, self._clock = f"folder {config.path}", config, clock
        self._looks: dict[str, _Look] = {}
        self._looked, self._first = float("-inf"), True
        # refusals that the next answer tells of
        self._told: list[Refusal] = []
        self._table: tuple[str, pa.Table] | None = None
        self._rows: dict[tuple[str, int], int] = {}

    def start(self) -> Cursor:
        """Return the cursor before every file."""
        return {"bound": "", "taken": {}, "refused": {}, "file": "", "size": 0, "row": 0}

    def poll(self, cursor: Cursor, most_rows: int) -> Polled | None:
        """Return rows of the file that is being taken, or of the next whole one."""
        if cursor["file"]:
            return self._rest(cursor, most_rows)
        self._look(cursor)
        taken = cursor["taken"]
        changed = {
            name: look.size
            for name, look in self._looks.items()
            if taken.get(name, look.size) != look.size
        }
        if changed:
            told = (Refusal(name, "it was changed after it was taken") for name in changed)
            return self._answer(None, {**cursor, "taken": {**taken, **changed}}, "", tuple(told))
        for name in self._whole(cursor):
            look = self._looks[name]
            try:
                table = self._read(name)
            except FileNotFoundError:
                # its rows were never taken
                self._told.append(Refusal(name, "it was gone before it was read"))
                del self._looks[name]
                continue
            except (pa.ArrowException, OSError) as error:
                if self._clock() - look.since < self._config.give_up_s:
                    continue
                why = f"it cannot be read as Parquet: {str(error).splitlines()[0]}"
                refused = _newest({**cursor["refused"], name: look.size})
                after = {**cursor, "refused": refused}
                return self._answer(None, after, name, (Refusal(name, why),))
            if not table.num_rows:
                return self._answer(None, _finished(cursor, name, look.size), name)
            begun = {**cursor, "file": name, "size": look.size, "row": 0}
            return self._rest(begun, most_rows)
        if self._told:
            return self._answer(None, cursor, "")
        return None

    def lag(self, cursor: Cursor) -> Lag:
        """Return the rows of whole files that were not taken, and the age of the oldest file."""
        rows, oldest, now = 0, None, time.time()
        names = [name for name in self._looks if self._is_new(cursor, name)]
        if cursor["file"] and self._table is not None and self._table[0] == cursor["file"]:
            rows = self._table[1].num_rows - cursor["row"]
        for name in names:
            look = self._looks[name]
            key = (name, look.size)
            if name == cursor["file"]:
                continue
            if key not in self._rows:
                try:
                    self._rows[key] = pq.read_metadata(self._path(name)).num_rows
                except (pa.ArrowException, OSError):
                    continue
            rows += self._rows[key]
            oldest = min(look.changed, look.changed if oldest is None else oldest)
        self._rows = {key: count for key, count in self._rows.items() if key[0] in names}
        return Lag(rows, 0.0 if oldest is None else max(0.0, now - oldest / 1e9))

    def close(self) -> None:
        """Forget the file that is being taken."""
        self._table = None

    def _rest(self, cursor: Cursor, most_rows: int) -> Polled:
        """Return the next rows of the file that is being taken."""
        name, row = cursor["file"], cursor["row"]
        try:
            changed = os.stat(self._path(name)).st_size != cursor["size"]
            in_memory = self._table is not None and self._table[0] == name
            # rows in memory are those of the file as it was whole
            if changed and not in_memory:
                raise OSError("its size has changed")
            table = self._read(name)
        except (pa.ArrowException, OSError) as error:
            if self._table is not None and self._table[0] == name:
                table = self._table[1]
            else:
                why = f"its rows from {row} on are lost: {str(error).splitlines()[0]}"
                ended = _finished(cursor, name, cursor["size"])
                return self._answer(None, ended, name, (Refusal(name, why),))
        rows = table.slice(row, most_rows)
        after: dict[str, Any] = {**cursor, "row": row + rows.num_rows}
        if after["row"] >= table.num_rows:
            after = _finished(cursor, name, cursor["size"])
        return self._answer(rows, after, name)

    def _answer(
        self, rows: pa.Table | None, cursor: Cursor, name: str, told: tuple[Refusal, ...] = ()
    ) -> Polled:
        look = self._looks.get(name)
        ingested = time.time() if look is None else look.changed / 1e9
        refused, self._told = (*self._told, *told), []
        return Polled(rows, cursor, ingested, refused)

    def _read(self, name: str) -> pa.Table:
        if self._table is None or self._table[0] != name:
            self._table = None
            # partitions of the path are no columns here
            self._table = (name, pq.ParquetFile(self._path(name)).read())
        return self._table[1]

    def _path(self, name: str) -> str:
        return os.path.join(self._config.path, name)

    def _whole(self, cursor: Cursor) -> list[str]:
        """Return the names of new files that no longer change, ascending."""
        now, settle = self._clock(), self._config.settle_s
        settled = [name for name, look in self._looks.items() if now - look.since >= settle]
        return sorted(name for name in settled if self._is_new(cursor, name))

    def _is_new(self, cursor: Cursor, name: str) -> bool:
        if name <= cursor["bound"] or name in cursor["taken"]:
            return False
        return bool(cursor["refused"].get(name) != self._looks[name].size)

    def _look(self, cursor: Cursor) -> None:
        """Look at the folder, if the last look is some time ago."""
        now = self._clock()
        if now - self._looked < min(LOOK_S, self._config.settle_s / 2):
            return
        looks = dict[str, _Look]()
        for name, entry in self._files():
            try:
                info = entry.stat()
            except FileNotFoundError:
                continue
            old = self._looks.get(name)
            look = _Look(info.st_size, info.st_mtime_ns, now)
            looks[name] = old if old is not None and old[:2] == look[:2] else look
        for name in looks:
            is_late = name <= cursor["bound"] and name not in self._looks and not self._first
            if is_late:
                self._told.append(
                    Refusal(name, f"it came behind {KEPT_NAMES} files of later names")
                )
        self._looks, self._looked, self._first = looks, now, False

    def _files(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield the files of the folder and of its folders, without hidden ones."""
        waiting = [self._config.path]
        while waiting:
            folder = waiting.pop()
            try:
                with os.scandir(folder) as entries:
                    found = list(entries)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise InputError(
                    f"cannot list {folder}, which the stream follows: {error.strerror}."
                ) from error
            for entry in found:
                if entry.name.startswith((".", "_")):
                    continue
                if entry.is_dir():
                    waiting.append(entry.path)
                elif entry.name.endswith(SUFFIXES):
                    yield os.path.relpath(entry.path, self._config.path), entry


def _finished(cursor: Cursor, name: str, size: int) -> dict[str, Any]:
    """Return the cursor behind the last row of a file."""
    taken = {**cursor["taken"], name: size}
    gone = sorted(taken)[:-KEPT_NAMES]
    bound = max([cursor["bound"], *gone])
    refused = {key: size for key, size in cursor["refused"].items() if key != name and key > bound}
    taken = {key: size for key, size in taken.items() if key > bound}
    none: dict[str, Any] = {"file": "", "size": 0, "row": 0}
    return {"bound": bound, "taken": taken, "refused": refused, **none}


def _newest(sizes: dict[str, int]) -> dict[str, int]:
    """Return the last names, with their sizes."""
    return {name: sizes[name] for name in sorted(sizes)[-KEPT_NAMES:]}
