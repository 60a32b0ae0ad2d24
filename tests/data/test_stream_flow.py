"""Sources that always have more: a window ends by its seconds, and a run can be stopped."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rayrec.streams import Refusal, SourceLag, StreamConfig, StreamRows, StreamSource, cutting
from rayrec.streams.kept import WindowFolder
from rayrec.streams.source import Cursor
from tests.data.stream_files import SCHEMA, amounts, cut, rows_of


class Flow(StreamSource):
    """Gives a row, or a refusal, whenever it is asked."""

    name = "flow"

    def __init__(self, has_rows: bool = True) -> None:
        self._has_rows = has_rows

    def start(self) -> Cursor:
        return {"next": 0}

    def read(self, cursor: Cursor, most: int) -> StreamRows | None:
        time.sleep(0.001)
        first = int(cursor["next"])
        rows = rows_of(first, 1) if self._has_rows else None
        refused = () if self._has_rows else (Refusal(f"{first}", "no row"),)
        return StreamRows(rows, {"next": first + 1}, "flow", refused, first)

    def lag(self, cursor: Cursor) -> SourceLag:
        return SourceLag(None, None)


def cutter_of(run: Path, source: StreamSource, seconds: float) -> cutting.WindowCutter:
    config = StreamConfig(folder=str(run), rows=10**6, seconds=seconds)
    return cutting.WindowCutter(WindowFolder(str(run)), source, config, SCHEMA, True)


def test_a_window_ends_by_its_seconds_while_rows_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "LOOK_S", 0.1)
    cutter, got = cutter_of(tmp_path, Flow(), 0.3), list[int]()
    for number in range(3):
        began = time.monotonic()
        cutter.begin(number)
        while (window := cutter.window(number)) is None:
            assert time.monotonic() - began < 30.0
            cutter.wait(1.0)
        assert time.monotonic() - began > 0.25
        got += amounts(tmp_path, window)
    cutter.close()
    assert got == list(range(len(got)))


def test_rows_that_come_one_by_one_are_held_in_few_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the time of a window grows with the square of its rows."""
    monkeypatch.setattr(cutting, "MOST_PIECES", 4)
    cutter = cutter_of(tmp_path, Flow(), 60.0)
    cutter.begin(0)
    deadline = time.monotonic() + 30.0
    while (growing := cutter._growing) is None or growing.rows < 20:
        assert time.monotonic() < deadline
        cutter.wait(0.01)
    assert growing.table is not None and growing.table[0].num_chunks <= 6
    cutter.close()


def test_what_is_refused_is_told_while_more_of_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "LOOK_S", 0.1)
    cutter = cutter_of(tmp_path, Flow(has_rows=False), 0.1)
    assert cut(cutter, 0) is None
    assert "no row" in (tmp_path / "stream" / "refused" / "window-00000000.json").read_text()
    cutter.close()


def test_a_cutter_is_closed_while_rows_come(tmp_path: Path) -> None:
    cutter = cutter_of(tmp_path, Flow(), 3600.0)
    cutter.begin(0)
    cutter.wait(0.1)
    cutter.close()
    assert not (tmp_path / "stream").exists()
