"""Windows of a growing folder: whatever happens to its files and to the process that cuts, every
row that can be trained on is in one window, once, in the order of the names.
"""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from rayrec.errors import InputError
from rayrec.streams import StreamWindow
from rayrec.streams.folder import FolderSource
from rayrec.streams.kept import WindowFolder
from tests.data.stream_files import amounts, as_bytes, config_of, cut, cutter_of, rows_of


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


def test_two_that_cut_one_window_agree(tmp_path: Path) -> None:
    incoming, run = tmp_path / "in", tmp_path / "run"
    incoming.mkdir()
    (incoming / "a.parquet").write_bytes(as_bytes(rows_of(0, 4)))
    one = cut(cutter_of(run, config_of(incoming)), 0)
    assert one is not None
    other = StreamWindow(number=0, file="other.parquet", rows=1, after={}, cut_s=0.0)
    assert WindowFolder(str(run)).add(other, ()) == one
    assert FolderSource(str(incoming)).lag(one.after) == (0, 0.0)
