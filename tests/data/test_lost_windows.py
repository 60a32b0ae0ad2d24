"""Windows whose records or rows were lost or changed, and what else must not end in other rows."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pytest

from rayrec.errors import InputError, SaveError
from rayrec.layout import EmbeddingBagConfig
from rayrec.streams import StreamConfig, StreamDataset, kept
from rayrec.streams.kept import WindowFolder
from tests.data.stream_files import SCHEMA, amounts, as_bytes, config_of, cut, cutter_of, rows_of


@pytest.fixture
def incoming(tmp_path: Path) -> Path:
    """Make the folder that files are put into, with ten rows."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.parquet").write_bytes(as_bytes(rows_of(0, 10)))
    return tmp_path / "in"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def cut_all(run: Path, config: StreamConfig, windows: int) -> None:
    cutter = cutter_of(run, config)
    assert all(cut(cutter, number) is not None for number in range(windows))
    cutter.close()


def record(run: Path, number: int) -> Path:
    return run / "stream" / f"window-{number:08d}.json"


def test_a_window_whose_record_is_gone_is_not_cut_anew(incoming: Path, run: Path) -> None:
    """Its rows may be others than before, and the window behind it begins where it ended."""
    cut_all(run, config_of(incoming, rows=3), 3)
    record(run, 1).unlink()
    cutter = cutter_of(run, config_of(incoming, rows=5))
    assert cut(cutter, 0) is not None
    with pytest.raises(InputError, match=r"window-00000001\.json is gone.* Put it back"):
        cut(cutter, 1)
    cutter.close()
    # the newest one may be cut anew until it was trained on
    record(run, 2).unlink()
    cut_all(run, config_of(incoming, rows=5), 2)
    WindowFolder(str(run)).check_cut(1, is_begun=True)
    record(run, 1).unlink()
    with pytest.raises(InputError, match=r"window-00000001\.json is gone"):
        WindowFolder(str(run)).check_cut(1, is_begun=True)


@pytest.mark.parametrize("text", ["", '{"number": 1, "fi', b"\xff\xfe", None])
def test_a_record_that_is_not_that_of_its_window_is_an_error(
    incoming: Path, run: Path, text: str | bytes | None
) -> None:
    cut_all(run, config_of(incoming, rows=3), 2)
    if text is None:
        shutil.copy(record(run, 0), record(run, 1))
    else:
        record(run, 1).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(InputError, match=r"window-00000001\.json .*Put the record back"):
        WindowFolder(str(run)).read(1)


def test_windows_of_another_source_are_not_trained_on(incoming: Path, run: Path) -> None:
    """As a run leaves them that was killed before it saved."""
    config = config_of(incoming, rows=3)
    cut_all(run, config, 1)
    other = config_of(incoming.with_name("other"), rows=3)
    assert WindowFolder(str(run), config.source_name).read(0) is not None
    with pytest.raises(InputError, match=r"was cut from folder .*in, and this run reads .*other"):
        WindowFolder(str(run), other.source_name).read(0)


@pytest.mark.parametrize("change", ["other rows", "bit", "short"])
def test_a_parquet_window_is_known_by_its_checksum(tmp_path: Path, change: str) -> None:
    rows = rows_of(0, 60).append_column("more", pa.array(["a", "b"] * 30).dictionary_encode())
    folder, config = WindowFolder(str(tmp_path)), config_of(tmp_path)
    names, crcs = zip(*[folder.write_rows(0, one) for one in (rows, rows.slice(30))], strict=True)
    window = kept.StreamWindow(number=0, file=names[0], rows=60, after={}, cut_s=0.0, crc32=crcs[0])
    data, path = StreamDataset(config=config, schema=SCHEMA), tmp_path / "stream" / names[0]
    assert data.window(str(tmp_path), window).num_rows == 60
    assert data.window(f"file://{tmp_path}", window).num_rows == 60
    whole = path.read_bytes()
    if change == "other rows":
        shutil.copy(tmp_path / "stream" / names[1], path)
    else:
        path.write_bytes(whole[:-1] if change == "short" else whole[:9] + b"!" + whole[10:])
    with pytest.raises(InputError, match=f"window .*{names[0]} is damaged"):
        data.window(str(tmp_path), window)


