"""Histories cut from an event log on reading: what a user did strictly before each of the events.

A log has one row per event, the rows of a user together and in the order of time. `HistoryReader`
stands before the reader of a file and adds a column per history: for row i the values of the last n
rows of the same user before it. It is an Arrow list view, a begin and a length into the column of
the chunk itself, so that a chunk costs 8 bytes per row and history and no value is copied before a
batch is made. A filter comes after the cut: it takes events, and their histories stay whole.

A user lies in one chunk, so that no history needs another one. `check_log` reads the columns of
users and times of all files once, when a data set is made, and says where that does not hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rayrec.data.column_types import group_problem, is_list, missing, time_type_problem
from rayrec.data.numeric import first_true, mask, refuse_null
from rayrec.data.readers import FileReader
from rayrec.errors import InputError
from rayrec.layout.schema import FeatureSchema

_REMEDY = "`python -m jobs.convert_events` sorts a log"


@dataclass(frozen=True, kw_only=True, slots=True)
class Histories:
    """The histories of a schema.

    Attributes:
        user, time: columns of the log; without a time the rows of a user are in order as they lie.
        cuts: name of the history -> the column whose values it holds, and how many at most.
    """

    user: str
    time: str | None
    cuts: Mapping[str, tuple[str, int]]

    @classmethod
    def of(cls, schema: FeatureSchema) -> Histories | None:
        """Return the histories of a schema; None where it has none."""
        cuts = {}
        for one in (*schema.features, *schema.sequences):
            if one.history is not None:
                cuts[one.name] = one.column, one.history
        if schema.user is None:
            return None
        return cls(user=schema.user, time=schema.time, cuts=cuts)


class HistoryReader:
    """A file of events with the columns of its histories.

    Args:
        reader: the file.
        path: of the file, for messages.
    Raises:
        InputError: a column is missing, of a type of which no history is made, or has the name of
            a history.
    """

    def __init__(self, reader: FileReader, histories: Histories, path: str) -> None:
        self._reader, self._histories, self._path = reader, histories, path
        self.chunk_rows = reader.chunk_rows
        self.metadata: pq.FileMetaData | None = reader.metadata
        self.schema: pa.Schema = reader.schema
        source = f"file {path!r}"
        problem = group_problem(self._type_of(histories.user), histories.user, "user")
        if problem is None and histories.time is not None:
            problem = time_type_problem(self._type_of(histories.time), histories.time)
        if problem is not None:
            raise InputError(f"{source}: {problem}")
        for name, (column, _) in histories.cuts.items():
            kind = self._type_of(column)
            if is_list(kind):
                raise InputError(
                    f"{source}: column {column!r} of the history {name!r} holds lists ({kind}); a "
                    "history holds one value per event. Take another column, or write the lists "
                    "themselves and read them with most_recent."
                )
            if name in reader.schema.names:
                raise InputError(
                    f"{source} has a column {name!r}, which is the name of a history; give the "
                    "history another name."
                )
            self.schema = self.schema.append(pa.field(name, pa.list_view(kind)))

    def _type_of(self, column: str) -> pa.DataType:
        if self._reader.schema.get_field_index(column) < 0:
            raise InputError(missing(column, self._reader.schema, f"file {self._path!r}"))
        return self._reader.schema.field(column).type

    def read(self, chunk: int, columns: list[str]) -> pa.Table | pa.RecordBatch:
        """One chunk, whole.

        Raises:
            InputError: an event of a history is null; names row and file.
        """
        cuts = {name: cut for name, cut in self._histories.cuts.items() if name in columns}
        if not cuts:
            return self._reader.read(chunk, columns)
        own = [name for name in columns if name not in cuts]
        needed = [self._histories.user, *(column for column, _ in cuts.values())]
        rows = self._reader.read(chunk, list(dict.fromkeys([*own, *needed])))
        first, places = first_rows(_whole(rows.column(self._histories.user))), None
        arrays = {name: rows.column(name) for name in own}
        for name, (column, count) in cuts.items():
            values = _whole(rows.column(column))
            self._refuse_null(values, column, chunk)
            places = np.arange(len(values)) if places is None else places
            begins = np.maximum(first, places - count)
            arrays[name] = pa.ListViewArray.from_arrays(
                pa.array(begins.astype(np.int32)),
                pa.array((places - begins).astype(np.int32)),
                values,
            )
        return type(rows).from_arrays([arrays[name] for name in columns], names=columns)

    def pieces(self, chunk: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """One chunk in consecutive pieces; in one piece where histories are cut from it."""
        if not set(self._histories.cuts) & set(columns):
            yield from self._reader.pieces(chunk, columns)
            return
        rows = self.read(chunk, columns)
        yield from rows.to_batches() if isinstance(rows, pa.Table) else [rows]

    def check(self, last: Any) -> Any:
        """Check that users lie in order, each in one chunk, and that their times do not fall.

        Args:
            last: the user of the last row before this file; None at the beginning.
        Returns:
            The user of the last row.
        Raises:
            InputError: names column, row and file.
        """
        log = self._histories
        columns = [log.user] if log.time is None else [log.user, log.time]
        for chunk, count in enumerate(self.chunk_rows):
            if not count:
                continue
            rows = self._reader.read(chunk, columns)
            users = _whole(rows.column(log.user))
            self._refuse_null(users, log.user, chunk)
            falls = mask(pc.less(users.slice(1), users.slice(0, count - 1)))
            before, after = last, users[0].as_py()
            row = 0
            if not (before is not None and after <= before) and falls.any():
                row = first_true(falls) + 1
                before, after = users[row - 1].as_py(), users[row].as_py()
            if before is not None and after < before:
                raise InputError(
                    f"user {after!r} follows user {before!r} in column {log.user!r} in "
                    f"{self._place(chunk, row)}; a log that histories are cut from is sorted by "
                    f"user, then time: {_REMEDY}."
                )
            if before is not None and after == before:
                raise InputError(
                    f"the events of user {after!r} go on in {self._place(chunk, 0)}, where a row "
                    "group or record batch begins; a history is cut inside of one. Write all "
                    f"events of a user into one: {_REMEDY} so."
                )
            if log.time is not None:
                self._check_times(_whole(rows.column(log.time)), users, chunk)
            last = users[count - 1].as_py()
        return last

    def _check_times(self, times: pa.Array, users: pa.Array, chunk: int) -> None:
        column = self._histories.time
        assert column is not None
        self._refuse_null(times, column, chunk)
        falls = pc.less(times.slice(1), times.slice(0, len(times) - 1))
        same = pc.equal(users.slice(1), users.slice(0, len(users) - 1))
        wrong = mask(pc.and_(falls, same))
        if wrong.any():
            row = first_true(wrong) + 1
            raise InputError(
                f"time column {column!r} goes back from {times[row - 1]} to {times[row]} within "
                f"user {users[row].as_py()!r} in {self._place(chunk, row)}; sort the log by user, "
                f"then time: {_REMEDY}."
            )

    def _refuse_null(self, values: pa.Array, column: str, chunk: int) -> None:
        remedy = "Leave out events without a user, a time or a value that histories hold."
        where = partial(self._place, chunk)
        refuse_null(values, f"column {column!r} of the log", where, remedy)

    def _place(self, chunk: int, row: int) -> str:
        return f"row {sum(self.chunk_rows[:chunk]) + row} of {self._path!r}"


def _whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array of plain values."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def first_rows(users: pa.Array) -> NDArray[np.int64]:
    """Return (B,) the first row of the user of each row; rows of one user lie together."""
    firsts = np.zeros(len(users), np.int64)
    changes = mask(pc.not_equal(users.slice(1), users.slice(0, max(0, len(users) - 1))))
    places = np.flatnonzero(changes) + 1
    firsts[places] = places
    return np.maximum.accumulate(firsts)
