"""An even sample of the rows below a path, read without a schema.

The chunks of all files (row groups, record batches) are counted, and some of them, evenly spaced,
are read until there are enough rows. Of a large chunk only the first pieces are read. What the
statistics of Parquet files say of the range of integers is gathered from all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from rayrec.data.column_types import is_list, missing
from rayrec.data.found import FoundFiles, find_files
from rayrec.data.joining import joined
from rayrec.data.listing import DataFile
from rayrec.data.readers import ArrowReader, FileReader, ParquetReader, column_statistics
from rayrec.errors import InputError

MAX_STATISTICS = 20_000  # column chunks looked at; about a tenth of a second


@dataclass(frozen=True, slots=True)
class Sample:
    """Some rows of a data set.

    Attributes:
        table: the rows that were read, all columns.
        kind: Parquet or Arrow IPC.
        files: number of files.
        rows: rows of all files that folders do not leave out, whether `where` takes them or not.
        chunks: so many chunks were read.
        ranges: integer column -> least and largest value of all rows, where files tell of them.
    """

    table: pa.Table
    kind: str
    files: int
    rows: int
    chunks: int
    ranges: dict[str, tuple[int, int]]


def sample_rows(path: str, rows: int, where: str | None = None) -> Sample:
    """Read about so many rows of the files below a path, evenly spaced over them.

    Args:
        path: a folder, a file, or a URI of either, of Parquet or of Arrow IPC files.
        rows: read chunks until there are so many rows, or no more chunks.
        where: which rows are taken, see `FileDataset`.
    Raises:
        ConfigError: `where` cannot be read.
        InputError: nothing there, files of both kinds or without rows, a broken file, files whose
            columns differ in type, or a `where` that does not fit.
    """
    found, files = find_files(path, [ParquetReader, ArrowReader], where)
    chunks, ranges, held = [], _Ranges(), 0
    for file in files:
        reader = _open(found, file)
        ranges.add(reader)
        chunks += [(file, number) for number, size in enumerate(reader.chunk_rows) if size]
        held += sum(reader.chunk_rows)
    if not chunks:
        asked = "" if where is None else f" where {where}"
        raise InputError(
            f"{path!r} has {len(files)} {found.kind.KIND} files and no rows in them{asked}. Check "
            "the path."
        )
    count = min(len(chunks), max(1, -(-rows * len(chunks) // held)))
    # the middle of each of `count` equal parts
    chosen = [chunks[(2 * i + 1) * len(chunks) // (2 * count)] for i in range(count)]
    table = joined([_read(found, file, number, -(-rows // count)) for file, number in chosen])
    if not table.num_rows:
        raise InputError(
            f"none of the rows that were read of {path!r}, of {count} of {len(chunks)} chunks, "
            f"holds where {where}. Look at more rows, or ask for others."
        )
    return Sample(table, found.kind.KIND, len(files), held, count, ranges.told())


def _open(found: FoundFiles, file: DataFile) -> FileReader:
    reader = found.open(file, check=True)
    for name in reader.schema.names:
        if reader.schema.get_field_index(name) < 0:
            raise InputError(missing(name, reader.schema, f"file {file.path!r}"))
    return reader


def _read(found: FoundFiles, file: DataFile, chunk: int, rows: int) -> pa.Table:
    """Read the first rows of a chunk, or all of it where that is not much more."""
    reader, pieces, have = _open(found, file), [], 0
    columns = reader.schema.names
    try:
        if reader.chunk_rows[chunk] <= 2 * rows:
            table = reader.read(chunk, columns)
            return table if isinstance(table, pa.Table) else pa.Table.from_batches([table])
        for piece in reader.pieces(chunk, columns):
            pieces.append(piece)
            have += piece.num_rows
            if have >= rows:
                break
    except (pa.ArrowException, OSError) as error:
        raise found.broken(file.path, error) from error
    return pa.Table.from_batches(pieces)


class _Ranges:
    """The range of integer columns over all files, by the statistics of their row groups."""

    def __init__(self) -> None:
        self._ranges: dict[str, tuple[int, int] | None] = {}  # None: a row group does not tell it
        self._looked_at = 0

    def add(self, reader: FileReader) -> None:
        """Gather the statistics of one file."""
        wanted = {field.name for field in reader.schema if _holds_integers(field.type)}
        metadata = reader.metadata
        if metadata is not None:
            self._looked_at += metadata.num_row_groups * metadata.num_columns
        if metadata is None or self._looked_at > MAX_STATISTICS:
            self._ranges |= dict.fromkeys(wanted)
            return
        for group in range(metadata.num_row_groups):
            for name, told in column_statistics(metadata, group):
                # a chunk of nulls alone has no range, and takes none away
                if name not in wanted or (told and not told.has_min_max and not told.num_values):
                    continue
                known = told is not None and told.has_min_max and isinstance(told.min, int)
                here = (told.min, told.max) if known else None
                self._ranges[name] = _spanned(self._ranges.get(name, here), here)

    def told(self) -> dict[str, tuple[int, int]]:
        """The columns of which every row group tells."""
        return {name: both for name, both in self._ranges.items() if both is not None}


def _spanned(
    first: tuple[int, int] | None, second: tuple[int, int] | None
) -> tuple[int, int] | None:
    if first is None or second is None:
        return None
    return min(first[0], second[0]), max(first[1], second[1])


def _holds_integers(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind.value_type if is_list(kind) else kind))
