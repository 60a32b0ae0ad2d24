"""Windows whose records or rows were lost or changed, and what else must not end in other rows."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

from rayrec.errors import InputError
from rayrec.streams import StreamConfig
from tests.data.stream_files import amounts, as_bytes, config_of, cut, cutter_of, rows_of


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
