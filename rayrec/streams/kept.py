"""`StreamWindow`, a window as a fact of a run, and the folder of the run that keeps windows.

The rows of a window are written first, under a name of their own, and its record last: from then on
every attempt of the run, with any number of ranks, reads these rows and no others. The folder has

    window-00000012.json            the record
    window-00000012-3f9a61c2.arrow  its rows
    refused/window-00000012.json    what was left out while it was cut, and why

Rows on a disk are an Arrow IPC file, which ranks map into their memory, so that reading decodes
nothing. Rows in an object store are a Parquet file, which is smaller and whose pages have
checksums; and so are rows of types whose IPC files hold more than these rows, such as the whole
dictionary of a column. The record of a file on a disk has its checksum.
"""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
from pyarrow import fs

from rayrec.checks import is_uri
from rayrec.errors import InputError, SaveError
from rayrec.fields.json_text import json_object, of_json
from rayrec.fields.writing import record_of
from rayrec.storage import one_line, resolve, sync, write_new, write_whole
from rayrec.streams.source import Refusal

FOLDER, REFUSED = "stream", "refused"
ROW_GROUPS = 16  # of a window: so many parts can be read beside each other
ARROW, PARQUET = ".arrow", ".parquet"
CRC_BYTES = 1 << 20  # that are read at once for a checksum
REFUSED_WINDOWS = 1000  # so many newest windows keep what was refused, where windows are pruned


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamWindow:
    """Window of a stream.

    Attributes:
        number: 0 is the first of the run.
        file: name of the file of its rows.
        rows: number of them.
        total_rows: rows of this window and all before it.
        after: cursor of the source behind it.
        cut_s: wall clock when it was cut, seconds since 1970.
        newest_event: greatest event time of this window and all before it, seconds since 1970; None
            where the run reads no time.
        late: rows whose event time lies before the newest of the windows before.
        refused: rows, messages and files that were left out.
        lag_rows, lag_s: what waited in the source then, see `SourceLag`.
        best_auc: AUC of the true logits of its rows, where the stream has them.
        crc32: checksum of the file of its rows; None of one in an object store.
        source: name of what its rows were read from.
    """

    number: int
    file: str
    rows: int
    after: dict[str, Any]
    cut_s: float
    newest_event: int | None = None
    late: int = 0
    refused: int = 0
    lag_rows: int | None = None
    lag_s: float | None = None
    total_rows: int = 0
    best_auc: float | None = None
    crc32: int | None = None
    source: str | None = None


