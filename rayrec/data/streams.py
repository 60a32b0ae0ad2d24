"""One rank's batches of an epoch, read stream by stream, without a thread.

A stream keeps one decoded and shuffled block. Streams that stand in one row group or record batch
share what is decoded of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rayrec.data.batch import Batch, BatchPlace
from rayrec.data.column_types import is_forgotten, one_batch
from rayrec.data.columns import Columns, read_columns
from rayrec.data.convert import Part, assemble
from rayrec.data.hashing import mix_int
from rayrec.data.joining import joined
from rayrec.data.order import ChunkRange, SampleOrder
from rayrec.data.origin import RowOrigin
from rayrec.data.readers import STREAM_ROWS, FileReader
from rayrec.data.selected import ROW

if TYPE_CHECKING:
    from rayrec.data.listing import Chunk
    from rayrec.data.rows import RowDataset


_PLACES = 4  # what the derived seed is for, beside those of `order` and `candidates`


class Reading(NamedTuple):
    """The columns that a loader reads beside the schema's, and the labels that it refuses.

    Attributes:
        with_rows: batches say which file and row each of their rows comes from.
        keep_columns: columns that batches carry along unread; implies `with_rows`.
        binary_labels: the label columns in which values other than 0 and 1 are refused.
        pin_memory: batches lie in page-locked memory.
    """

    with_rows: bool = False
    keep_columns: tuple[str, ...] = ()
    binary_labels: tuple[str, ...] = ()
    pin_memory: bool = False


def read_batches(
    dataset: RowDataset,
    order: SampleOrder,
    rank: int,
    num_ranks: int,
    global_batch_size: int,
    batches: range,
    reading: Reading,
) -> Iterator[Batch]:
    """The batches of one rank, made when asked for, without a thread."""
    chunks = _ChunkSource(dataset, reading)
    streams: dict[int, _Stream] = {}
    seed = mix_int(_PLACES, order.seed, order.epoch)
    for t in batches:
        parts = []
        for s, start, stop in order.rank_ranges(t, global_batch_size, rank, num_ranks):
            if s not in streams:
                streams[s] = _Stream(s, order, chunks)
            parts += streams[s].take(start, stop)
        rows = order.batch_rows(t, global_batch_size)
        batch = assemble(parts, dataset.schema, rows, reading.pin_memory)
        batch.place = BatchPlace(seed, t, rank * rows // num_ranks)
        yield batch


class _Stream:
    """One stream's current block, decoded, shuffled and as numpy columns; moves forward only."""

    def __init__(self, stream: int, order: SampleOrder, chunks: _ChunkSource) -> None:
        self.stream, self.order, self.chunks = stream, order, chunks
        self.cursor = _ChunkCursor(chunks)
        self.block = -1
        self.columns: Columns | None = None

    def take(self, start: int, stop: int) -> list[Part]:
        """Rows [start, stop) of the stream, in shuffled order."""
        parts, size = [], self.order.shuffle_rows
        while start < stop:
            block, first = divmod(start, size)
            end = min(stop - block * size, size)
            parts.append(Part(self._load(block), first, end))
            start = block * size + end
        return parts

    def _load(self, block: int) -> Columns:
        # Consecutive batches take rows of the same block, which is decoded once.
        if block == self.block and self.columns is not None:
            return self.columns
        source, reading = self.chunks, self.chunks.reading
        ranges = list(self.order.block_chunks(self.stream, block))
        rows = _join([piece for part in ranges for piece in self.cursor.read(part)])
        places = self.order.block_permutation(self.stream, block)
        # shuffled once as Arrow rows; all that follows are views of these
        if places is not None:
            rows = rows.take(pa.array(places))
        row_numbers = None
        if source.dataset.filters_rows:
            row_numbers = rows.column(ROW).to_numpy()
        where = partial(source.row_name, ranges, places, row_numbers)
        dataset = source.dataset
        columns = read_columns(
            rows, dataset.schema, where, reading.binary_labels, dataset.with_labels
        )
        if reading.with_rows:
            kept = rows.select(list(reading.keep_columns)) if reading.keep_columns else None
            columns.origin = source.origin(ranges, places, row_numbers)._replace(columns=kept)
        self.block, self.columns = block, columns
        return columns


