"""Event logs that histories are cut from: sorted by user and time once, and split.

`write_event_log` reads a log of any order (Parquet or Arrow IPC) and writes it as Parquet, sorted
by user, then time, then place in the source, in row groups that hold whole users. Columns are
added: `split` says train, validation or test, `position` counts the events of the user before this
one, and `window_end`, if asked for, marks samples whose histories hold each training event once. A
filter on `split` chooses the samples; their histories come from all events before them.

It goes over the log twice. The first pass counts the events of each user, the second deals them
into files of ranges of users, each of which is then sorted in memory: that of `BUCKET_ROWS` events,
or of the user who has more, beside a count per user. The disk holds the log once more meanwhile.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.column_types import roomy
from rayrec.data.converted import GROUP_ROWS, PartsWriter, new_data_set
from rayrec.data.event_source import EventSource
from rayrec.data.histories import first_rows
from rayrec.data.numeric import PER_SECOND
from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields

BUCKET_ROWS = 1 << 22  # events that are sorted at a time
SPLIT, POSITION, WINDOW_END = "split", "position", "window_end"
TRAIN, VALIDATION, TEST = PARTS = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True, slots=True)
class EventSplit:
    """The events that are held out.

    Without a time, the last event of every user is the test and the one before it the validation;
    of a user with less than three events all are for training. Among equal times the event that
    stands later in the source is the later one.

    Attributes:
        test_from: events of this time and later are the test, whoever's they are; so events of
            equal times are never parted.
        validation_from: of the others, those of this time and later are the validation.
        windows: mark the events at which a window of so many training events ends: the last one of
            a user, and every so many before it. A model that finds each item of a history from
            those before it sees every event once so.
    Raises:
        ConfigError: `validation_from` is not before `test_from`, or windows are empty.
    """

    test_from: int | None = None
    validation_from: int | None = None
    windows: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.windows is not None and self.windows < 1:
            raise ConfigError(f"windows={self.windows}; a window has at least 1 event.")
        if self.validation_from is not None and (
            self.test_from is None or self.validation_from >= self.test_from
        ):
            raise ConfigError(
                f"validation_from={self.validation_from} and test_from={self.test_from}; the "
                "validation ends where the test begins, so give a later test_from."
            )


class WrittenLog(NamedTuple):
    """What was written: the folder of the log, its users, and its events by split."""

    path: Path
    users: int
    events: dict[str, int]


def write_event_log(
    source: str,
    out: str | Path,
    *,
    user: str,
    time: str,
    split: EventSplit | None = None,
    overwrite: bool = False,
) -> WrittenLog:
    """Sort and split a log.

    Args:
        source: a folder, a file or a URI of Parquet or Arrow IPC files, read in the order of their
            paths; all columns are kept.
        out: a local folder that gets log/.
        user: column of whose event a row is: whole numbers or text.
        time: column of whole numbers, or of timestamps, which become whole seconds since 1970.
        split: the events that are held out; the last ones of every user by default.
        overwrite: replace what an earlier conversion left in `out`.
    Raises:
        InputError: a file cannot be read, or lacks a column, or a user or a time is null.
        ConfigError: `out` holds data already, or a part of the split would be empty.
    """
    events_of = EventSource(source, user, time, reserved=(SPLIT, POSITION, WINDOW_END))
    with new_data_set(out, overwrite) as folder, tempfile.TemporaryDirectory(dir=folder) as spare:
        buckets = events_of.buckets(BUCKET_ROWS, Path(spare))
        users, events = write_sorted(buckets, folder / "log", user, time, split or EventSplit())
    return WrittenLog(Path(out) / "log", users, events)


def write_sorted(
    buckets: Iterable[pa.Table], folder: Path, user: str, time: str, split: EventSplit
) -> tuple[int, dict[str, int]]:
    """Sort and write the events of each bucket, whose users come after those of the one before.

    Returns:
        Number of users, and of events by split.
    Raises:
        ConfigError: there are no events, or none for training or for the test.
    """
    users, events = 0, Counter[str]()
    writer = PartsWriter(folder, groups_per_file=64)
    try:
        for bucket in buckets:
            rows = roomy(bucket).combine_chunks()
            order = pc.sort_indices(rows, [(user, "ascending"), (time, "ascending")])
            times = rows[time].take(order)
            if pa.types.is_timestamp(times.type):
                # rounded down, also before 1970, so that the seconds ascend as the times do
                seconds = times.cast(pa.int64()).to_numpy() // PER_SECOND[times.type.unit]
                times = pa.array(seconds)
            first = first_rows(rows[user].take(order).combine_chunks())
            starts = np.flatnonzero(first == np.arange(len(first)))
            users += len(starts)
            parts = _parts(first, starts, times.to_numpy(), split)
            events.update(dict(zip(PARTS, np.bincount(parts, minlength=3).tolist(), strict=True)))
            names = pa.DictionaryArray.from_arrays(pa.array(parts), pa.array(PARTS))
            made = {time: times, SPLIT: names.dictionary_decode()}
            made[POSITION] = pa.array(np.arange(len(first)) - first)
            if split.windows is not None:
                made[WINDOW_END] = pa.array(_window_ends(first, parts, split.windows))
            for begin, end in _groups([*starts.tolist(), len(first)]):
                own = rows.take(order.slice(begin, end - begin)).cast(bucket.schema)
                for name, one in made.items():
                    own = _with_column(own, name, one.slice(begin, end - begin))
                writer.add_group(own)
    finally:
        writer.close()
    for part in (TRAIN, TEST):
        if not events[part]:
            total = sum(events.values())
            raise ConfigError(
                f"of {total} events of {users} users none is for the {part}. Choose other times "
                "to split at; leaving out the last needs users with three events."
            )
    return users, {part: events[part] for part in PARTS}


def _with_column(rows: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Return rows with a column, in its place where they have one; others keep their fields."""
    place = rows.schema.get_field_index(name)
    if place < 0:
        return rows.append_column(name, values)
    return rows.set_column(place, rows.schema.field(place).with_type(values.type), values)


def _parts(
    first: np.ndarray, starts: np.ndarray, times: np.ndarray, split: EventSplit
) -> np.ndarray:
    """(B,) int32 index into PARTS of each event."""
    parts = np.zeros(len(first), np.int32)
    if split.test_from is not None:
        if split.validation_from is not None:
            parts[times >= split.validation_from] = 1
        parts[times >= split.test_from] = 2
        return parts
    ends = np.append(starts[1:], len(first))
    lasts = ends[ends - starts >= 3] - 1
    parts[lasts], parts[lasts - 1] = 2, 1
    return parts


def _window_ends(first: np.ndarray, parts: np.ndarray, windows: int) -> np.ndarray:
    """(B,) True where a window of training events ends."""
    train = np.flatnonzero(parts == 0)
    # training events of a user come before those that are held out, and are counted from the last
    _, starts, counts = np.unique(first[train], return_index=True, return_counts=True)
    behind = np.repeat(starts + counts, counts) - 1 - np.arange(len(train))
    ends = np.zeros(len(first), bool)
    ends[train[behind % windows == 0]] = True
    return ends


def _groups(bounds: list[int]) -> Iterator[tuple[int, int]]:
    """Yield rows [begin, end) of row groups of whole users, of `GROUP_ROWS` where users allow.

    Args:
        bounds: the first row of each user, and the number of rows.
    """
    begin = 0
    for start, end in pairwise(bounds):
        if start > begin and end - begin > GROUP_ROWS:
            yield begin, start
            begin = start
    if bounds[-1] > begin:
        yield begin, bounds[-1]
