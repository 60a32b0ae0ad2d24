"""What a stream leaves out is counted and told, and what can be trained on is not left out."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from rayrec.errors import InputError
from rayrec.layout import DynamicConfig
from rayrec.streams import DeltaConfig, IcebergConfig, StreamConfig, cutting, folder, kept
from rayrec.streams.cutting import WindowCutter
from rayrec.streams.kept import WindowFolder
from tests.data.iceberg_tables import NAME, make_table, properties_of
from tests.data.stream_files import SCHEMA, amounts, as_bytes, config_of, cut, cutter_of, rows_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def incoming(tmp_path: Path) -> Path:
    """Make the folder that files are put into."""
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def test_what_cannot_be_trained_on_is_told_and_counted(incoming: Path, run: Path) -> None:
    (incoming / "a.parquet").write_bytes(as_bytes(rows_of(0, 4)))
    (incoming / "b.parquet").write_bytes(b"PAR1 and no more")
    (incoming / "c.parquet").write_bytes(as_bytes(rows_of(4, 5).drop(["item"])))
    texts = rows_of(9, 2).set_column(2, "item", pa.array(["x", "y"]))
    (incoming / "d.parquet").write_bytes(as_bytes(texts))
    bad = rows_of(11, 3).set_column(2, "item", pa.array([1, -5, 3]))
    (incoming / "e.parquet").write_bytes(as_bytes(bad))
    config = config_of(incoming, rows=100, seconds=0.3, patience_s=0.05)
    cutter = cutter_of(run, config)
    assert cut(cutter, 0, polls=1) is None  # it waits for b, which may grow
    time.sleep(0.1)
    window = None
    while window is None:
        window = cut(cutter, 0, polls=1)
    cutter.close()
    assert amounts(run, window) == [0, 1, 2, 3, 11, 13]
    assert window.refused == 1 + 5 + 2 + 1 and window.lag_rows == 0
    told = json.loads((run / "stream" / "refused" / "window-00000000.json").read_text())
    places = {one["place"]: one["reason"] for one in told}
    rows = [f"{file}.parquet, row {row}" for file, row in (("d", 0), ("d", 1), ("e", 1))]
    assert list(places) == ["b.parquet", "c.parquet", *rows]
    assert "no whole Parquet file" in places["b.parquet"] and "'item'" in places["c.parquet"]
    assert "-5" in places["e.parquet, row 1"]


@pytest.mark.parametrize("source", ["folder", "delta", "iceberg"])
def test_a_refused_row_is_told_by_its_number_in_the_file(tmp_path: Path, source: str) -> None:
    bad = rows_of(3, 6).set_column(2, "item", pa.array([1, -5, 3, 4, -5, 6]))
    config: str | DeltaConfig | IcebergConfig
    if source == "folder":
        config = str(tmp_path)
        for name, rows in (("a", rows_of(0, 3)), ("b", bad)):
            (tmp_path / f"{name}.parquet").write_bytes(as_bytes(rows))
    elif source == "delta":
        deltalake = pytest.importorskip("deltalake", reason="needs the extra delta")
        config = DeltaConfig(table=str(tmp_path / "table"))
        options = deltalake.WriterProperties(max_row_group_size=3)
        for rows in (rows_of(0, 3), bad):
            deltalake.write_deltalake(config.table, rows, mode="append", writer_properties=options)
    else:
        pytest.importorskip("pyiceberg", reason="needs the extra iceberg")
        pytest.importorskip("sqlalchemy", reason="the catalogs of tests lie in SQLite")
        config = IcebergConfig(table=NAME, properties=properties_of(tmp_path))
        table = make_table(tmp_path, bad.schema)
        for rows in (rows_of(0, 3), bad):
            table.append(rows)
    stream = StreamConfig(rows=4, seconds=1e-6, **{source: config})  # type: ignore[arg-type]
    cutter, run = cutter_of(tmp_path / "run", stream), tmp_path / "run"
    windows = [cut(cutter, number) for number in range(2)]
    cutter.close()
    assert [amounts(run, window) for window in windows] == [[0, 1, 2, 3], [5, 6, 8]]  # type: ignore[arg-type]
    told = json.loads((run / "stream" / "refused" / "window-00000001.json").read_text())
    assert [one["place"].rpartition(", ")[2] for one in told] == ["row 1", "row 4"]


def test_files_that_go_or_change_are_refused(incoming: Path, run: Path) -> None:
    config = config_of(incoming, rows=3)
    (incoming / "b.parquet").write_bytes(as_bytes(rows_of(0, 8)))
    cutter = cutter_of(run, config)
    assert amounts(run, cut(cutter, 0)) == [0, 1, 2]  # type: ignore[arg-type]
    (incoming / "b.parquet").write_bytes(as_bytes(rows_of(100, 9)))
    (incoming / "c.parquet").write_bytes(as_bytes(rows_of(8, 4)))
    second = cut(cutter, 1)
    assert second is not None and amounts(run, second) == [8, 9, 10]
    # the five rows of the file that is another one now
    assert second.refused == 5
    os.unlink(incoming / "c.parquet")
    (incoming / "d.parquet").write_bytes(as_bytes(rows_of(12, 3)))
    third = cut(cutter, 2)
    cutter.close()
    assert third is not None and amounts(run, third) == [12, 13, 14] and third.refused == 1
    (told,) = json.loads((run / "stream" / "refused" / "window-00000002.json").read_text())
    assert told == {
        "place": "c.parquet",
        "reason": "is gone; its last 1 rows are not trained on",
        "rows": 1,
    }


def test_a_run_whose_first_rows_are_all_refused_ends_and_says_why(
    incoming: Path, run: Path
) -> None:
    (incoming / "a.parquet").write_bytes(as_bytes(rows_of(0, 5).drop(["item"])))
    cutter = cutter_of(run, config_of(incoming, stop_when_idle_s=1e-3))
    with pytest.raises(
        InputError, match=r"none of the first 5 rows .*a\.parquet: no column 'item'"
    ):
        cut(cutter, 0)
    cutter.close()
    assert (run / "stream" / "refused" / "window-00000000.json").is_file()


def test_refused_rows_are_told_while_no_other_row_comes(incoming: Path, run: Path) -> None:
    (incoming / "a.parquet").write_bytes(as_bytes(rows_of(0, 4)))
    (incoming / "b.parquet").write_bytes(as_bytes(rows_of(4, 5).drop(["item"])))
    cutter = cutter_of(run, config_of(incoming, rows=4, stop_when_idle_s=1e-3))
    assert amounts(run, cut(cutter, 0)) == [0, 1, 2, 3]  # type: ignore[arg-type]
    told = run / "stream" / "refused" / "window-00000001.json"
    cutter.begin(1)
    while cutter.window(1) is None and not told.exists():
        # the run does not end before they are told
        time.sleep(1e-3)
    assert sum(one["rows"] for one in json.loads(told.read_text())) == 5
    # three looks may take less than this
    while not cutter.is_idle(1e-3):
        assert cut(cutter, 1) is None
    (incoming / "c.parquet").write_bytes(as_bytes(rows_of(9, 2)))
    window = cut(cutter, 1)
    cutter.close()
    assert window is not None and window.refused == 5 and amounts(run, window) == [9, 10]


def test_nothing_is_told_behind_the_last_row_of_a_run(incoming: Path, run: Path) -> None:
    (incoming / "a.parquet").write_bytes(as_bytes(rows_of(0, 9)))
    cutter = cutter_of(run, config_of(incoming, rows=4, stop_after_rows=4))
    assert amounts(run, cut(cutter, 0)) == [0, 1, 2, 3]  # type: ignore[arg-type]
    assert cut(cutter, 1) is None  # a run begins it while it trains on the last
    cutter.close()
    assert not (run / "stream" / "refused").exists()


def test_what_was_refused_goes_with_windows_of_long_ago(
    incoming: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "REFUSED_WINDOWS", 3)
    cutter, counts = cutter_of(run, config_of(incoming, rows=1)), list[int]()
    windows = kept.WindowFolder(str(run))
    windows.prune(0)  # of a run that has refused nothing
    for number in range(20):
        bad = rows_of(2 * number, 2).set_column(2, "item", pa.array([-1, 1]))
        (incoming / f"{number:04d}.parquet").write_bytes(as_bytes(bad))
        window = cut(cutter, number)
        assert window is not None and window.refused == 1
        windows.prune(number)
        counts.append(len([path for path in (run / "stream").rglob("*") if path.is_file()]))
    cutter.close()
    assert set(counts[6:]) == {3 + 5}
    left = sorted(path.name for path in (run / "stream" / "refused").iterdir())
    assert left == [f"window-{number:08d}.json" for number in range(15, 20)]


def test_types_that_go_together_make_one_window(incoming: Path, run: Path) -> None:
    rows = rows_of(0, 12)
    kinds = (pa.int64(), pa.int32(), pa.uint8(), pa.large_list(pa.int64()))
    for k, kind in enumerate(kinds):
        part = rows.slice(k * 3, 3)
        items = part["item"].to_pylist()
        column = pa.array([[i] for i in items] if pa.types.is_large_list(kind) else items, kind)
        part = part.set_column(2, "item", column)
        (incoming / f"{k}.parquet").write_bytes(as_bytes(part))
    cutter = cutter_of(run, config_of(incoming, rows=100))
    window = cut(cutter, 0)
    cutter.close()
    # a list of ids is a feature of another kind than an id
    assert window is not None and amounts(run, window) == list(range(9)) and window.refused == 3


def test_views_of_text_make_one_window_with_text(incoming: Path, run: Path) -> None:
    rows = rows_of(0, 9)
    for k, kind in enumerate((pa.string(), pa.string_view(), pa.large_string())):
        part = rows.slice(k * 3, 3)
        words = pa.array([f"item {i}, by its name" for i in part["item"].to_pylist()])
        part = part.set_column(2, "item", words.cast(kind))
        (incoming / f"{k}.parquet").write_bytes(as_bytes(part))
    config = config_of(incoming, rows=100)
    table = replace(SCHEMA.tables[0], dynamic=DynamicConfig())
    schema = replace(SCHEMA, tables=(table,))
    cutter = WindowCutter(WindowFolder(str(run)), config.open(), config, schema, True)
    window = cut(cutter, 0)
    cutter.close()
    assert window is not None and amounts(run, window) == list(range(9)) and not window.refused


def test_a_row_group_is_read_once_for_many_windows(
    incoming: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (incoming / "a.parquet").write_bytes(as_bytes(rows_of(0, 60), group=30))
    reads: list[list[int]] = []
    real = pq.ParquetFile.read_row_groups

    def counted(file: pq.ParquetFile, groups: list[int], **options: bool) -> pa.Table:
        reads.append(groups)
        return real(file, groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", counted)
    cutter = cutter_of(run, config_of(incoming, rows=5))
    got = [amounts(run, cut(cutter, number)) for number in range(12)]  # type: ignore[arg-type]
    cutter.close()
    assert np.ravel(got).tolist() == list(range(60)) and reads == [[0], [1]]


def test_the_bad_rows_of_a_file_cost_no_other_file_its_good_ones(
    incoming: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "MOST_REFUSALS", 3)
    for k, ids in enumerate(([-1] * 8, [1, 2, 3, -4, 5, 6, 7, 8])):
        rows = rows_of(8 * k, 8).set_column(2, "item", pa.array(ids))
        (incoming / f"{k}.parquet").write_bytes(as_bytes(rows))
    cutter = cutter_of(run, config_of(incoming, rows=100))
    window = cut(cutter, 0)
    cutter.close()
    assert window is not None and amounts(run, window) == [8, 9, 10, 12, 13, 14, 15]
    assert window.refused == 8 + 1


@pytest.mark.parametrize("time", [-1, 253_402_300_800, 2**62])
def test_a_time_that_is_none_is_refused_with_its_row(incoming: Path, run: Path, time: int) -> None:
    rows = rows_of(0, 4).set_column(3, "at", pa.array([5, time, 6, 7]))
    (incoming / "a.parquet").write_bytes(as_bytes(rows))
    cutter = cutter_of(run, config_of(incoming, time="at", event_seconds=60))
    window = cut(cutter, 0)
    cutter.close()
    assert window is not None and amounts(run, window) == [0, 2, 3]
    assert (window.newest_event, window.refused) == (7, 1)
    (told,) = json.loads((run / "stream" / "refused" / "window-00000000.json").read_text())
    assert told["place"] == "a.parquet, row 1" and str(time) in told["reason"]


def test_a_file_that_becomes_whole_after_it_was_listed_is_read_to_its_end(
    incoming: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, listing = as_bytes(rows_of(0, 8)), folder.FolderSource._list
    (incoming / "a.parquet").write_bytes(whole[:100])

    def listed(source: folder.FolderSource) -> dict[str, fs.FileInfo]:
        files = listing(source)
        (incoming / "a.parquet").write_bytes(whole)
        return files

    monkeypatch.setattr(folder.FolderSource, "_list", listed)
    cutter = cutter_of(run, config_of(incoming, rows=5))
    first, second = cut(cutter, 0), cut(cutter, 1)
    cutter.close()
    assert first is not None and second is not None and second.refused == 0
    assert amounts(run, first) + amounts(run, second) == list(range(8))


def test_a_file_of_the_same_size_and_fewer_rows_is_refused(incoming: Path, run: Path) -> None:
    (incoming / "a.parquet").write_bytes(as_bytes(rows_of(0, 8)))
    cutter = cutter_of(run, config_of(incoming, rows=5))
    assert amounts(run, cut(cutter, 0)) == [0, 1, 2, 3, 4]  # type: ignore[arg-type]
    size, short = (incoming / "a.parquet").stat().st_size, as_bytes(rows_of(0, 4))
    # what stands before the footer and is named by none of its offsets is not read
    data, footer = short[:-8], int.from_bytes(short[-8:-4], "little")
    padded = data[:-footer] + bytes(size - len(short)) + data[-footer:] + short[-8:]
    (incoming / "a.parquet").write_bytes(padded)
    (incoming / "b.parquet").write_bytes(as_bytes(rows_of(8, 5)))
    window = cut(cutter, 1)
    cutter.close()
    assert window is not None and amounts(run, window) == [8, 9, 10, 11, 12]
    assert window.refused == 3


def test_a_file_that_is_refused_as_a_window_ends_is_told(
    incoming: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "MOST_NAMES", 1)
    for name in "bc":
        (incoming / f"{name}.parquet").write_bytes(as_bytes(rows_of(0, 3, 5)))
    config = config_of(incoming, rows=100, seconds=600.0, time="at", event_seconds=60)
    cutter = cutter_of(run, config)
    assert cut(cutter, 0) is None
    for name in "ad":
        (incoming / f"{name}.parquet").write_bytes(as_bytes(rows_of(0, 3, 70)))
    window = cut(cutter, 0)
    cutter.close()
    assert window is not None and (window.rows, window.refused) == (6, 1)
    (told,) = json.loads((run / "stream" / "refused" / "window-00000000.json").read_text())
    assert told["place"] == "a.parquet"
