"""A checkpoint's directory through `pyarrow.fs`: local disks, S3, GCS and HDFS by the same code.

Durability: on a local disk every file and its directory are fsynced before the manifest, the
manifest is written under another name, fsynced and renamed. On an object store an object becomes
visible whole when its upload completes, so the manifest is a single put. Local files are
memory-mapped; remote ones are read by ranges. Leaves out retries: `pyarrow.fs` does those for the
clouds.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import pyarrow as pa
from pyarrow import fs

from rayrec.checkpoint.manifest import MANIFEST, Manifest
from rayrec.errors import CheckpointError, DamagedCheckpointError, SaveError
from rayrec.storage import Sink, resolve, sync

OBJECT_STORES = ("s3", "gcs", "abfs")  # no directories, no rename, an object appears whole
DENSE = "dense.pt"
TABLES = "tables"
_PARTIAL = f"{MANIFEST}.partial"


class ChecksumSink(Sink):
    """A file object that counts and checksums what passes to an Arrow stream, without a copy."""

    def __init__(self, stream: pa.NativeFile, given_up: Callable[[], bool]) -> None:
        super().__init__()
        self._stream, self.crc32, self._given_up = stream, 0, given_up

    def write(self, data: bytes | pa.Buffer) -> int:
        """Write all of `data`."""
        if self._given_up():
            raise SaveError("the save was given up, since this rank leaves its world.")
        view = memoryview(data)
        self._stream.write(data)
        self.num_bytes += view.nbytes
        self.crc32 = zlib.crc32(view, self.crc32)
        return view.nbytes


class Source:
    """Ranges of one file; reads from several threads are safe."""

    def __init__(self, file: pa.NativeFile, mapped: pa.Buffer | None) -> None:
        self._file, self._mapped = file, mapped

    def read(self, start: int, stop: int) -> pa.Buffer:
        """The bytes [start, stop); without a copy when the file is memory-mapped."""
        if self._mapped is not None:
            return self._mapped.slice(start, stop - start)
        return pa.py_buffer(self._file.read_at(stop - start, start))


class Store:
    """One checkpoint directory.

    Args:
        filesystem: used instead of the one that `path` names.
        given_up: asked before each write; once it says yes, writing raises SaveError.
    """

    def __init__(
        self,
        path: str,
        filesystem: fs.FileSystem | None = None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._given_up = given_up
        self.filesystem, self.root = resolve(path, filesystem)
        self.path = os.fspath(path)
        self._local = isinstance(self.filesystem, fs.LocalFileSystem)
        self._has_directories = self.filesystem.type_name not in OBJECT_STORES

    def has_manifest(self) -> bool:
        """Return True if the folder holds a complete checkpoint: its manifest is written last."""
        return self.filesystem.get_file_info(self._file(MANIFEST)).type == fs.FileType.File

    def sizes(self, paths: Sequence[str]) -> dict[str, int]:
        """Size in bytes of those files that exist."""
        infos = self.filesystem.get_file_info([self._file(path) for path in paths])
        pairs = zip(paths, infos, strict=True)
        return {path: info.size for path, info in pairs if info.type == fs.FileType.File}

    def prepare(self) -> None:
        """Make the directory ready to be written: new, empty, or rid of an unfinished checkpoint.

        Raises:
            CheckpointError: it holds a complete checkpoint, or files that no checkpoint has.
        """
        if self.has_manifest():
            raise CheckpointError(
                f"{self.path} already holds a complete checkpoint; save to a new path, or delete "
                "it first."
            )
        entries = self.filesystem.get_file_info(fs.FileSelector(self.root, allow_not_found=True))
        foreign = sorted({entry.base_name for entry in entries} - {TABLES, DENSE, _PARTIAL, ""})
        if foreign:
            raise CheckpointError(
                f"{self.path} holds {foreign[0]!r}, which is no part of a checkpoint; save to a "
                "new or empty directory."
            )
        # the rest of an unfinished save
        for entry in entries:
            if entry.type == fs.FileType.Directory:
                self.filesystem.delete_dir(entry.path)
            elif entry.type == fs.FileType.File:
                self.filesystem.delete_file(entry.path)
        self._make_directory(self.root)

    @contextmanager
    def write(self, path: str) -> Iterator[ChecksumSink]:
        """Write one file; it is on disk when the block ends.

        What an error leaves behind is harmless without a manifest.
        """
        target = self._file(path)
        self._make_directory(os.path.dirname(target))
        with self.filesystem.open_output_stream(target, compression=None) as stream:
            yield ChecksumSink(stream, self._given_up)
        self._sync(target, os.path.dirname(target))

    def publish(self, manifest: bytes) -> None:
        """Write the manifest so that it appears whole or not at all.

        Before this call the directory is not a checkpoint.
        """
        whole = self._file(MANIFEST)
        name = self._file(_PARTIAL) if self._has_directories else whole
        with self.filesystem.open_output_stream(name, compression=None) as stream:
            stream.write(manifest)
        if not self._has_directories:
            return
        # all names must be on disk before the rename, and the rename before this call returns
        self._sync(name, self._file(TABLES), self.root)
        self.filesystem.move(name, whole)
        self._sync(self.root, os.path.dirname(self.root))

    def read_all(self, path: str) -> bytes:
        """Read a whole small file.

        Raises:
            CheckpointError: it is missing or cannot be read.
            DamagedCheckpointError: it is missing, and it is not the manifest.
        """
        try:
            with self.filesystem.open_input_file(self._file(path)) as file:
                return file.readall()
        except FileNotFoundError as error:
            if path != MANIFEST:
                raise self.missing(path) from error
            raise CheckpointError(
                f"{self.path} has no file {path}. Without it a directory is not a checkpoint: the "
                "path is wrong, or the save was cut short, or its run has pruned it. Use another "
                "checkpoint."
            ) from error
        except OSError as error:
            raise CheckpointError(f"{self.path}/{path} cannot be read: {error}") from error

    def manifest(self) -> Manifest:
        """Read the manifest.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        return Manifest.from_bytes(self.read_all(MANIFEST), self.path)

    def open(self, path: str) -> Source:
        """Open a file for reading ranges of it; it is closed when the source is dropped.

        Raises:
            CheckpointError: it cannot be read.
            DamagedCheckpointError: it is missing.
        """
        open_file = pa.memory_map if self._local else self.filesystem.open_input_file
        try:
            file = open_file(self._file(path))
        except FileNotFoundError as error:
            raise self.missing(path) from error
        except OSError as error:
            raise CheckpointError(
                f"{self.path}/{path} cannot be read: {error}. Restore an earlier checkpoint."
            ) from error
        return Source(file, file.read_buffer() if self._local else None)

    def _file(self, path: str) -> str:
        return f"{self.root}/{path}"

    def missing(self, path: str) -> DamagedCheckpointError:
        """The error of a file that is not there, with what to do."""
        with suppress(OSError, pa.ArrowException):
            if not self.has_manifest():
                return DamagedCheckpointError(
                    f"{self.path} has no file {path}: it was deleted meanwhile, as a run prunes "
                    "its checkpoints. Use a newer checkpoint, by RUN@latest."
                )
        return DamagedCheckpointError(
            f"{self.path} has no file {path}, which its manifest names. Restore an earlier "
            "checkpoint."
        )

    def _make_directory(self, directory: str) -> None:
        if self._has_directories:
            self.filesystem.create_dir(directory, recursive=True)

    def _sync(self, *paths: str) -> None:
        for path in paths if self._local else ():
            if os.path.exists(path):  # a model without tables has no tables directory
                sync(path)