def test_a_file_with_a_damaged_name_of_a_column_may_wait(incoming: Path, run: Path) -> None:
    """Its rows are no lag, until it is read and refused."""
    damaged = as_bytes(rows_of(10, 5).append_column("spare", pa.array([0] * 5)))
    (incoming / "b.parquet").write_bytes(damaged.replace(b"spare", b"\xffpare"))
    (incoming / "c.parquet").write_bytes(as_bytes(rows_of(15, 5)))
    cutter = cutter_of(run, config_of(incoming, rows=10, patience_s=1e-6, seconds=1e-6))
    first = cut(cutter, 0)
    assert first is not None and first.lag_rows == 5
    second = cut(cutter, 1)
    cutter.close()
    assert second is not None and second.refused == 1
    assert amounts(run, second) == list(range(15, 20))


def test_rows_that_could_not_be_written_leave_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str, *args: Any) -> Any:
        file = ipc_new_file(path, *args)
        file.close()
        raise OSError(28, "No space left on device")

    ipc_new_file = ipc.new_file
    monkeypatch.setattr(ipc, "new_file", full)
    with pytest.raises(SaveError, match=r"cannot write window 0 .*No space left"):
        WindowFolder(str(tmp_path)).write_rows(0, rows_of(0, 5))
    assert not list((tmp_path / "stream").iterdir())


@pytest.mark.parametrize("first", [[0], [0, 1, 2]])
def test_a_row_that_is_refused_says_no_time_of_a_window(
    incoming: Path, run: Path, first: list[int]
) -> None:
    """One far ahead at the beginning does not keep the window open, and none later ends it."""
    items, times = list(range(10)), [40, 41, 42, 43, 50, 55, 61, 62, 130, 131]
    for row in (*first, 5):
        items[row], times[row] = -1, 9_000_000
    rows = rows_of(0, 10).set_column(2, "item", pa.array(items))
    (incoming / "a.parquet").write_bytes(as_bytes(rows.set_column(3, "at", pa.array(times))))
    cutter = cutter_of(run, config_of(incoming, rows=100, time="at", event_seconds=60))
    windows = [cut(cutter, number) for number in range(3)]
    cutter.close()
    fine = [row for row in range(5) if row not in first]
    assert [amounts(run, one) for one in windows if one is not None] == [fine, [6, 7], [8, 9]]
    assert [one.refused for one in windows if one is not None] == [len(first) + 1, 0, 0]


def test_a_record_names_its_source(incoming: Path, run: Path) -> None:
    config = config_of(incoming, rows=3)
    cut_all(run, config, 1)
    assert json.loads(record(run, 0).read_text())["source"] == f"folder {incoming}"


def test_a_checkpoint_has_the_schema_of_the_stream() -> None:
    """Also one whose tables are filled by a function, which is no JSON."""

    def fill(rows: object) -> None:
        """Leave the rows as they are."""

    (table,) = SCHEMA.tables
    assert isinstance(table, EmbeddingBagConfig)
    filled = replace(SCHEMA, tables=(replace(table, init_fn=fill),))
    data = StreamDataset(config=StreamConfig(folder="in"), schema=filled)
    assert type(SCHEMA).from_json(data.extras()["stream_schema"]) == SCHEMA


def test_a_name_that_is_no_text_ends_no_run_but_of_a_parquet_file(
    incoming: Path, run: Path
) -> None:
    Path(os.fsdecode(os.fsencode(incoming) + b"/aside-\xff.tmp")).touch()
    cut_all(run, config_of(incoming, rows=10), 1)
    Path(os.fsdecode(os.fsencode(incoming) + b"/b-\xff.parquet")).touch()
    cutter = cutter_of(run, config_of(incoming, rows=10))
    with pytest.raises(InputError, match=r"has the file b'b-.xff.parquet', .* Rename it"):
        cut(cutter, 1)
    cutter.close()