def _join(pieces: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One record batch of all rows; see `joined`."""
    first = pieces[0].schema
    if len(pieces) == 1:
        return pieces[0]
    if all(_reads_as(piece.schema, first) for piece in pieces[1:]):
        with suppress(pa.ArrowInvalid):  # of more than 2 GiB of text
            return pa.concat_batches(pieces)
    return one_batch(joined([pa.Table.from_batches([piece]) for piece in pieces]))


def _reads_as(own: pa.Schema, other: pa.Schema) -> bool:
    """Return True for columns of the same types of which the same were forgotten; files may tell
    other things of themselves.
    """
    if own.equals(other, check_metadata=True):
        return True
    return own.equals(other) and [*map(is_forgotten, own)] == [*map(is_forgotten, other)]


class _ChunkSource:
    """Open files and decoded chunks that the streams of one loader share.

    They are kept only while a stream holds them.
    """

    def __init__(self, dataset: RowDataset, reading: Reading) -> None:
        self.dataset, self.chunks, self.reading = dataset, dataset.chunks(), reading
        self.columns = list(dict.fromkeys([*dataset.columns, *reading.keep_columns]))
        if dataset.filters_rows:
            # chunks give a part of their rows, which say their numbers themselves
            self.columns.append(ROW)
        self._file_numbers = {file.path: number for number, file in enumerate(dataset.files)}
        # weak: a chunk lives as long as a stream stands in it, and streams in one chunk share it
        self._decoded: weakref.WeakValueDictionary[int, pa.Table | pa.RecordBatch] = (
            weakref.WeakValueDictionary()
        )
        self._readers: weakref.WeakValueDictionary[str, FileReader] = weakref.WeakValueDictionary()

    def reader(self, chunk: Chunk) -> FileReader:
        reader = self._readers.get(chunk.file.path)
        if reader is None:
            reader = self._readers[chunk.file.path] = self.dataset.open(chunk.file)
        return reader

    def decoded(self, index: int, reader: FileReader) -> pa.Table | pa.RecordBatch:
        rows = self._decoded.get(index)
        if rows is None:
            rows = self._decoded[index] = reader.read(self.chunks[index].index, self.columns)
        return rows

    def origin(
        self,
        ranges: Sequence[ChunkRange],
        places: NDArray[np.int64] | None,
        numbers: NDArray[np.int64] | None,
    ) -> RowOrigin:
        """The origin of one block of rows.

        Args:
            ranges: the parts of chunks that make up the block, in order.
            places: which row of the block in that order comes i-th; None for the order as it is.
            numbers: (B,) number of each row in its file, in the order of `places`, where chunks
                give a part of their rows; None where they give all.
        """
        files, rows = [], []
        for part in ranges:
            chunk, count = self.chunks[part.chunk], part.stop - part.start
            files.append(np.full(count, self._file_numbers[chunk.file.path], np.int32))
            first = chunk.first_row + part.start
            rows.append(np.arange(first, first + count, dtype=np.int64))
        file, row = np.concatenate(files), np.concatenate(rows)
        if places is not None:
            file, row = file[places], row[places]
        return RowOrigin(file, row if numbers is None else numbers, None)

    def row_name(
        self,
        ranges: Sequence[ChunkRange],
        places: NDArray[np.int64] | None,
        numbers: NDArray[np.int64] | None,
        row: int,
    ) -> str:
        """The row of a file that is a row of a block, in words; see `origin`."""
        origin = self.origin(ranges, places, numbers)
        return f"row {origin.row[row]} of {self.dataset.files[origin.file[row]].path!r}"


class _ChunkCursor:
    """Reads forward through chunks; of a large chunk it holds one piece at a time."""

    def __init__(self, source: _ChunkSource) -> None:
        self.source = source
        self.index = -1
        self.reader: FileReader | None = None
        self.pieces: Iterator[pa.RecordBatch] = iter(())
        self.piece: pa.Table | pa.RecordBatch | None = None
        self.first = 0  # row of the chunk where the current piece begins

    def read(self, part: ChunkRange) -> list[pa.RecordBatch]:
        """Record batches that hold the rows of one part of a chunk.

        Raises:
            InputError: the file cannot be read.
        """
        chunk = self.source.chunks[part.chunk]
        out: list[pa.RecordBatch] = []
        try:
            # Pieces of a large chunk come forward only; a step back begins it anew.
            if part.chunk != self.index or part.start < self.first:
                self.reader, self.index, self.first = self.source.reader(chunk), part.chunk, 0
                self.pieces, self.piece = iter(()), None
                if chunk.rows > STREAM_ROWS:
                    self.pieces = self.reader.pieces(chunk.index, self.source.columns)
                else:
                    self.piece = self.source.decoded(part.chunk, self.reader)
            start = part.start
            while start < part.stop:
                if self.piece is None or start >= self.first + self.piece.num_rows:
                    self.first += 0 if self.piece is None else self.piece.num_rows
                    self.piece = next(self.pieces)
                    continue
                stop = min(part.stop, self.first + self.piece.num_rows)
                rows = self.piece.slice(start - self.first, stop - start)
                out += rows.to_batches() if isinstance(rows, pa.Table) else [rows]
                start += rows.num_rows
        except (pa.ArrowException, OSError, StopIteration) as error:
            raise self.source.dataset.broken(chunk.file.path, error) from error
        return out
