"""Data sets of files: `ParquetDataset` and `ArrowDataset`, one directory, file or URI of each kind.

Construction lists the files through pyarrow.fs, reads only their metadata and checks every file's
columns against the schema; from then on the number of rows, the order of samples and the number of
batches are known without reading data. Chunks are Parquet row groups or IPC record batches
(`readers`). Folders such as `day=2026-11-01` are columns (`partitions`), and `where` takes a part
of the rows (`predicate`): it leaves files out by their folders, and where it asks for columns of
the files themselves, these columns are read once to count the rows that it takes. A data set is
plain data: picklable, with no open file.
"""

from __future__ import annotations

import hashlib
import json
import posixpath

import pyarrow as pa
import pyarrow.fs as pafs

from rayrec.data.column_types import check_columns
from rayrec.data.listing import DataFile, broken_file, list_files, resolve_path
from rayrec.data.partitions import Partitions
from rayrec.data.predicate import parse_where
from rayrec.data.readers import ArrowReader, FileReader, ParquetReader
from rayrec.data.rows import RowDataset
from rayrec.data.selected import SelectedReader, Selection
from rayrec.errors import InputError
from rayrec.layout.schema import FeatureSchema


class FileDataset(RowDataset):
    """Rows of files under one path, in an order that does not depend on the number of ranks.

    Use `ParquetDataset` or `ArrowDataset`.

    Args:
        path: a directory (searched through, names starting with '.' or '_' left out), one file, or
            a URI of either (s3://, gs://).
        schema: what the columns mean; every file must have them.
        num_streams: S of `order`: so many ranks can read without reading the same rows.
        shuffle_rows: rows per shuffled block; a rank holds one block per stream it reads.
        filesystem: a pyarrow file system that holds `path`; by default the local one or the URI's.
        threads: decode columns on Arrow's threads, for hosts whose ranks leave cores idle.
        where: which rows are taken, such as "day >= '2026-11-01' and hour in (1, 2)"; docs/data.md
            has the language. None takes all.
        with_labels: False reads neither labels nor weights of rows, and files need not have them:
            rows to predict. Labels of batches are then zeros.
    Raises:
        InputError: nothing there, no rows, a broken file, a file whose columns do not fit, or a
            `where` about columns that there are not or that cannot be compared so.
        ConfigError: a size is not positive, or `where` cannot be read.
    """

    SUFFIXES: tuple[str, ...] = ()
    KIND = ""
    READER: type[ParquetReader] | type[ArrowReader]

    def __init__(
        self,
        path: str,
        schema: FeatureSchema,
        *,
        num_streams: int = 8,
        shuffle_rows: int = 8192,
        filesystem: pafs.FileSystem | None = None,
        threads: bool = False,
        where: str | None = None,
        with_labels: bool = True,
    ) -> None:
        self.path, self.schema = str(path), schema
        self.num_streams, self.shuffle_rows, self.threads = num_streams, shuffle_rows, threads
        self.with_labels = with_labels
        predicate = True if where is None else parse_where(where)
        self.where = None if where is None else str(predicate)
        self.filesystem, self._root = resolve_path(self.path, filesystem)
        infos = list_files(self.filesystem, self._root, self.path, self.KIND, self.SUFFIXES)
        partitions = Partitions.of(self._below(info) for info in infos)
        self._selection = Selection(predicate, partitions)
        self._selection.check_folders(self.path)
        inspected = (self._inspect(info) for info in infos)
        self.files = tuple(file for file in inspected if file is not None)
        if not self.files:
            # no file was opened, so that a misspelt column would pass for one that no row fits
            self._selection.check(
                self._open(infos[0].path), partitions.values(self._below(infos[0])), infos[0].path
            )
        if self.num_rows == 0 and self.where is not None:
            raise InputError(
                f"{self.path!r} has {len(infos)} {self.KIND} files and no rows where {self.where}. "
                "Check the path or take other rows."
            )
        if self.num_rows == 0:
            raise InputError(
                f"{self.path!r} has {len(self.files)} {self.KIND} files and no rows in them. "
                "Check the path or write the data."
            )
        self.order()  # checks num_streams and shuffle_rows

    @property
    def filters_rows(self) -> bool:
        """Whether `where` asks for columns of the files, so that chunks give some of their rows."""
        return self._selection.filters_rows

    def local_files(self) -> list[tuple[str, int]]:
        """Path and size in bytes of every file on a local disk; none for an object store."""
        if not isinstance(self.filesystem, pafs.LocalFileSystem):
            return []
        return [(file.path, file.size) for file in self.files]

    def fingerprint(self) -> str:
        """A short hash of all that the order of samples depends on.

        It covers file names below the path, sizes, rows, num_streams, shuffle_rows and `where`.

        Equal fingerprints mean that a saved cursor (seed, epoch, batch) finds the same rows; where
        the directory lies does not matter.
        """
        # of one file its name alone; of a directory the paths below it
        base = self._root
        if all(f.path == self._root for f in self.files):
            base = posixpath.dirname(self._root)
        names = [posixpath.relpath(f.path, base or ".") for f in self.files]
        facts = [[n, f.size, list(f.chunk_rows)] for n, f in zip(names, self.files, strict=True)]
        parts = [self.KIND, self.num_streams, self.shuffle_rows, facts]
        if self.where is not None:
            parts.append(self.where)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def open(self, file: DataFile) -> FileReader:
        """Open one file; InputError when it is gone, truncated or not of this kind."""
        return self._selection.reader(self._open(file.path), dict(file.folders))

    def _open(self, path: str) -> FileReader:
        try:
            return self.READER(self.filesystem, path, self.threads)
        except (pa.ArrowException, OSError) as error:
            raise self.broken(path, error) from error

    def broken(self, path: str, error: Exception) -> InputError:
        """The error for a file that cannot be read."""
        return broken_file(path, self.KIND, error)

    def _below(self, info: pafs.FileInfo) -> str:
        """The path of a file below the root; empty where the file is the root."""
        return str(info.path[len(self._root) :]).lstrip("/")

    def _inspect(self, info: pafs.FileInfo) -> DataFile | None:
        """What is known of a file; None where its folders say that no row of it is taken."""
        told = self._selection.folders(self._below(info))
        if told is None:
            return None
        own = self._open(info.path)
        self._selection.check(own, told, info.path)
        reader = self._selection.reader(own, told)
        check_columns(reader.schema, self.schema, f"file {info.path!r}", self.with_labels)
        try:
            rows = reader.count() if isinstance(reader, SelectedReader) else reader.chunk_rows
        except (pa.ArrowException, OSError) as error:
            raise self.broken(info.path, error) from error
        return DataFile(
            path=info.path, size=info.size, chunk_rows=rows, folders=tuple(told.items())
        )


class ParquetDataset(FileDataset):
    __doc__ = (FileDataset.__doc__ or "").replace("Rows of files", "Rows of Parquet files", 1)
    SUFFIXES = (".parquet", ".pq", ".parq")
    KIND = "Parquet"
    READER = ParquetReader


class ArrowDataset(FileDataset):
    __doc__ = (FileDataset.__doc__ or "").replace("Rows of files", "Rows of Arrow IPC files", 1)
    SUFFIXES = (".arrow", ".feather", ".ipc")
    KIND = "Arrow IPC"
    READER = ArrowReader
