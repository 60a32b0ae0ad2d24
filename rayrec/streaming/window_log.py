"""`WindowLog`: the windows of a stream in the run's folder, each an Arrow file and a record.

A record is written once, by a hard link that fails where there is one already, after its rows are
on the disk. So a window is a fact: every rank, resume and recovery reads the same rows in the same
order, and of two processes that cut one window, such as a rank that was taken for lost, the first
one wins. The newest record holds the cursor of the source. It costs one write of the rows.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from rayrec.errors import InputError, SaveError
from rayrec.fields.json_text import json_object, of_json
from rayrec.fields.writing import record_of

_RECORD = re.compile(r"window-(\d{8,})\.json")
# rows of a record batch, which ranks read apart
CHUNK_ROWS = 16_384
# files of refused rows that are kept
MOST_REFUSED = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowRecord:
    """A window of a stream, once it is cut.

    Attributes:
        window: number of the window, from 0 on.
        rows: rows of the window. total_rows: the same of all windows up to this one.
        file: name of the Arrow file of its rows, beside the record.
        before, after: cursors of the source before and after the window.
        first_event, last_event: smallest and largest event time, in seconds since 1970, or None.
        watermark: largest event time of all windows up to this one, or None.
        ingested: time at which the source got the newest row, in seconds since 1970.
        cut: time at which the window was cut.
        late, ahead: late events, and events that were ahead of the clock.
        refused: number of refused rows and parts of the source, by reason.
        parts: refused parts of the source, such as files, with their reasons.
    """

    window: int
    rows: int
    total_rows: int
    file: str
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    ingested: float
    cut: float
    first_event: float | None = None
    last_event: float | None = None
    watermark: float | None = None
    late: int = 0
    ahead: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return json.dumps(record_of(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str) -> WindowRecord:
        """Read a record that `to_json` wrote.

        Raises:
            InputError: the text is no record; names `source`.
        """
        return of_json(cls, json_object(text, source, InputError), source, InputError)


class WindowLog:
    """The windows of a run's stream.

    Args:
        folder: local folder that all hosts see; it is made when the first window is added.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def windows(self) -> list[int]:
        """Return the numbers of the windows that are there, ascending."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for name in names if (match := _RECORD.fullmatch(name)))

    def newest(self) -> WindowRecord | None:
        """Return the newest record, or None before the first window."""
        windows = self.windows()
        return self.read(windows[-1]) if windows else None

    def read(self, window: int) -> WindowRecord:
        """Return the record of a window.

        Raises:
            InputError: it is not there, or no longer, or damaged.
        """
        path = self._record(window)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            kept = self.windows()
            there = f"windows {kept[0]} to {kept[-1]} are" if kept else "no window is"
            raise InputError(
                f"window {window} of the stream is not in {self.folder}, where {there}. Go on from "
                "a checkpoint that the run keeps, or begin a run in a folder of its own."
            ) from None
        record = WindowRecord.from_json(text, str(path))
        if not self.path(record).exists():
            raise InputError(f"{path} names {record.file}, which is gone. Put it back.")
        return record

    def path(self, record: WindowRecord) -> Path:
        """Return the path of the rows of a window."""
        return self.folder / record.file

    def new_name(self, window: int) -> str:
        """Return a name for the rows of a window, which no other process takes."""
        return f"window-{window:08d}-{secrets.token_hex(4)}.arrow"

    def add(self, record: WindowRecord, rows: Sequence[pa.Table]) -> WindowRecord:
        """Write a window, and return its record, or that of who was faster.

        Raises:
            SaveError: the storage refused.
        """
        path, hidden = self._record(record.window), self.folder / f".{record.file}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write_rows(self.path(record), rows)
            with hidden.open("w", encoding="utf-8") as file:
                file.write(record.to_json())
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(hidden, path)
            except FileExistsError:
                self.path(record).unlink()
                return self.read(record.window)
            finally:
                hidden.unlink()
            _sync_folder(self.folder)
        except OSError as error:
            raise SaveError(
                f"cannot write window {record.window} to {self.folder}: {error}."
            ) from (error)
        return record

    def keep_refused(self, window: int, number: int, rows: pa.Table) -> None:
        """Keep rows that are not trained on, for people to look at; the oldest files are removed.

        Raises:
            SaveError: the storage refused.
        """
        folder = self.folder / "refused"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write_rows(folder / f"window-{window:08d}-{number}.arrow", [rows])
            for path in sorted(folder.glob("window-*.arrow"))[:-MOST_REFUSED]:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise SaveError(f"cannot keep refused rows in {folder}: {error}.") from error

    def prune(self, first: int) -> None:
        """Remove the windows before `first`, but for the newest, and rows without a record."""
        windows = self.windows()
        gone = [window for window in windows[:-1] if window < first]
        for window in gone:
            self._record(window).unlink(missing_ok=True)
        kept = {self.read(window).file for window in windows if window not in gone}
        newest = windows[-1] if windows else -1
        for path in self.folder.glob("window-*.arrow"):
            # who cuts a later window has no record yet
            if path.name not in kept and int(path.name.split("-")[1]) <= newest:
                path.unlink(missing_ok=True)

    def _record(self, window: int) -> Path:
        return self.folder / f"window-{window:08d}.json"


def _write_rows(path: Path, tables: Sequence[pa.Table]) -> None:
    table = pa.concat_tables(tables).combine_chunks()
    with path.open("wb") as file:
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=CHUNK_ROWS)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