class WindowFolder:
    """Folder of the windows of a run.

    Args:
        run_path: absolute folder or URI of the run.
        source: name of what the windows are read from; None where that does not matter.
    """

    def __init__(self, run_path: str, source: str | None = None) -> None:
        self.path, self._source = f"{run_path}/{FOLDER}", source

    def read(self, number: int) -> StreamWindow | None:
        """Return a window, or None where it has not been cut.

        Raises:
            InputError: its record is damaged, or that of another window or source.
        """
        path = f"{self.path}/{_record_name(number)}"
        filesystem, where = resolve(path)
        try:
            with filesystem.open_input_stream(where) as stream:
                text = stream.read().decode()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeError, pa.ArrowException) as error:
            raise InputError(
                f"window {path} cannot be read: {one_line(error)}. Put the record back, or begin a "
                "new run."
            ) from error
        try:
            data = json_object(text, path, InputError)
            window: StreamWindow = of_json(StreamWindow, data, path, InputError)
            if window.number != number:
                raise InputError(f"{path} is the record of window {window.number}.")
        except InputError as error:
            raise InputError(f"{error} Put the record back, or begin a new run.") from None
        if self._source is not None and window.source not in (None, self._source):
            raise InputError(
                f"{path} was cut from {window.source}, and this run reads {self._source}. Give the "
                "source that it was cut from, or give the run another name or storage_path."
            )
        return window

    def check_cut(self, number: int, is_begun: bool) -> None:
        """Check that a window without a record was not cut before, since it would be another one.

        Args:
            is_begun: it was trained on.
        Raises:
            InputError: it was.
        """
        # another process may have cut both just now, so the first is looked for last
        was_cut = is_begun or self.read(number + 1) is not None
        if was_cut and self.read(number) is None:
            raise InputError(
                f"{self.path}/{_record_name(number)} is gone, the record of a window that was cut. "
                "Put it back, resume a checkpoint whose windows are kept, or begin a new run."
            )

    def write_rows(self, number: int, rows: pa.Table) -> tuple[str, int | None]:
        """Write the rows of a window, and return the name of their file and its checksum.

        Raises:
            SaveError: they cannot be written.
        """
        is_plain = all(map(_is_plain, rows.schema.types))
        suffix = ARROW if is_plain and not is_uri(self.path) else PARQUET
        name = f"window-{number:08d}-{uuid.uuid4().hex[:8]}{suffix}"
        filesystem, root = resolve(self.path)
        try:
            filesystem.create_dir(root, recursive=True)
            size = max(1024, -(-len(rows) // ROW_GROUPS))
            crc32 = write_window(rows, f"{root}/{name}", size, filesystem)
            if isinstance(filesystem, fs.LocalFileSystem):
                # the record must not outlive the rows, should the machine lose its power
                sync(f"{root}/{name}")
        except (OSError, pa.ArrowException) as error:
            # what is there of them would fill the disk
            with suppress(OSError, pa.ArrowException):
                filesystem.delete_file(f"{root}/{name}")
            raise SaveError(
                f"cannot write window {number} to {self.path}: {one_line(error)}."
            ) from error
        return name, None if is_uri(self.path) else crc32

    def refuse(self, number: int, refusals: Sequence[Refusal]) -> None:
        """Write what was left out while a window was cut.

        Raises:
            SaveError: it cannot be written.
        """
        told = json.dumps([asdict(one) for one in refusals], indent=1)
        write_whole("refused rows", f"{self.path}/{REFUSED}/{_record_name(number)}", told)

    def add(self, window: StreamWindow, refusals: Sequence[Refusal]) -> StreamWindow:
        """Write the record of a window, and return it; or the record that is there already.

        Raises:
            SaveError: it cannot be written.
        """
        if refusals:
            self.refuse(window.number, refusals)
        path = f"{self.path}/{_record_name(window.number)}"
        text = json.dumps(record_of(window))
        if is_uri(path):
            # one process cuts at a time, since the driver ends a world before it begins the next
            write_whole("a window", path, text)
        elif not write_new("a window", path, text):
            return self.read(window.number) or window
        return window

    def prune(self, first: int) -> None:
        """Delete windows before a number but the last record, and what was refused long before it;
        trouble is left to the next time.
        """
        filesystem, root = resolve(self.path)
        refused = f"{root}/{REFUSED}"
        with suppress(OSError, pa.ArrowException):
            for folder in (root, refused):
                for info in filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True)):
                    number = _number_of(info.base_name)
                    # the record before tells how old is what was trained on so far
                    kept = first - 1 if info.base_name.endswith(".json") else first
                    kept -= REFUSED_WINDOWS if folder == refused else 0
                    if info.is_file and number is not None and number < kept:
                        filesystem.delete_file(info.path)


def write_window(
    rows: pa.Table, path: str, group: int, filesystem: fs.FileSystem | None = None
) -> int | None:
    """Write the rows of a window in groups of so many, as the suffix of the path says.

    Returns:
        The checksum of a local file; None of another one.
    """
    # a window is written once, read once or twice, and deleted: speed counts more than size
    if path.endswith(PARQUET):
        options = {"use_dictionary": False, "compression": "lz4", "write_page_checksum": True}
        pq.write_table(rows, path, row_group_size=group, filesystem=filesystem, **options)
        is_local = filesystem is None or isinstance(filesystem, fs.LocalFileSystem)
        return checksum(path) if is_local else None
    with ipc.new_file(path, rows.schema) as file:
        for start in range(0, len(rows), group):
            # Arrow joins no more than 2 GiB of text in lists, of which a window may have more
            file.write_table(rows.slice(start, group).combine_chunks())
    return checksum(path)


def _is_plain(kind: pa.DataType) -> bool:
    """Return True for types of which an IPC file holds the values of the rows and no others."""
    types = pa.types
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if lists:
        return _is_plain(kind.value_type)
    text = types.is_string(kind) or types.is_large_string(kind)
    text |= types.is_binary(kind) or types.is_large_binary(kind)
    return bool(text or types.is_primitive(kind))


def check_window(path: str, crc32: int | None) -> None:
    """Check the bytes of a local file of rows.

    Raises:
        InputError: they are gone, or others than were written.
    """
    try:
        found = checksum(path)
    except OSError as error:
        raise InputError(
            f"cannot read window {path}: {one_line(error)}. Put the file back, or begin a new run."
        ) from error
    if found != crc32:
        raise InputError(
            f"window {path} is damaged: its checksum is {found}, and its record says {crc32}. "
            "Put the file back, or begin a new run."
        )


def checksum(path: str) -> int:
    """Return the CRC-32 of a local file."""
    crc32 = 0
    with open(path, "rb", buffering=0) as file:
        while part := file.read(CRC_BYTES):
            crc32 = zlib.crc32(part, crc32)
    return crc32


def _record_name(number: int) -> str:
    return f"window-{number:08d}.json"


def _number_of(name: str) -> int | None:
    digits = name.removeprefix("window-")[:8]
    return int(digits) if name.startswith("window-") and digits.isdecimal() else None
