"""Event logs that are sorted, split and written, against a sort in plain Python."""

from __future__ import annotations

import mmap
import random
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest

from jobs import convert_events
from rayrec.command import run_command
from rayrec.data import ParquetDataset, event_log
from rayrec.data.column_types import forgotten, is_forgotten
from rayrec.data.event_log import EventSplit, write_event_log, write_sorted
from rayrec.errors import ConfigError, InputError
from tests.data.event_logs import batch_histories, log_schema, plain_histories


def shuffled_events(rng: random.Random, rows: int, users: int) -> list[dict]:
    """Events in no order, numbered by their place in the source, with many equal times."""
    texts = rng.random() < 0.5
    names = [f"user {n}" if texts else n * 11 - 7 for n in range(users)]
    return [
        {
            "user": rng.choice(names),
            "time": rng.randrange(-5, 12),
            "item": rng.randrange(50),
            "action": rng.randrange(3),
            "label": rng.randrange(2),
            "row": place,
        }
        for place in range(rows)
    ]


def write_source(folder: Path, events: list[dict], rng: random.Random) -> None:
    """Write events to files of one kind, in their order."""
    folder.mkdir()
    parquet = rng.random() < 0.5
    cuts = sorted(rng.randrange(len(events) + 1) for _ in range(rng.randrange(3)))
    for number, (a, b) in enumerate(zip([0, *cuts], [*cuts, len(events)], strict=True)):
        table = pa.Table.from_pylist(events[a:b], pa.Table.from_pylist(events).schema)
        chunk = rng.randrange(1, 20)
        if rng.random() < 0.3:
            table = table.set_column(0, "user", table["user"].dictionary_encode())
        if parquet:
            pq.write_table(table, folder / f"{number}.parquet", row_group_size=chunk)
        else:
            with ipc.new_file(folder / f"{number}.arrow", table.unify_dictionaries().schema) as to:
                to.write_table(table, max_chunksize=chunk)


def write_arrow(path: Path, columns: dict) -> None:
    """Write columns to a file of their own."""
    path.parent.mkdir(exist_ok=True)
    table = pa.table(columns)
    with ipc.new_file(path, table.schema) as to:
        to.write_table(table)


def plain_split(events: list[dict], split: EventSplit) -> list[str]:
    """The part of each event of a sorted log, user by user."""
    out = []
    for place, event in enumerate(events):
        mine = [n for n, other in enumerate(events) if other["user"] == event["user"]]
        part = "train"
        if split.test_from is not None:
            if event["time"] >= split.test_from:
                part = "test"
            elif split.validation_from is not None and event["time"] >= split.validation_from:
                part = "validation"
        elif len(mine) >= 3 and place == mine[-1]:
            part = "test"
        elif len(mine) >= 3 and place == mine[-2]:
            part = "validation"
        out.append(part)
    return out


