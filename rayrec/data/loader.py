"""`BatchLoader`: one rank's batches, decoded ahead by one background thread.

The thread walks the batches of `order`, keeps one decoded and shuffled block per stream that the
rank reads, and puts finished batches into a bounded queue; decoding releases the GIL. Errors reach
the consumer with their own type, after the batches before them. The thread holds no reference to
the loader, so closing or dropping the loader ends it. Memory: prefetch + 1 batches, one block per
stream, and the row groups that those streams stand in (streams in one row group share it).
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rayrec.data.batch import Batch
from rayrec.data.columns import Columns, read_columns
from rayrec.data.convert import Part, assemble
from rayrec.data.order import ChunkRange, SampleOrder
from rayrec.data.origin import origin_of_block
from rayrec.data.readers import STREAM_ROWS, FileReader
from rayrec.errors import InputError

if TYPE_CHECKING:
    from rayrec.data.files import Chunk, FileDataset


class Reading(NamedTuple):
    """What a loader reads beside the schema's columns, and what it refuses.

    Attributes:
        with_rows: batches say which file and row each of their rows comes from.
        keep_columns: columns that batches carry along unread; implies `with_rows`.
        binary_labels: labels other than 0 and 1 are refused.
        pin_memory: batches lie in page-locked memory.
    """

    with_rows: bool = False
    keep_columns: tuple[str, ...] = ()
    binary_labels: bool = False
    pin_memory: bool = False


class BatchLoader(Iterator[Batch]):
    """Iterator over one rank's `Batch`es; also a context manager. Made by `FileDataset.loader`.

    Attributes:
        batches: the global batches not yet yielded; `batches.start` is the cursor to save.
    """

    def __init__(
        self,
        dataset: FileDataset,
        order: SampleOrder,
        *,
        rank: int,
        num_ranks: int,
        global_batch_size: int,
        batches: range,
        prefetch: int,
        reading: Reading,
    ) -> None:
        self.batches = batches
        self._queue: queue.Queue[Batch | BaseException | None] = queue.Queue(prefetch)
        self._stop = threading.Event()
        made = read_batches(
            dataset,
            order,
            rank=rank,
            num_ranks=num_ranks,
            global_batch_size=global_batch_size,
            batches=batches,
            reading=reading,
        )
        args = (made, self._queue, self._stop)
        self._thread = threading.Thread(
            target=_produce, args=args, name="rayrec-loader", daemon=True
        )
        self._close = weakref.finalize(self, _end, self._thread, self._queue, self._stop)
        self._thread.start()

    def __len__(self) -> int:
        return len(self.batches)

    def __next__(self) -> Batch:
        if self._stop.is_set():
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, Batch):
            self.batches = self.batches[1:]
            return item
        self.close()
        if item is None:
            raise StopIteration
        raise item

    def close(self) -> None:
        """End the thread and drop what it decoded; later `next` calls stop."""
        self._close()

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _produce(
    made: Iterator[Batch], out: queue.Queue[Batch | BaseException | None], stop: threading.Event
) -> None:
    last: BaseException | None = None
    try:
        for batch in made:
            out.put(batch)
            if stop.is_set():
                return
    except BaseException as error:
        last = error
    out.put(last)


def _end(
    thread: threading.Thread, out: queue.Queue[Batch | BaseException | None], stop: threading.Event
) -> None:
    stop.set()
    while thread.is_alive() and thread is not threading.current_thread():
        try:
            out.get_nowait()  # frees a producer that waits for room
        except queue.Empty:
            thread.join(0.01)
    while not out.empty():
        out.get_nowait()
    out.put_nowait(None)  # a consumer that waits in another thread ends too


def read_batches(
    dataset: FileDataset,
    order: SampleOrder,
    *,
    rank: int,
    num_ranks: int,
    global_batch_size: int,
    batches: range,
    reading: Reading,
) -> Iterator[Batch]:
    """The batches of one rank, made when asked for, without a thread."""
    chunks = _ChunkSource(dataset, reading)
    streams: dict[int, _Stream] = {}
    for t in batches:
        parts = []
        for s, start, stop in order.rank_ranges(t, global_batch_size, rank, num_ranks):
            if s not in streams:
                streams[s] = _Stream(s, order, chunks)
            parts += streams[s].take(start, stop)
        yield assemble(
            parts, dataset.schema, order.batch_rows(t, global_batch_size), reading.pin_memory
        )


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
        if block != self.block or self.columns is None:
            ranges = list(self.order.block_chunks(self.stream, block))
            pieces = [piece for part in ranges for piece in self.cursor.read(part)]
            rows = _join(pieces)
            places = self.order.block_permutation(self.stream, block)
            if places is not None:
                rows = rows.take(pa.array(places))
            where = partial(_where, self.chunks.chunks, ranges, places)
            reading = self.chunks.reading
            self.columns = read_columns(
                rows, self.chunks.dataset.schema, where, reading.binary_labels
            )
            if reading.with_rows:
                kept = rows.select(list(reading.keep_columns)) if reading.keep_columns else None
                numbers = self.chunks.file_numbers
                self.columns.origin = origin_of_block(
                    self.chunks.chunks, numbers, ranges, places, kept
                )
            self.block = block
        return self.columns


def _join(pieces: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One record batch of all rows; files may differ in column order and width of numbers."""
    first = pieces[0].schema
    if len(pieces) == 1:
        return pieces[0]
    if all(piece.schema.equals(first) for piece in pieces):
        return pa.concat_batches(pieces)
    try:
        table = pa.concat_tables(
            [pa.Table.from_batches([piece]) for piece in pieces], promote_options="permissive"
        )
    except pa.ArrowException as error:
        cause = str(error).strip().split("\n")[0]
        raise InputError(
            f"columns differ in type between files: {cause}. Write all files with the same types."
        ) from error
    return table.combine_chunks().to_batches()[0]


