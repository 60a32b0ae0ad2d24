"""Windows of a stream: cut once, in the order of the source, whatever dies in between."""

from __future__ import annotations

import os
import random
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest

from rayrec.errors import ConfigError, InputError
from rayrec.streaming import (
    Cursor,
    FolderSource,
    Polled,
    StreamConfig,
    StreamStop,
    WindowCutter,
    WindowLog,
    WindowRecord,
    window_log,
)
from tests.unit.stream_worlds import SCHEMA, Killed, SimulatedStream, rows_of

FOLDER = FolderSource(path="/nowhere")


def cutter_of(
    source: SimulatedStream, log: WindowLog, config: StreamConfig, now: float = 1e6
) -> WindowCutter:
    ticks = iter(range(10**9))
    return WindowCutter(
        source,
        log,
        SCHEMA,
        config,
        binary=True,
        pause=lambda seconds: False,
        clock=lambda: float(next(ticks)),
        now=lambda: now,
    )


def cut_all(cutter: WindowCutter) -> list[WindowRecord]:
    records = []
    while (record := cutter.cut()) is not None:
        records.append(record)
    return records


def items(log: WindowLog) -> list[int]:
    """The rows of all windows, which the log has."""
    found: list[int] = []
    for window in log.windows():
        record = log.read(window)
        rows = pa.ipc.open_file(log.path(record)).read_all()
        assert rows.num_rows == record.rows
        found += rows["item"].to_pylist()
    return found


