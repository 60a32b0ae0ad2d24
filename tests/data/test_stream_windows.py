"""Windows of a growing folder: whatever happens to its files and to the process that cuts, every
row that can be trained on is in one window, once, in the order of the names.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pyarrow as pa
import pytest

from rayrec.errors import ConfigError, InputError
from rayrec.streams import StreamConfig, StreamDataset, StreamWindow, folder
from rayrec.streams.folder import FolderSource
from rayrec.streams.kept import WindowFolder, write_window
from rayrec.streams.source import Cursor, StreamRows
from tests.data.stream_files import SCHEMA, amounts, as_bytes, config_of, cut, cutter_of, rows_of


@pytest.mark.seeds(range(500))
def test_every_row_is_in_one_window_once(seed: int, tmp_path: Path) -> None:
    """Files come whole, grow, are garbage or hold bad rows; the cutter dies at any time."""
    rng = random.Random(seed)
    incoming, run = tmp_path / "in", tmp_path / "run"
    incoming.mkdir()
    config = config_of(incoming, rows=rng.randint(1, 25), patience_s=1e6)
    wanted: list[int] = []
    growing: list[tuple[Path, bytes]] = []
    first = files = 0
    cutter, number, got = cutter_of(run, config), 0, list[int]()
    for _ in range(rng.randint(5, 40)):
        action = rng.random()
        if action < 0.4 and not growing:
            count = rng.randint(0, 30)
            rows = rows_of(first, count)
            path = incoming / f"part-{files:04d}.parquet"
            fine = list(range(first, first + count))
            # a run whose very first rows are all refused ends
            if count > 1 and rng.random() < 0.2:
                bad = rng.randrange(count)
                items = rows["item"].to_pylist()
                items[bad] = rng.choice([-1, 1000, None])
                # a null is an empty bag
                if items[bad] is not None:
                    fine.remove(first + bad)
                rows = rows.set_column(2, "item", pa.array(items, pa.int64()))
            data = as_bytes(rows, rng.randint(1, 40))
            if rng.random() < 0.3:
                path.write_bytes(data[: rng.randrange(len(data))])
                growing.append((path, data))
            else:
                path.write_bytes(data)
            wanted += fine
            first, files = first + count, files + 1
            (incoming / rng.choice(["_aside.parquet", ".hidden.parquet", "x.txt"])).touch()
        elif action < 0.6 and growing:
            path, data = growing.pop()
            path.write_bytes(data)
        elif action < 0.75:
            cutter.close()
            cutter = cutter_of(run, config)
            if rng.random() < 0.3:
                # a process that died behind the rows of a window, before its record
                WindowFolder(str(run)).write_rows(number, rows_of(10**6, 3))
        else:
            window = cut(cutter, number)
            if window is not None:
                assert window.number == number and window.rows <= config.rows
                got += amounts(run, window)
                number += 1
        assert got == wanted[: len(got)]
    for path, data in growing:
        path.write_bytes(data)
    while (window := cut(cutter, number)) is not None:
        got += amounts(run, window)
        number += 1
    cutter.close()
    assert got == wanted
    # whoever walks the run again is given the same windows
    again, seen = cutter_of(run, config), list[int]()
    for each in range(number):
        window = cut(again, each)
        assert window is not None
        seen += amounts(run, window)
    again.close()
    assert seen == wanted


@pytest.mark.seeds(range(200))
def test_files_may_come_in_any_order_of_their_names(seed: int, tmp_path: Path) -> None:
    """Also while no process runs, and amid a file that sorts behind them."""
    rng = random.Random(seed)
    incoming, run = tmp_path / "in", tmp_path / "run"
    incoming.mkdir()
    config = config_of(incoming, rows=rng.randint(1, 12))
    names = rng.sample(range(100), rng.randint(1, 12))
    cutter, number, first, got = cutter_of(run, config), 0, 0, list[int]()
    for name in names:
        count = rng.randint(0, 15)
        (incoming / f"{name:03d}.parquet").write_bytes(as_bytes(rows_of(first, count)))
        first += count
        for _ in range(rng.randint(0, 2)):
            if (window := cut(cutter, number)) is not None:
                assert window.refused == 0
                got += amounts(run, window)
                number += 1
        if rng.random() < 0.3:
            cutter.close()
            cutter = cutter_of(run, config)
    while (window := cut(cutter, number)) is not None:
        got += amounts(run, window)
        number += 1
    cutter.close()
    assert sorted(got) == list(range(first))


def test_a_name_before_all_that_a_cursor_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "MOST_NAMES", 2)
    for name in "bcde":
        (tmp_path / f"{name}.parquet").write_bytes(as_bytes(rows_of(0, 1)))
    source = FolderSource(str(tmp_path))
    cursor = source.start()
    while (found := source.read(cursor, 10)) is not None:
        cursor = found.cursor
    assert (cursor["bound"], cursor["read"]) == ("c.parquet", ["d.parquet", "e.parquet"])
    for name in ("a", "dd"):
        (tmp_path / f"{name}.parquet").write_bytes(as_bytes(rows_of(0, 1)))
    found = source.read(cursor, 10)
    assert found is not None and found.rows is None and found.cursor == cursor
    assert [one.place for one in found.refused] == ["a.parquet"]
    found = source.read(cursor, 10)
    assert found is not None and found.place == "dd.parquet" and not found.refused
    assert source.read(found.cursor, 10) is None


@pytest.mark.seeds(range(200))
def test_a_window_ends_at_its_event_time(seed: int, tmp_path: Path) -> None:
    """As a walk row by row says, however the rows lie in files, and in any number of processes."""
    rng = random.Random(seed)
    incoming, run = tmp_path / "in", tmp_path / "run"
    incoming.mkdir()
    times: list[int] = []
    for number in range(rng.randint(1, 6)):
        events = [40 + len(times) * 5 + rng.randint(-40, 40) for _ in range(rng.randint(1, 30))]
        rows = rows_of(len(times), len(events)).set_column(3, "at", pa.array(events))
        (incoming / f"{number}.parquet").write_bytes(as_bytes(rows))
        times += events
    size, most = rng.choice([1, 30, 100]), rng.choice([7, 1000])
    wanted, newest = list[list[int]](), None
    own: list[int] = []
    for row, event in enumerate(times):
        if not own:
            end = (max(event, event if newest is None else newest) // size + 1) * size
        if own and (event >= end or len(own) == most):
            newest = max([times[one] for one in own] + ([] if newest is None else [newest]))
            end = (max(event, newest) // size + 1) * size
            wanted.append(own)
            own = []
        own.append(row)
    wanted.append(own)
    config = config_of(incoming, rows=most, time="at", event_seconds=size)
    cutter, got = cutter_of(run, config), list[list[int]]()
    while (window := cut(cutter, len(got))) is not None:
        got.append(amounts(run, window))
        assert window.total_rows == sum(map(len, got))
        if rng.random() < 0.3:
            cutter.close()
            cutter = cutter_of(run, config)
    cutter.close()
    assert got == wanted


def test_rows_that_are_refused_end_no_window(tmp_path: Path) -> None:
    incoming, run = tmp_path / "in", tmp_path / "run"
    incoming.mkdir()
    rows = rows_of(0, 5).set_column(2, "item", pa.array([-1, -1, 3, 4, 5]))
    rows = rows.set_column(3, "at", pa.array([5, 70, 71, None, 130]))
    (incoming / "a.parquet").write_bytes(as_bytes(rows))
    cutter = cutter_of(run, config_of(incoming, time="at", event_seconds=60))
    first, second = cut(cutter, 0), cut(cutter, 1)
    cutter.close()
    assert first is not None and (amounts(run, first), first.refused) == ([2], 3)
    assert second is not None and (amounts(run, second), second.refused) == ([4], 0)


def test_a_time_of_windows_needs_its_column() -> None:
    config = StreamConfig(folder="in", event_seconds=60)
    with pytest.raises(ConfigError, match="event_seconds=60, and no column"):
        StreamDataset(config=config, schema=SCHEMA)


def test_late_events_are_trained_on_and_counted(tmp_path: Path) -> None:
    incoming, run = tmp_path / "in", tmp_path / "run"
    incoming.mkdir()
    config = config_of(incoming, rows=4, time="at")
    for name, event in (("a", 100), ("b", 90), ("c", 120)):
        (incoming / f"{name}.parquet").write_bytes(as_bytes(rows_of(0, 4, event)))
    cutter = cutter_of(run, config)
    windows = [cut(cutter, number) for number in range(3)]
    cutter.close()
    told = [(one.late, one.newest_event, one.lag_rows) for one in windows if one is not None]
    assert told == [(0, 100, 8), (4, 100, 4), (0, 120, 0)]


def test_a_window_waits_for_its_seconds_and_no_longer(tmp_path: Path) -> None:
    incoming, run = tmp_path / "in", tmp_path / "run"
    incoming.mkdir()
    (incoming / "a.parquet").write_bytes(as_bytes(rows_of(0, 4)))
    cutter = cutter_of(run, config_of(incoming, rows=10, seconds=1e6))
    assert cut(cutter, 0) is None
    (incoming / "b.parquet").write_bytes(as_bytes(rows_of(4, 9)))
    window = cut(cutter, 0)
    cutter.close()
    assert window is not None and window.rows == 10


def test_a_folder_that_is_not_there_and_a_damaged_record_are_errors(tmp_path: Path) -> None:
    cutter = cutter_of(tmp_path / "run", config_of(tmp_path / "none"))
    with pytest.raises(InputError, match=r"stream folder .*none cannot be listed"):
        cut(cutter, 0)
    cutter.close()
    (tmp_path / "in").mkdir()
    cutter = cutter_of(tmp_path / "run", config_of(tmp_path / "in"))
    with pytest.raises(InputError, match="has no window 6, behind which window 7 begins"):
        cut(cutter, 7)
    (tmp_path / "run" / "stream").mkdir(parents=True)
    (tmp_path / "run" / "stream" / "window-00000007.json").write_text('{"number": 7}')
    with pytest.raises(InputError, match=r"window-00000007.json.*file"):
        cut(cutter, 7)
    cutter.close()


@pytest.mark.seeds(range(20))
def test_a_damaged_window_is_not_trained_on(seed: int, tmp_path: Path) -> None:
    """A bit that flips anywhere in the file is an error, and so is a file that is gone."""
    rng, run = random.Random(seed), tmp_path / "run"
    incoming = tmp_path / "in"
    incoming.mkdir()
    (incoming / "1.parquet").write_bytes(as_bytes(rows_of(0, 500)))
    config = config_of(incoming, rows=500)
    cutter = cutter_of(run, config)
    window = cut(cutter, 0)
    cutter.close()
    assert window is not None
    path = Path(WindowFolder(str(run)).path, window.file)
    whole = path.read_bytes()
    for _ in range(50):
        at = rng.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
        data = StreamDataset(config=config, schema=SCHEMA, num_streams=1)
        with pytest.raises(InputError, match=f"window .*{window.file} is damaged"):
            data.window(str(run), window)
    path.write_bytes(whole)
    rows = data.window(str(run), window)
    with rows.loader(0, 1, 500, shuffle=False, threaded=False) as batches:
        assert [int(v) for b in batches for v in b.dense_features[:, 0]] == list(range(500))
    path.unlink()
    with pytest.raises(InputError, match=f"cannot read window .*{window.file}"):
        data.window(str(run), window)


@pytest.mark.seeds(range(20))
def test_a_damaged_page_of_a_parquet_window_is_not_trained_on(seed: int, tmp_path: Path) -> None:
    """A bit of its pages that flips gives an error, or leaves the rows as they are."""
    rng, run, config = random.Random(seed), tmp_path / "run", config_of(tmp_path)
    (run / "stream").mkdir(parents=True)
    path, refused = run / "stream" / "window.parquet", 0
    write_window(rows_of(0, 500), str(path), 100)
    window = StreamWindow(number=0, file=path.name, rows=500, after={}, cut_s=0.0)
    data, whole = StreamDataset(config=config, schema=SCHEMA, num_streams=1), path.read_bytes()
    # the footer, whose length stands at the end, has no checksum
    pages = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for _ in range(20):
        at = rng.randrange(pages)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
        try:
            rows = data.window(str(run), window)
            with rows.loader(0, 1, 500, shuffle=False, threaded=False) as batches:
                got = [int(v) for batch in batches for v in batch.dense_features[:, 0]]
        except InputError:
            refused += 1
            continue
        assert got == list(range(500)), at
    assert refused


@pytest.mark.parametrize("kind", ["plain", "dictionary", "list view", "uri"])
def test_a_window_holds_no_more_than_its_rows(kind: str, tmp_path: Path) -> None:
    """What lies in an object store, or is more than its rows in an IPC file, is Parquet."""
    rows = rows_of(0, 60)
    if kind == "dictionary":
        column = pa.array(["a key", "other"] * 30).dictionary_encode()
        rows = rows.append_column("more", column).take(list(range(1, 60, 2)))
    elif kind == "list view":
        column = pa.array([["a key"], ["b"]] * 30, pa.list_view(pa.string()))
        rows = rows.append_column("more", column).slice(59)
    folder = WindowFolder(f"file://{tmp_path}" if kind == "uri" else str(tmp_path))
    name, crc32 = folder.write_rows(0, rows)
    assert name.endswith(".arrow" if kind == "plain" else ".parquet")
    assert (crc32 is None) == (kind == "uri")
    assert b"a key" not in (tmp_path / "stream" / name).read_bytes()


def test_two_that_cut_one_window_agree(tmp_path: Path) -> None:
    incoming, run = tmp_path / "in", tmp_path / "run"
    incoming.mkdir()
    (incoming / "a.parquet").write_bytes(as_bytes(rows_of(0, 4)))
    one = cut(cutter_of(run, config_of(incoming)), 0)
    assert one is not None
    other = StreamWindow(number=0, file="other.parquet", rows=1, after={}, cut_s=0.0)
    assert WindowFolder(str(run)).add(other, ()) == one
    assert FolderSource(str(incoming)).lag(one.after) == (0, 0.0)


def test_a_look_that_takes_long_is_no_idle_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that wait are read, however long the source takes to give them."""
    (tmp_path / "a.parquet").write_bytes(as_bytes(rows_of(0, 4)))
    cutter = cutter_of(tmp_path / "run", config_of(tmp_path, rows=4))
    read = cutter._source.read

    def slow(cursor: Cursor, most: int) -> StreamRows | None:
        time.sleep(0.3)
        return read(cursor, most)

    monkeypatch.setattr(cutter._source, "read", slow)
    cutter.begin(0)
    time.sleep(0.2)
    assert not cutter.is_idle(0.1)
    assert cut(cutter, 0) is not None and not cutter.is_idle(0.1)
    while not cutter.is_idle(0.3):
        assert cut(cutter, 1, polls=1) is None
    cutter.close()
