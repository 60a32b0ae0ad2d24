"""Events of files in any order, dealt out by ranges of users, so that each is sorted alone.

One pass over the users counts their events, which tells where a range ends; another one deals all
events into a file per range. Memory is a piece of a file, and a count per user.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc as ipc

from rayrec.data.column_types import group_problem, missing, time_type_problem
from rayrec.data.found import find_files
from rayrec.data.listing import DataFile
from rayrec.data.numeric import refuse_null, row_name
from rayrec.data.readers import ArrowReader, ParquetReader
from rayrec.errors import InputError

_COUNTED_ROWS = 1 << 16  # counts that are summed up at a time, where there are less users


class EventSource:
    """The events of a folder, file or URI, in the order of the files.

    Args:
        path: of Parquet or Arrow IPC files.
        user, time: columns that every file has.
        reserved: names that no column may have.
    Raises:
        InputError: nothing there, a broken file, or columns that do not fit.
    """

    def __init__(self, path: str, user: str, time: str, reserved: Sequence[str]) -> None:
        self._found, self._files = find_files(path, [ParquetReader, ArrowReader], None)
        self._user, self._time = user, time
        schemas = [self._found.open(file).schema for file in self._files]
        columns = dict.fromkeys(name for schema in schemas for name in schema.names)
        for file, schema in zip(self._files, schemas, strict=True):
            source = f"file {file.path!r}"
            for name in (user, time, *columns):
                if schema.names.count(name) != 1:
                    raise InputError(missing(name, schema, source))
            for name in reserved:
                if name in schema.names:
                    raise InputError(
                        f"{source} has a column {name!r}, which a sorted log gets; rename it."
                    )
            problem = group_problem(schema.field(user).type, user, "user")
            problem = problem or time_type_problem(schema.field(time).type, time)
            if problem is not None:
                raise InputError(f"{source}: {problem}")
        try:
            self._schema = pa.unify_schemas([*map(_plain, schemas)], promote_options="permissive")
        except pa.ArrowException as error:
            raise InputError(
                f"columns differ in type between files: {error}. Write all files with the same "
                "types."
            ) from error
        for field in self._schema:
            _refuse_unsortable(field)

    def buckets(self, most_rows: int, spare: Path) -> Iterator[pa.Table]:
        """Yield the events by ranges of users, in the order of the files within each.

        Args:
            most_rows: of a range; a user who has more is a range alone.
            spare: a folder for one file per range.
        Raises:
            InputError: a file cannot be read, or a user or a time is null; names row and file.
        """
        last_users = self._last_users(most_rows)
        paths = [spare / f"{number}.arrow" for number in range(len(last_users) + 1)]
        writers = [ipc.new_file(str(path), self._schema) for path in paths]
        try:
            for file, first, piece in self._pieces(self._schema.names):
                rows = _cast(piece, self._schema, file.path)
                where = partial(row_name, first, repr(file.path))
                for name in (self._user, self._time):
                    remedy = "Leave out events without a user or a time."
                    refuse_null(rows[name], f"column {name!r}", where, remedy)
                for number, own in enumerate(self._by_range(rows, last_users)):
                    for batch in own.combine_chunks().to_batches():
                        writers[number].write(batch)
        finally:
            for writer in writers:
                writer.close()
        for path in paths:
            with pa.memory_map(str(path)) as mapped:
                yield ipc.open_file(mapped).read_all()
            path.unlink()

    def _by_range(self, rows: pa.Table, last_users: pa.Array) -> Iterator[pa.Table]:
        if not len(last_users):
            yield rows
            return
        users = rows[self._user].combine_chunks()
        # users as numbers, in whose order texts are as well
        ranks = pc.rank(pa.concat_arrays([last_users, users]), tiebreaker="min").to_numpy()
        bounds, own = ranks[: len(last_users)], ranks[len(last_users) :]
        numbers = np.searchsorted(bounds, own, side="left")
        for number in range(len(last_users) + 1):
            yield rows.filter(pa.array(numbers == number))

    def _last_users(self, most_rows: int) -> pa.Array:
        """The last user of each range but the last."""
        counts = self._count_users()
        places, rows = [], 0
        for place, count in enumerate(counts["rows"].to_pylist()):
            if rows and rows + count > most_rows:
                places.append(place - 1)
                rows = 0
            rows += count
        return counts[self._user].combine_chunks().take(pa.array(places, pa.int64()))

    def _count_users(self) -> pa.Table:
        """Each user with the number of their rows, sorted by user."""
        key = self._schema.field(self._user)
        counts = pa.table({self._user: pa.array([], key.type), "rows": pa.array([], pa.int64())})
        waiting: list[pa.Table] = []
        for file, _, piece in self._pieces([self._user]):
            users = _cast(piece, pa.schema([key]), file.path)
            own = users.group_by(self._user).aggregate([([], "count_all")])
            waiting.append(own.rename_columns(counts.column_names))
            if sum(map(len, waiting)) > max(len(counts), _COUNTED_ROWS):
                counts, waiting = self._summed([counts, *waiting]), []
        return self._summed([counts, *waiting]).sort_by(self._user)

    def _summed(self, counts: Sequence[pa.Table]) -> pa.Table:
        grouped = pa.concat_tables(counts).group_by(self._user)
        return grouped.aggregate([("rows", "sum")]).rename_columns([self._user, "rows"])

    def _pieces(self, columns: list[str]) -> Iterator[tuple[DataFile, int, pa.RecordBatch]]:
        """Yield the rows of all files, with the number of the first of each piece in its file."""
        for file in self._files:
            first = 0
            try:
                reader = self._found.open(file)
                for chunk in range(len(reader.chunk_rows)):
                    for piece in reader.pieces(chunk, columns):
                        yield file, first, piece
                        first += piece.num_rows
            except (pa.ArrowException, OSError) as error:
                raise self._found.broken(file.path, error) from error


def _plain(schema: pa.Schema) -> pa.Schema:
    """The columns of a file with dictionaries as their values, which ranges of files share; any may
    be null, since Arrow joins no columns of which one may not.
    """
    for place, field in enumerate(schema):
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        schema = schema.set(place, field.with_type(kind).with_nullable(True))
    return schema.remove_metadata()


def _cast(rows: pa.RecordBatch, schema: pa.Schema, path: str) -> pa.Table:
    """Return rows with the columns of a schema, in its order and of its types.

    Raises:
        InputError: a value does not fit into the type that all files share; names column and file.
    """
    columns = []
    for field in schema:
        try:
            columns.append(rows.column(field.name).cast(field.type))
        except pa.ArrowInvalid as error:
            raise InputError(
                f"column {field.name!r} of {path!r} does not fit {field.type}, which holds it for "
                f"all files: {error}. Write all files with the same types."
            ) from error
    return pa.table(columns, schema=schema)


def _refuse_unsortable(field: pa.Field) -> None:
    """Refuse a column whose values Arrow cannot put into another order."""
    try:
        pa.array([], field.type).take(pa.array([], pa.int64()))
    except pa.ArrowNotImplementedError:
        raise InputError(
            f"column {field.name!r} has type {field.type}, which cannot be sorted by user; cast it "
            "to string or to another plain type, or leave it out."
        ) from None