def die(chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next process die before or after a write, at a place of chance."""
    where = chance.choice(["rows", "before the record", "after the record", "nowhere"])
    link, write = os.link, window_log._write_rows

    def linked(source: Path, target: Path) -> None:
        if where == "after the record":
            link(source, target)
        raise Killed

    def written(path: Path, rows: list[pa.Table]) -> None:
        write(path, rows)
        path.write_bytes(path.read_bytes()[: chance.randint(0, 100)])
        raise Killed

    if where == "rows":
        monkeypatch.setattr(window_log, "_write_rows", written)
    elif where != "nowhere":
        monkeypatch.setattr(os, "link", linked)


@pytest.mark.seeds(range(500))
def test_every_row_is_in_one_window_after_any_deaths(seed: int, tmp_path: Path) -> None:
    """The rows come in their order, and a window that was told of never changes."""
    chance = random.Random(seed)
    times = [chance.randint(0, 300) + n for n in range(chance.randint(1, 400))]
    rows = rows_of(times)
    config = StreamConfig(
        folder=FOLDER,
        rows=chance.randint(1, 90),
        wait_s=chance.randint(3, 60),
        event_time="at",
        window_s=chance.choice([None, 50, 200]),
        stop=StreamStop(idle_s=40),
    )
    log, told = WindowLog(str(tmp_path / "stream")), dict[int, str]()
    for _ in range(chance.randint(0, 6)):
        source = SimulatedStream(rows, chance)
        source.kill_in = chance.choice([None, chance.randint(0, 30)])
        # a process that is taken for lost goes on beside the next one
        lost = cutter_of(SimulatedStream(rows, chance), log, config)
        with pytest.MonkeyPatch.context() as patch:
            die(chance, patch)
            try:
                for _ in range(chance.randint(1, 4)):
                    for cutter in (cutter_of(source, log, config), lost):
                        record = cutter.cut()
                        if record is not None:
                            assert told.setdefault(record.window, record.to_json()) == (
                                record.to_json()
                            )
            except Killed:
                pass
    cut_all(cutter_of(SimulatedStream(rows), log, config))
    assert items(log) == list(range(len(times)))
    assert all(log.read(window).to_json() == text for window, text in told.items())
    records = [log.read(window) for window in log.windows()]
    assert [record.window for record in records] == list(range(len(records)))
    for record, following in pairwise(records):
        assert following.before == record.after
        assert following.total_rows == record.total_rows + following.rows
    log.prune(len(records) - 1)
    assert log.windows() == [len(records) - 1]
    assert [path.name for path in log.folder.glob("*.arrow")] == [records[-1].file]


def test_a_window_ends_at_its_event_time_and_late_events_are_counted(tmp_path: Path) -> None:
    times = [10, 25, 12, 31, 33, 29, 75, 20, None, 99_999, 80]
    base = {"folder": FOLDER, "event_time": "at", "window_s": 30, "stop": StreamStop(idle_s=5)}
    log = WindowLog(str(tmp_path / "train"))
    records = cut_all(cutter_of(SimulatedStream(rows_of(times)), log, StreamConfig(**base), 100.0))
    assert [(r.rows, r.first_event, r.last_event, r.late) for r in records] == [
        (3, 10, 25, 0),
        (3, 29, 33, 0),
        (4, 20, 99_999, 1),
    ]
    # what is ahead of the clock makes nothing late, and what has no time is kept apart
    assert (records[-1].ahead, records[-1].watermark) == (1, 80)
    assert dict(records[-1].refused) == {"rows without an event time": 1}
    kept = pa.ipc.open_file(log.folder / "refused" / "window-00000002-0.arrow").read_all()
    assert kept["item"].to_pylist() == [8]
    dropping = StreamConfig(**base, late="drop", late_by_s=2)
    log = WindowLog(str(tmp_path / "drop"))
    records = cut_all(cutter_of(SimulatedStream(rows_of(times)), log, dropping, 100.0))
    assert [record.rows for record in records] == [3, 3, 3]
    assert items(log) == [0, 1, 2, 3, 4, 5, 6, 9, 10]


def test_rows_that_no_batch_can_hold_are_kept_apart(tmp_path: Path) -> None:
    rows = rows_of(list(range(50)))
    ids, labels = rows["item"].to_pylist(), rows["label"].to_pylist()
    ids[7], ids[30], labels[31] = -1, 100_000, 2.0
    rows = rows.set_column(0, "item", pa.array(ids)).set_column(1, "label", pa.array(labels))
    other = pa.concat_tables([rows.drop_columns(["at"])])
    log = WindowLog(str(tmp_path))
    config = StreamConfig(folder=FOLDER, stop=StreamStop(idle_s=5))
    (record,) = cut_all(cutter_of(SimulatedStream(other), log, config))
    assert record.rows == 47 and dict(record.refused) == {"rows that cannot be read": 3}
    kept = pa.ipc.open_file(tmp_path / "refused" / "window-00000000-0.arrow").read_all()
    assert kept["item"].to_pylist() == [-1, 100_000, 31]
    # no window is without rows: what is refused before its first row counts with it
    log = WindowLog(str(tmp_path / "timed"))
    spoilt = pa.table({"item": [-1, -1, 4], "label": [0.0, 1.0, 1.0], "at": [5, 40, 41]})
    timed = StreamConfig(folder=FOLDER, event_time="at", window_s=30, stop=StreamStop(idle_s=5))
    (record,) = cut_all(cutter_of(SimulatedStream(spoilt), log, timed))
    assert record.rows == 1 and dict(record.refused) == {"rows that cannot be read": 2}


def test_rows_of_other_columns_are_kept_apart_and_other_types_begin_a_window(
    tmp_path: Path,
) -> None:
    rows = rows_of(list(range(50)))
    narrow = rows.set_column(0, "item", rows["item"].cast(pa.int32()))
    renamed = rows.rename_columns(["item", "clicked", "at"])

    class Changing(SimulatedStream):
        """Source whose every 50 rows have columns of their own."""

        def poll(self, cursor: Cursor, most_rows: int) -> Polled | None:
            part, row = divmod(cursor["row"], 50)
            if part == 4:
                return None
            given = (rows, renamed, narrow, narrow)[part].slice(row, most_rows)
            return Polled(given, {"row": cursor["row"] + given.num_rows}, 0.0)

    log = WindowLog(str(tmp_path))
    config = StreamConfig(folder=FOLDER, stop=StreamStop(idle_s=5))
    records = cut_all(cutter_of(Changing(rows), log, config))
    assert [record.rows for record in records] == [50, 100]
    assert dict(records[0].refused) == {"other columns": 50}
    assert items(log) == [*range(50)] * 3


def test_a_stream_ends_at_its_windows_or_rows(tmp_path: Path) -> None:
    rows = rows_of(list(range(100)))
    for number, (stop, wanted) in enumerate(
        [(StreamStop(windows=2), [30, 30]), (StreamStop(rows=70), [30, 30, 10])]
    ):
        log = WindowLog(str(tmp_path / str(number)))
        config = StreamConfig(folder=FOLDER, rows=30, stop=stop)
        records = cut_all(cutter_of(SimulatedStream(rows), log, config))
        assert [record.rows for record in records] == wanted
        assert cut_all(cutter_of(SimulatedStream(rows), log, config)) == []


def test_a_window_that_is_gone_is_named(tmp_path: Path) -> None:
    log = WindowLog(str(tmp_path))
    config = StreamConfig(folder=FOLDER, rows=30, stop=StreamStop(idle_s=5))
    cut_all(cutter_of(SimulatedStream(rows_of(list(range(100)))), log, config))
    log.prune(2)
    with pytest.raises(InputError, match=r"window 1 .* windows 2 to 3 are"):
        log.read(1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "one source"),
        ({"folder": FOLDER, "rows": 0}, "rows"),
        ({"folder": FOLDER, "late": "drop"}, "late"),
        ({"folder": FOLDER, "window_s": 60}, "window_s"),
    ],
)
def test_options_that_contradict_each_other_are_named(
    options: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        StreamConfig(**options)  # type: ignore[arg-type]
