"""The files of a run's events: one that grows on a disk, parts in an object store.

A local file is appended to, one write for each line, so a crash costs at most the line that was
being written. Object stores cannot append. There the lines go to numbered parts,
events-000001.jsonl and so on: the last part is written anew, at most every `FLUSH_S` seconds and
at once where a line is important, and the next part begins when it has `PART_BYTES`. A local file
that reaches `MOST_BYTES` is thinned, see `rayrec.watch.thinning`; parts are not. A write
that fails later on does not end a run: the lines wait, and the next line tries again.
"""

from __future__ import annotations

import re
import time
import warnings
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
from pyarrow import fs

from rayrec.errors import CheckpointError, ConfigError, SaveError
from rayrec.storage import one_line, probe_output, resolve, write_whole
from rayrec.watch.thinning import thinned

NAME = "events.jsonl"
PART = re.compile(r"events-(\d{6,})\.jsonl")
FLUSH_S = 30.0
PART_BYTES = 1_000_000
MOST_BYTES = 32_000_000


class LocalFile:
    """Appends to a file, which is made with its folder if need be, and thins it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._pending = bytearray()
        self._size, self._thin_at = path.stat().st_size, MOST_BYTES
        if self._size:
            with path.open("rb") as written:
                written.seek(-1, 2)
                # A life that was killed amid a line left it cut; the next line is not joined to it.
                self._pending += b"" if written.read(1) == b"\n" else b"\n"

    def add(self, line: bytes, at_once: bool) -> None:
        """Append a line that ends with a newline.

        Raises:
            OSError: it was not written, and the next call writes it, too; or the file cannot be
                thinned.
        """
        self._pending += line
        self._drain()
        if self._size >= self._thin_at:
            self._thin()

    def close(self) -> None:
        """Write what was not written yet, and let go of the file."""
        try:
            self._drain()
        finally:
            self._file.close()

    def _drain(self) -> None:
        # A full disk may take half of a line; the other half follows when there is room.
        while self._pending:
            written = self._file.write(self._pending)
            del self._pending[: written or 0]
            self._size += written or 0

    def _thin(self) -> None:
        # not at every line, should it fail or leave too much
        self._thin_at = max(MOST_BYTES, self._size + MOST_BYTES // 8)
        lines = thinned(self._path.read_bytes().splitlines(keepends=True))
        try:
            write_whole("events", str(self._path), b"".join(lines))
        except SaveError as error:
            raise OSError(one_line(error)) from error
        before, self._file = self._file, self._path.open("ab", buffering=0)
        before.close()
        self._size = sum(map(len, lines))
        self._thin_at = max(MOST_BYTES, self._size + MOST_BYTES // 8)


class PartFiles:
    """Writes numbered parts into a folder of any file system, after those that are there."""

    def __init__(self, filesystem: fs.FileSystem, folder: str) -> None:
        self._filesystem, self._folder = filesystem, folder
        filesystem.create_dir(folder, recursive=True)
        there = filesystem.get_file_info(fs.FileSelector(folder))
        numbers = [int(m[1]) for info in there if (m := PART.fullmatch(info.base_name))]
        self._number = max(numbers, default=0) + 1
        self._part = bytearray()
        self._written, self._written_at = 0, 0.0

    def add(self, line: bytes, at_once: bool) -> None:
        """Append a line; it is in the store at once or within `FLUSH_S` seconds of lines.

        Raises:
            OSError, pyarrow.ArrowException: it was not written; the next call writes it, too.
        """
        self._part += line
        if at_once or time.monotonic() - self._written_at >= FLUSH_S:
            self._write()
        # Parts stay small, so that a long run does not write its whole past again and again.
        if len(self._part) >= PART_BYTES:
            self._write()
            self._number += 1
            self._part.clear()
            self._written = 0

    def close(self) -> None:
        """Write what was not written yet."""
        self._write()

    def _write(self) -> None:
        if self._written == len(self._part):
            return
        path = f"{self._folder}/events-{self._number:06d}.jsonl"
        with self._filesystem.open_output_stream(path, compression=None) as stream:
            stream.write(bytes(self._part))
        self._written, self._written_at = len(self._part), time.monotonic()


class Patient:
    """Hands lines to a file of events; a failure is a warning, once for every time of trouble."""

    def __init__(self, file: LocalFile | PartFiles, where: str) -> None:
        self._file, self._where, self._troubled = file, where, False

    def add(self, line: bytes, at_once: bool) -> None:
        """Append a line, now or when the trouble is over."""
        try:
            self._file.add(line, at_once)
        except (OSError, pa.ArrowException) as error:
            self._warn(error, "training goes on, and the next event tries again")
        else:
            self._troubled = False

    def close(self) -> None:
        """Write what was not written yet."""
        try:
            self._file.close()
        except (OSError, pa.ArrowException) as error:
            self._troubled = False
            self._warn(error, "the last events are lost")

    def _warn(self, error: Exception, consequence: str) -> None:
        if not self._troubled:
            words = f"cannot write events to {self._where}: {one_line(error)}; {consequence}."
            warnings.warn(words, RuntimeWarning, stacklevel=4)
        self._troubled = True


def open_events(folder: str) -> LocalFile | PartFiles:
    """Open the events of a run's folder, local or a URI, to append to.

    Raises:
        OSError, pyarrow.ArrowException, CheckpointError: it cannot be written to.
    """
    filesystem, root = resolve(folder)
    if isinstance(filesystem, fs.LocalFileSystem):
        return LocalFile(Path(root) / NAME)
    return PartFiles(filesystem, root)


def check_events(folder: str) -> None:
    """Check that events can be written to a run's folder; on a disk nothing is left.

    Raises:
        ConfigError: they cannot.
    """
    try:
        filesystem, root = resolve(folder)
        if isinstance(filesystem, fs.LocalFileSystem):
            probe_output("events", f"{root}/{NAME}")
            return
        filesystem.create_dir(root, recursive=True)
        with filesystem.open_output_stream(f"{root}/{NAME}.probe", compression=None) as stream:
            stream.write(b"")
        filesystem.delete_file(f"{root}/{NAME}.probe")
    except (OSError, pa.ArrowException, CheckpointError) as error:
        raise ConfigError(
            f"cannot write events to {folder}: {one_line(error)}. Name a folder or a URI that can "
            "be written to."
        ) from None