def _where(
    chunks: tuple[Chunk, ...], ranges: list[ChunkRange], places: NDArray[np.int64] | None, row: int
) -> str:
    """Row of a shuffled block -> row of a file, in words."""
    at = row if places is None or not len(places) else int(places[row])
    for chunk, start, stop in ranges:
        if at < stop - start:
            return f"row {chunks[chunk].first_row + start + at} of {chunks[chunk].file.path!r}"
        at -= stop - start
    return "no row"


class _ChunkSource:
    """Open files and decoded chunks that the streams of one loader share.

    They are kept only while a stream holds them.
    """

    def __init__(self, dataset: FileDataset, reading: Reading) -> None:
        self.dataset, self.chunks, self.reading = dataset, dataset.chunks(), reading
        self.columns = list(dict.fromkeys([*dataset.schema.columns(), *reading.keep_columns]))
        self.file_numbers = {file.path: number for number, file in enumerate(dataset.files)}
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
        found = self._decoded.get(index)
        if found is None:
            found = self._decoded[index] = reader.read(self.chunks[index].index, self.columns)
        return found


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
            if part.chunk != self.index or part.start < self.first:
                self.reader, self.index, self.first = self.source.reader(chunk), part.chunk, 0
                if chunk.rows > STREAM_ROWS:
                    self.pieces, self.piece = (
                        self.reader.pieces(chunk.index, self.source.columns),
                        None,
                    )
                else:
                    self.pieces, self.piece = iter(()), self.source.decoded(part.chunk, self.reader)
            start = part.start
            while start < part.stop:
                if self.piece is None or start >= self.first + self.piece.num_rows:
                    self.first += 0 if self.piece is None else self.piece.num_rows
                    self.piece = next(self.pieces)
                    continue
                rows = self.piece.slice(
                    start - self.first, min(part.stop, self.first + self.piece.num_rows) - start
                )
                out += rows.to_batches() if isinstance(rows, pa.Table) else [rows]
                start += rows.num_rows
        except (pa.ArrowException, OSError, StopIteration) as error:
            raise self.source.dataset.broken(chunk.file.path, error) from error
        return out
