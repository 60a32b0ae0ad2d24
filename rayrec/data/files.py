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
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.fs as pafs

from rayrec.data.column_types import binary_columns, check_columns, missing
from rayrec.data.listing import Chunk, DataFile, list_files, resolve_path
from rayrec.data.loader import BatchLoader
from rayrec.data.order import SampleOrder, count_batches
from rayrec.data.partitions import Partitions
from rayrec.data.predicate import Constant, parse_where
from rayrec.data.readers import ArrowReader, FileReader, ParquetReader
from rayrec.data.selected import SelectedReader, Selection
from rayrec.data.streams import Reading, read_batches
from rayrec.errors import ConfigError, InputError
from rayrec.layout.schema import FeatureSchema


class FileDataset:
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
    ) -> None:
        self.path, self.schema = str(path), schema
        self.num_streams, self.shuffle_rows, self.threads = num_streams, shuffle_rows, threads
        predicate = None if where is None else parse_where(where)
        self.where = None if predicate is None else str(predicate)
        self.filesystem, self._root = resolve_path(self.path, filesystem)
        infos = list_files(self.filesystem, self._root, self.path, self.KIND, self.SUFFIXES)
        partitions = Partitions.of(self._below(info) for info in infos)
        self._selection = Selection(predicate or Constant(True), partitions)
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

    @property
    def num_rows(self) -> int:
        """Rows of all files that are taken."""
        return sum(sum(f.chunk_rows) for f in self.files)

    def num_batches(self, global_batch_size: int, drop_last: bool = False) -> int:
        """Global batches of one epoch; equal on all ranks without communication."""
        return count_batches(self.num_rows, global_batch_size, drop_last)

    def chunks(self) -> tuple[Chunk, ...]:
        """Every row group or record batch, files in order of their names."""
        out = []
        for file in self.files:
            first = 0
            for index, rows in enumerate(file.chunk_rows):
                out.append(Chunk(file, index, first, rows))
                first += rows
        return tuple(out)

    def order(
        self, seed: int = 0, epoch: int = 0, shuffle: bool = True, ordered: bool = False
    ) -> SampleOrder:
        """The order of one epoch's samples; `ordered` takes the rows as they lie in the files."""
        if ordered and shuffle:
            raise ConfigError(
                "ordered=True gives rows in file order, which contradicts shuffle=True; say "
                "shuffle=False."
            )
        chunk_rows = [rows for file in self.files for rows in file.chunk_rows]
        return SampleOrder(
            chunk_rows=tuple(chunk_rows),
            num_streams=1 if ordered else self.num_streams,
            shuffle_rows=self.shuffle_rows,
            seed=seed,
            epoch=epoch,
            shuffle=shuffle,
        )

    def local_files(self) -> list[tuple[str, int]]:
        """Path and size in bytes of every file on a local disk; none for an object store."""
        if not isinstance(self.filesystem, pafs.LocalFileSystem):
            return []
        return [(file.path, file.size) for file in self.files]

    def check_columns_exist(self, columns: Sequence[str]) -> None:
        """Check that every file has some columns beside the schema's, else raise InputError."""
        for file in self.files if columns else ():
            names = self.open(file).schema.names
            for column in columns:
                if names.count(column) != 1:
                    raise InputError(missing(column, self.open(file).schema, f"file {file.path!r}"))

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

    def loader(
        self,
        rank: int,
        num_ranks: int,
        global_batch_size: int,
        seed: int = 0,
        epoch: int = 0,
        start_batch: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        *,
        prefetch: int = 2,
        pin_memory: bool = False,
        ordered: bool = False,
        with_rows: bool = False,
        keep_columns: Sequence[str] = (),
        binary_labels: bool | Sequence[str] = False,
        threaded: bool = True,
    ) -> BatchLoader:
        """An iterator over one rank's parts of the global batches of one epoch.

        Args:
            rank, num_ranks: which part; a global batch has the same rows for every `num_ranks`.
            start_batch: the first global batch to yield.
            prefetch: batches decoded ahead in a background thread.
            pin_memory: put batches in page-locked memory (needs CUDA).
            ordered: batches hold rows in file order, rank 0 the first; needs shuffle=False.
            with_rows: batches say which file and row each of their rows comes from.
            keep_columns: columns that batches carry along unread in `Batch.origin.columns`.
            binary_labels: refuse labels other than 0 and 1: of all label columns, or of these.
            threaded: read in a thread; otherwise in that of the caller, when a batch is asked for,
                as a caller wants who reads ahead itself.
        Raises:
            ConfigError: a number out of range, or options that contradict each other.
            InputError: a file has no such column to keep.
        """
        if not 0 <= rank < num_ranks:
            raise ConfigError(f"rank={rank} of num_ranks={num_ranks}; ranks count from 0.")
        batches = self.num_batches(global_batch_size, drop_last)
        if not 0 <= start_batch <= batches:
            raise ConfigError(
                f"start_batch={start_batch}, but an epoch of {self.path!r} has {batches} batches "
                f"of {global_batch_size} rows."
            )
        if prefetch < 1:
            raise ConfigError(f"prefetch={prefetch}; it must be at least 1.")
        self.check_columns_exist(keep_columns)
        order, numbers = self.order(seed, epoch, shuffle, ordered), range(start_batch, batches)
        with_rows = with_rows or bool(keep_columns)
        binary = binary_columns(self.schema, binary_labels)
        reading = Reading(with_rows, tuple(keep_columns), binary, pin_memory)
        share = (rank, num_ranks, global_batch_size)
        made = read_batches(self, order, *share, numbers, reading)
        return BatchLoader(made, numbers, prefetch, threaded)

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
        cause = str(error).strip().split("\n")[0]
        return InputError(
            f"cannot read {path!r} as {self.KIND}: {cause}. It may be truncated or of another "
            "format; write it again."
        )

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
        check_columns(reader.schema, self.schema, f"file {info.path!r}")
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
