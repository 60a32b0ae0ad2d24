"""Scores by a predictor of the rows of some chunks, streamed from their files.

Batches have as many rows as is asked for, across the borders of chunks and files, so the scores
follow from the chunks alone. In memory are a piece of a chunk and the rows of one row group of the
output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

import pyarrow as pa
from torch import Tensor

from rayrec.data import Batch, FileDataset
from rayrec.data.columns import read_columns
from rayrec.data.convert import Part, assemble
from rayrec.data.listing import Chunk
from rayrec.data.readers import FileReader
from rayrec.data.scored import PART_ROWS, ScoredFolder
from rayrec.data.scored_files import PartWriter, scored_rows
from rayrec.data.selected import ROW
from rayrec.serve.predictor import Predictor

Unit = tuple[Chunk, ...]
Piece = tuple[Part, pa.RecordBatch]  # rows of the data, and those of the columns to be copied


def units_of(data: FileDataset) -> list[Unit]:
    """Return all chunks that have rows, in order, in groups that make one file of scores each.

    A group has at most `PART_ROWS` rows, or is one chunk.
    """
    units: list[list[Chunk]] = []
    rows = 0
    for chunk in data.chunks():
        if not chunk.rows:
            continue
        if not units or rows + chunk.rows > PART_ROWS:
            units.append([])
            rows = 0
        units[-1].append(chunk)
        rows += chunk.rows
    return [tuple(unit) for unit in units]


def score_unit(
    predictor: Predictor,
    data: FileDataset,
    unit: Unit,
    path: Path,
    folder: ScoredFolder,
    batch_size: int,
    on_batch: Callable[[], None] = lambda: None,
) -> int:
    """Write the scores of the rows of one unit; returns the number of rows.

    Args:
        path: path of the file of scores.
        batch_size: number of rows scored at a time.
        on_batch: called before every batch; its error ends the work.
    Raises:
        InputError: a file cannot be read, or holds what the model cannot take.
        SaveError: the storage refuses.
    """
    writer = PartWriter(path)
    try:
        for batch, kept in _batches(_pieces(data, unit, folder), data, batch_size):
            on_batch()
            scores = predictor.predict_batch(batch)
            each = [scores] if isinstance(scores, Tensor) else list(scores.values())
            writer.add(scored_rows(folder, each, kept))
        writer.close()
    except BaseException:
        writer.abandon()
        raise
    return writer.rows


def _pieces(data: FileDataset, unit: Unit, folder: ScoredFolder) -> Iterator[Piece]:
    """Yield the rows of a unit, piece by piece.

    Raises:
        InputError: a file cannot be read, or a row is bad; names both.
    """
    columns = list(dict.fromkeys([*data.columns, *folder.columns.names]))
    if data.filters_rows:
        columns.append(ROW)  # the rows that are taken say their numbers
    for file, chunks in groupby(unit, key=lambda chunk: chunk.file):
        reader = data.open(file)
        for chunk in chunks:
            first = chunk.first_row
            for rows in _read(data, reader, chunk, columns):
                numbers = rows.column(ROW) if data.filters_rows else None
                where = partial(_where, file.path, first, numbers)
                read = read_columns(rows, data.schema, where, with_labels=False)
                first += rows.num_rows
                yield Part(read, 0, read.rows), rows.select(folder.columns.names)


def _read(
    data: FileDataset, reader: FileReader, chunk: Chunk, columns: list[str]
) -> Iterator[pa.RecordBatch]:
    try:
        yield from (piece for piece in reader.pieces(chunk.index, columns) if piece.num_rows)
    except (pa.ArrowException, OSError) as error:
        raise data.broken(chunk.file.path, error) from error


def _where(path: str, first: int, numbers: pa.Array | None, row: int) -> str:
    return f"row {first + row if numbers is None else numbers[row]} of {path!r}"


def _batches(
    pieces: Iterator[Piece], data: FileDataset, size: int
) -> Iterator[tuple[Batch, list[pa.RecordBatch]]]:
    """Yield batches of `size` rows, the last one with the remaining rows."""
    parts: list[Part] = []
    kept: list[pa.RecordBatch] = []
    rows = 0
    for part, own in pieces:
        start = 0
        while start < part.stop:
            stop = min(part.stop, start + size - rows)
            parts.append(Part(part.columns, start, stop))
            kept.append(own.slice(start, stop - start))
            rows += stop - start
            start = stop
            if rows == size:
                yield assemble(parts, data.schema, rows), kept
                parts, kept, rows = [], [], 0
    if rows:
        yield assemble(parts, data.schema, rows), kept
