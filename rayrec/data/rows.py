"""Data sets of chunks: the order of their samples, and loaders of it.

What a `RowDataset` holds as chunks and how one is opened its subclasses say: files (`files`), or
blocks of Ray Data in `rayrec.driver`. All else is here once, so that order, resuming and errors are
the same for each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Self

from rayrec.data.column_types import binary_columns, missing
from rayrec.data.listing import Chunk, DataFile
from rayrec.data.loader import BatchLoader
from rayrec.data.order import SampleOrder, count_batches
from rayrec.data.readers import FileReader
from rayrec.data.streams import Reading, read_batches
from rayrec.errors import ConfigError, InputError
from rayrec.layout.schema import FeatureSchema


class RowDataset(ABC):
    """Rows in chunks, in an order that does not depend on the number of ranks.

    Attributes:
        path: what messages call the data.
        schema: what the columns mean.
        files: what holds the chunks, in order.
        num_streams: S of `order`: so many ranks can read without reading the same rows.
        shuffle_rows: rows per shuffled block; a rank holds one block per stream it reads.
        with_labels: whether labels and weights of rows are read; else labels are zeros, and rows
            weigh 1.
    """

    path: str
    schema: FeatureSchema
    files: tuple[DataFile, ...]
    num_streams: int
    shuffle_rows: int
    with_labels: bool = True
    _chunks: tuple[Chunk, ...] | None = None  # of `of_chunks`

    @abstractmethod
    def open(self, file: DataFile) -> FileReader:
        """Open one of `files`; InputError when it cannot be read."""

    @abstractmethod
    def broken(self, path: str, error: Exception) -> InputError:
        """The error for one of `files` that cannot be read."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A short hash of all that the order of samples depends on."""

    @property
    def filters_rows(self) -> bool:
        """True when chunks give some of their rows, which then carry their numbers."""
        return False

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read, each once."""
        return self.schema.columns(self.with_labels)

    def without_labels(self) -> Self:
        """The same rows, whose labels and weights are not read; for what is to be predicted."""
        same = copy(self)
        same.with_labels = False
        return same

    def of_chunks(self, chunks: Sequence[Chunk]) -> Self:
        """The rows of some chunks alone, in this order; rows keep their numbers in their files.

        The part's loaders do not look for columns to keep in every file: the caller has done so for
        all parts together, by `check_columns_exist`.
        """
        part = copy(self)
        part._chunks = tuple(chunks)
        part.files = tuple({one.file.path: one.file for one in chunks}.values())
        return part

    @property
    def num_rows(self) -> int:
        """Rows of all files that are taken."""
        return sum(chunk.rows for chunk in self.chunks())

    def num_batches(self, global_batch_size: int, drop_last: bool = False) -> int:
        """Global batches of one epoch; equal on all ranks without communication."""
        return count_batches(self.num_rows, global_batch_size, drop_last)

    def chunks(self) -> tuple[Chunk, ...]:
        """Every row group or record batch, files in order of their names."""
        if self._chunks is not None:
            return self._chunks
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
        return SampleOrder(
            chunk_rows=tuple(chunk.rows for chunk in self.chunks()),
            num_streams=1 if ordered else self.num_streams,
            shuffle_rows=self.shuffle_rows,
            seed=seed,
            epoch=epoch,
            shuffle=shuffle,
        )

    def check_columns_exist(self, columns: Sequence[str]) -> None:
        """Check that every file has some columns beside the schema's, else raise InputError."""
        for file in self.files if columns else ():
            names = self.open(file).schema.names
            for column in columns:
                if names.count(column) != 1:
                    raise InputError(missing(column, self.open(file).schema, f"file {file.path!r}"))

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
        if self._chunks is None:
            self.check_columns_exist(keep_columns)
        order, numbers = self.order(seed, epoch, shuffle, ordered), range(start_batch, batches)
        with_rows = with_rows or bool(keep_columns)
        binary = binary_columns(self.schema, binary_labels)
        reading = Reading(with_rows, tuple(keep_columns), binary, pin_memory)
        share = (rank, num_ranks, global_batch_size)
        made = read_batches(self, order, *share, numbers, reading)
        return BatchLoader(made, numbers, prefetch, threaded)