@pytest.mark.seeds(range(60))
def test_a_log_is_sorted_by_user_time_and_place_and_split(tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    events = shuffled_events(rng, rng.randrange(1, 120), rng.randrange(1, 50))
    write_source(tmp_path / "source", events, rng)
    monkeypatch.setattr(event_log, "BUCKET_ROWS", rng.randrange(1, 60))
    monkeypatch.setattr(event_log, "GROUP_ROWS", rng.randrange(1, 30))
    split = EventSplit(windows=rng.choice((None, 2, 3, 5)))
    if rng.random() < 0.5:
        split = replace(split, test_from=8, validation_from=rng.choice((None, 5)))
    wanted = sorted(events, key=lambda e: (e["user"], e["time"], e["row"]))
    parts = plain_split(wanted, split)
    source, out = str(tmp_path / "source"), tmp_path / "out"
    if not {"train", "test"} <= set(parts):
        with pytest.raises(ConfigError, match="none is for the"):
            write_event_log(source, out, user="user", time="time", split=split)
        assert not out.exists()
        return
    log = write_event_log(source, out, user="user", time="time", split=split)
    written = pa.concat_tables([pq.read_table(path) for path in sorted(log.path.iterdir())])
    seen: dict = {}
    for event, part in zip(wanted, parts, strict=True):
        position = seen[event["user"]] = seen.get(event["user"], -1) + 1
        event |= {"split": part, "position": position}
    for place, event in enumerate(wanted if split.windows is not None else ()):
        behind = [e for e in wanted[place + 1 :] if e["user"] == event["user"]]
        left = sum(e["split"] == "train" for e in behind)
        event["window_end"] = event["split"] == "train" and left % split.windows == 0
    assert written.to_pylist() == wanted
    assert log.events == {part: parts.count(part) for part in event_log.PARTS}
    assert log.users == len(seen)
    # a row group holds whole users, so histories are cut from it as they are
    data = ParquetDataset(str(log.path), log_schema(4), where="split == 'test'")
    found: dict = {}
    for batch in data.loader(0, 1, 16, threaded=False):
        found |= batch_histories(batch)
    cut = plain_histories(wanted, 4)
    assert found == {e["row"]: cut[e["row"]] for e in wanted if e["split"] == "test"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_bucket_holds_more_than_2_gib_of_text(tmp_path):
    chunk, each = 70_000, 16_000
    ends = np.arange(chunk + 1, dtype=np.int32) * each
    zeros = pa.py_buffer(mmap.mmap(-1, chunk * each))  # takes memory where it is written alone
    texts = pa.Array.from_buffers(pa.string(), chunk, [None, pa.py_buffer(ends), zeros])
    numbers = pa.array(np.arange(2 * chunk))
    bucket = pa.table({"user": np.arange(2 * chunk)[::-1], "time": numbers, "row": numbers})
    bucket = bucket.append_column("text", pa.chunked_array([texts, texts]))
    split = EventSplit(test_from=chunk)
    users, events = write_sorted([bucket], tmp_path, "user", "time", split)
    assert users == 2 * chunk and events == {"train": chunk, "validation": 0, "test": chunk}
    file = pq.ParquetFile(tmp_path / "part-00000.parquet")
    assert file.read(["row"])["row"].to_pylist() == list(range(2 * chunk))[::-1]
    assert file.schema_arrow.field("text").type == pa.string()


def test_timestamps_become_seconds_and_keep_their_finer_order(tmp_path):
    times = [datetime(2026, 1, 1, 0, 0, 0, micros, UTC) for micros in (900, 100, 500)]
    table = pa.table({"user": [1, 1, 1], "at": pa.array(times, pa.timestamp("us", "UTC"))})
    pq.write_table(table.append_column("item", pa.array([3, 1, 2])), tmp_path / "log.parquet")
    log = write_event_log(str(tmp_path / "log.parquet"), tmp_path / "out", user="user", time="at")
    written = pq.read_table(log.path)
    assert written["item"].to_pylist() == [1, 2, 3]
    assert written["at"].to_pylist() == [int(times[0].timestamp())] * 3


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_seconds_before_1970_are_rounded_down(tmp_path, unit):
    moments = pa.array([-1500, -1, 0, 1999, -2000], pa.timestamp("ms")).cast(pa.timestamp(unit))
    pq.write_table(pa.table({"user": [1] * 5, "at": moments}), tmp_path / "log.parquet")
    split = EventSplit(test_from=0)
    log = write_event_log(
        str(tmp_path / "log.parquet"), tmp_path / "out", user="user", time="at", split=split
    )
    written = pq.read_table(log.path)
    assert written["at"].to_pylist() == [-2, -2, -1, 0, 1]
    assert written["split"].to_pylist() == ["train"] * 3 + ["test"] * 2


def test_columns_keep_what_their_fields_say(tmp_path):
    """Rows of a window that an id was taken out of may be sorted, and have a group all the same."""
    fields = [pa.field("user", pa.int64()), pa.field("time", pa.timestamp("s"))]
    fields.append(forgotten(pa.field("item", pa.int64())))
    rows = pa.table([[7, 7, 7], [2, 1, 3], [None, 4, 5]], schema=pa.schema(fields))
    pq.write_table(rows, tmp_path / "source.parquet")
    log = write_event_log(
        str(tmp_path / "source.parquet"), tmp_path / "out", user="user", time="time"
    )
    (path,) = log.path.iterdir()
    schema = pq.read_schema(path)
    assert [is_forgotten(schema.field(name)) for name in rows.schema.names] == [False, False, True]
    assert pq.read_table(path)["item"].to_pylist() == [4, None, 5]


def test_users_and_times_may_be_declared_as_never_null(tmp_path):
    kinds = {"user": pa.string(), "time": pa.int64(), "item": pa.int64()}
    fields = [pa.field(name, kind, nullable=False) for name, kind in kinds.items()]
    rows = pa.table([["b", "a", "a", "a"], [9, 2, 1, 3], [0, 1, 2, 3]], schema=pa.schema(fields))
    pq.write_table(rows, tmp_path / "source.parquet")
    source, out = str(tmp_path / "source.parquet"), tmp_path / "out"
    log = write_event_log(source, out, user="user", time="time")
    (path,) = log.path.iterdir()
    assert pq.read_table(path)["item"].to_pylist() == [2, 1, 3, 0]


def test_files_may_have_their_columns_in_any_order(tmp_path):
    first = {"user": [1, 2], "time": [1, 1], "item": [5, 6]}
    second = {"item": [7, 8, 9], "time": [2, 3, 2], "user": [1, 1, 2]}
    write_arrow(tmp_path / "log" / "a.arrow", first)
    write_arrow(tmp_path / "log" / "b.arrow", second)
    log = write_event_log(str(tmp_path / "log"), tmp_path / "out", user="user", time="time")
    assert pq.read_table(log.path)["item"].to_pylist() == [5, 7, 8, 6, 9]


# what the second of two files has, beside a first one of whole numbers
BESIDE = {
    "a column of the second file alone": (
        {"more": [1, 2]},
        r"'more' is missing \(file '.*a\.arrow",
    ),
    "a user beyond the type of the first": (
        {"user": pa.array([2**63 + 1, 2], pa.uint64())},
        r"'user' of '.*b\.arrow' does not fit int64",
    ),
    "numbers that a float would round": (
        {"item": [0.5, 1.0]},
        r"'item' of '.*a\.arrow' does not fit double",
    ),
    "a user that a dictionary holds as null": (
        {"user": pa.DictionaryArray.from_arrays([0, 1], pa.array([1, None]))},
        r"'user' holds null in row 1 of '.*b\.arrow'",
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_files_that_do_not_go_together_are_refused(tmp_path, name):
    columns, message = BESIDE[name]
    plain = {"user": [1, 2], "time": [1, 2], "item": [2**60 + 1, 6]}
    write_arrow(tmp_path / "log" / "a.arrow", plain)
    write_arrow(tmp_path / "log" / "b.arrow", plain | columns)
    with pytest.raises(InputError, match=message):
        write_event_log(str(tmp_path / "log"), tmp_path / "out", user="user", time="time")
    assert not (tmp_path / "out").exists()


def test_a_column_that_arrow_cannot_sort_is_refused(tmp_path):
    column = pa.RunEndEncodedArray.from_arrays(pa.array([2]), pa.array([1]))
    write_arrow(tmp_path / "log.arrow", {"user": [1, 2], "time": [1, 2], "item": column})
    with pytest.raises(InputError, match=r"'item' has type .*, which cannot be sorted by user"):
        write_event_log(str(tmp_path / "log.arrow"), tmp_path / "out", user="user", time="time")


def test_the_job_converts_and_names_what_is_wrong(tmp_path, capsys):
    rows = {"user": [1, 1, 2, 1], "time": [4, 2, 3, 2], "item": [0, 1, 2, 3]}
    pq.write_table(pa.table(rows), tmp_path / "log.parquet")
    arguments = [str(tmp_path / "log.parquet"), str(tmp_path / "out"), "--user", "user"]
    assert run_command(convert_events.main, [*arguments, "--time", "at"]) == 2
    assert "'at'" in capsys.readouterr().err
    arguments += ["--time", "time", "--test-from", "4", "--validation-from", "3", "--windows", "2"]
    assert run_command(convert_events.main, arguments) == 0
    said = "4 events of 2 users in", "2 for train, 1 for validation, 1 for test"
    shown = capsys.readouterr().out
    assert all(part in shown for part in said)
    written = pq.read_table(tmp_path / "out" / "log")
    assert written["item"].to_pylist() == [1, 3, 0, 2]
    assert written["split"].to_pylist() == ["train", "train", "test", "validation"]
    assert written["window_end"].to_pylist() == [False, True, False, False]
    assert run_command(convert_events.main, arguments) == 2
    assert "already holds log" in capsys.readouterr().err
    assert run_command(convert_events.main, [*arguments, "--overwrite"]) == 0


BAD = {
    "a user is null": ({"user": [1, None]}, InputError, r"'user' holds null in row 1 of .*bad\.p"),
    "a time is null": ({"time": [None, 2]}, InputError, r"'time' holds null in row 0 of .*bad\.p"),
    "a time is a fraction": ({"time": [0.5, 2.0]}, InputError, r"time column 'time' has type"),
    "a user is a list": ({"user": [[1], [2]]}, InputError, r"'user' has type list"),
    "a column is taken": ({"split": ["a", "b"]}, InputError, r"'split', which a sorted log gets"),
    "nothing is held out": ({}, ConfigError, r"none is for the test"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_log_is_refused(tmp_path, name):
    columns, error, message = BAD[name]
    table = pa.table({"user": [1, 2], "time": [1, 2], "item": [5, 6]} | columns)
    pq.write_table(table, tmp_path / "bad.parquet")
    with pytest.raises(error, match=message):
        write_event_log(str(tmp_path / "bad.parquet"), tmp_path / "out", user="user", time="time")
    assert not (tmp_path / "out").exists()


def test_a_missing_column_and_a_validation_after_the_test_are_refused(tmp_path):
    pq.write_table(pa.table({"user": [1]}), tmp_path / "bad.parquet")
    with pytest.raises(InputError, match=r"column 'time' is missing"):
        write_event_log(str(tmp_path / "bad.parquet"), tmp_path / "out", user="user", time="time")
    with pytest.raises(ConfigError, match="validation_from=5 and test_from=5"):
        EventSplit(test_from=5, validation_from=5)
    with pytest.raises(ConfigError, match="windows=0"):
        EventSplit(windows=0)
    with pytest.raises(ConfigError, match="test_from=None"):
        EventSplit(validation_from=5)
