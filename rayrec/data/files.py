"""Data sets of files: `ParquetDataset` and `ArrowDataset`, one directory, file or URI of each kind.

Construction lists the files through pyarrow.fs, reads only their metadata and checks every file's
columns against the schema; from then on the number of rows, the order of samples and the number of
batches are known without reading data. Chunks are Parquet row groups or IPC record batches
(`readers`). Folders such as `day=2026-11-01` are columns (`partitions`), and `where` takes a part
of the rows (`predicate`): it leaves files out by their folders, and where it asks for columns of
the files themselves, these columns are read once to count the rows that it takes. Where histories
are cut (`histories`), the log's users and times are read once to check its order. A data set is
plain data: picklable, with no open file.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from dataclasses import replace

import pyarrow as pa
import pyarrow.fs as pafs

from rayrec.data.column_types import check_columns
from rayrec.data.found import Kind, find_files
from rayrec.data.histories import Histories
from rayrec.data.listing import DataFile
from rayrec.data.readers import ArrowReader, FileReader, ParquetReader
from rayrec.data.rows import RowDataset
from rayrec.data.selected import SelectedReader
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
        InputError: nothing there, no rows, a broken file, a file whose columns do not fit, a log
            that is not sorted, or a `where` about columns that there are not or that cannot be
            compared so.
        ConfigError: a size is not positive, or `where` cannot be read.
    """

    SUFFIXES: tuple[str, ...] = ()
    READER: Kind

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
        self._found, files = find_files(
            self.path,
            [self.READER],
            where,
            filesystem=filesystem,
            threads=threads,
            histories=Histories.of(schema),
        )
        self.where, self.filesystem = self._found.where, self._found.filesystem
        self.files = tuple(self._counted(file) for file in files)
        if self.num_rows == 0:
            taken, remedy = "in them", "write the data"
            if self.where is not None:
                taken, remedy = f"where {self.where}", "take other rows"
            raise InputError(
                f"{self.path!r} has {self._found.listed} {self.READER.KIND} files and no rows "
                f"{taken}. Check the path or {remedy}."
            )
        self._found.check_log(self.files)
        self.order()  # checks num_streams and shuffle_rows

    @property
    def filters_rows(self) -> bool:
        """True when `where` asks for columns of the files, so that chunks give some rows."""
        return self._found.selection.filters_rows

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
        base = self._found.root
        if all(f.path == base for f in self.files):
            base = posixpath.dirname(base)
        names = [posixpath.relpath(f.path, base or ".") for f in self.files]
        facts = [[n, f.size, list(f.chunk_rows)] for n, f in zip(names, self.files, strict=True)]
        parts = [self.READER.KIND, self.num_streams, self.shuffle_rows, facts]
        if self.where is not None:
            parts.append(self.where)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def open(self, file: DataFile) -> FileReader:
        """Open one file; InputError when it is gone, truncated or not of this kind."""
        return self._found.open(file)

    def broken(self, path: str, error: Exception) -> InputError:
        """The error for a file that cannot be read."""
        return self._found.broken(path, error)

    def _counted(self, file: DataFile) -> DataFile:
        """The file with the rows that are taken of each chunk, once its columns are checked."""
        reader = self._found.open(file, check=True)
        check_columns(reader.schema, self.schema, f"file {file.path!r}", self.with_labels)
        try:
            rows = reader.count() if isinstance(reader, SelectedReader) else reader.chunk_rows
        except (pa.ArrowException, OSError) as error:
            raise self.broken(file.path, error) from error
        return replace(file, chunk_rows=rows)


class ParquetDataset(FileDataset):
    __doc__ = (FileDataset.__doc__ or "").replace("Rows of files", "Rows of Parquet files", 1)
    READER, SUFFIXES = ParquetReader, ParquetReader.SUFFIXES


class ArrowDataset(FileDataset):
    __doc__ = (FileDataset.__doc__ or "").replace("Rows of files", "Rows of Arrow IPC files", 1)
    READER, SUFFIXES = ArrowReader, ArrowReader.SUFFIXES
