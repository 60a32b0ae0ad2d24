"""Windows of rows in time: each row in its window, whatever files, filters, batches and ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data import ParquetDataset, TimeWindows, WindowedDataset
from rayrec.errors import ConfigError, InputError
from tests.data.arrow_files import SCHEMA, random_table


def written(folder: Path, rng: random.Random, days: list[int]) -> None:
    """Rows with the days given, in files and row groups of random sizes; one file in a folder."""
    first, number = 0, 0
    while first < len(days):
        count = min(rng.randint(1, 40), len(days) - first)
        table = random_table(rng, count, first)
        table = table.append_column("day", pa.array(days[first : first + count], pa.int32()))
        folder.mkdir(exist_ok=True)
        pq.write_table(table, folder / f"{number:03}.parquet", row_group_size=rng.randint(1, 20))
        first, number = first + count, number + 1


def rows_of(batches: Any) -> list[set[int]]:
    """The rows of each batch; the dense column 'row' numbers them."""
    return [set(batch.dense_features[:, 0].long().tolist()) for batch in batches]


@pytest.mark.seeds(range(60))
def test_a_batch_has_rows_of_one_window_on_any_number_of_ranks(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    days = [rng.choice([-7, 0, 1, 2, 3, 8, 9, 30]) for _ in range(rng.randint(20, 150))]
    written(tmp_path / "data", rng, days)
    where, taken = rng.choice([(None, days), ("row < 15", days[:15])])
    size = rng.choice([1, 2, 5])
    start, stop = rng.choice([(None, None), (0, None), (-7, 9), (None, 3)])
    data = ParquetDataset(
        str(tmp_path / "data"), SCHEMA, where=where, num_streams=rng.choice([1, 3]),
        shuffle_rows=rng.choice([4, 50]),
    )  # fmt: skip
    first = min(d for d in taken if stop is None or d < stop) if start is None else start
    wanted: dict[int, set[int]] = {}
    for row, day in enumerate(taken):
        if day >= first and (stop is None or day < stop):
            begin = first + (day - first) // size * size
            wanted.setdefault(begin, set()).add(row)
    if not wanted:
        with pytest.raises(InputError, match=r"no rows in windows of 'day'"):
            WindowedDataset(data, TimeWindows(column="day", size=size, start=start, stop=stop))
        return
    cut = WindowedDataset(data, TimeWindows(column="day", size=size, start=start, stop=stop))
    assert {w.start: w.data.num_rows for w in cut.windows} == {k: len(v) for k, v in wanted.items()}
    assert [w.start for w in cut.windows] == sorted(wanted)
    assert cut.num_rows == sum(map(len, wanted.values()))
    batch, drop_last, shuffle = rng.randint(1, 30), rng.random() < 0.3, rng.random() < 0.5
    options = {"seed": seed, "shuffle": shuffle, "drop_last": drop_last}
    one = rows_of(cut.loader(0, 1, batch, **options))
    assert len(one) == cut.num_batches(batch, drop_last)
    firsts = cut.first_batches(batch, drop_last)
    for window, low, high in zip(cut.windows, firsts, firsts[1:], strict=False):
        told = [row for rows in one[low:high] for row in rows]
        assert len(told) == len(set(told)) and set(told) <= wanted[window.start]
        if not drop_last:
            assert set(told) == wanted[window.start]
        alone = window.data.loader(0, 1, 7, shuffle=False)
        assert set().union(*rows_of(alone)) == wanted[window.start]
    ranks, begin = rng.randint(2, 3), rng.randint(0, len(one))
    parts = [
        rows_of(cut.loader(r, ranks, batch, start_batch=begin, **options)) for r in range(ranks)
    ]
    assert [set().union(*of_ranks) for of_ranks in zip(*parts, strict=True)] == one[begin:]


def test_windows_of_a_folder_column_and_their_fingerprints(tmp_path: Path) -> None:
    for day in (3, 5):
        folder = tmp_path / f"day={day}"
        folder.mkdir()
        pq.write_table(random_table(random.Random(day), 10, 100 * day), folder / "a.parquet")
    data = ParquetDataset(str(tmp_path), SCHEMA)
    cut = WindowedDataset(data, TimeWindows(column="day"))
    assert [(w.start, w.stop, len(w.data.files)) for w in cut.windows] == [(3, 4, 1), (5, 6, 1)]
    assert rows_of(cut.loader(0, 1, 10)) == [set(range(300, 310)), set(range(500, 510))]
    other = WindowedDataset(data, TimeWindows(column="day", size=4))
    prints = {one.fingerprint() for one in (data, cut, other)}
    assert len(prints) == 3
    assert WindowedDataset(data, TimeWindows(column="day")).fingerprint() == cut.fingerprint()


@pytest.mark.parametrize(
    ("column", "values", "says"),
    [
        ("days", [1, 2, 3], r"a\.parquet' has no column 'days' for the windows"),
        ("day", [1, None, 3], r"a\.parquet.*'day' of the windows is null in 1 rows of chunk 0"),
        ("day", ["1", "2", "3"], r"column 'day' of the windows has type string; cast it to int64"),
        (
            "day",
            pa.array([1, 2, 2**63], pa.uint64()),
            r"column 'day' of the windows holds a number that int64 does not",
        ),
    ],
)
def test_what_makes_no_windows_is_refused(
    tmp_path: Path, column: str, values: Any, says: str
) -> None:
    table = random_table(random.Random(0), 3).append_column("day", pa.array(values))
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match=says):
        WindowedDataset(ParquetDataset(str(tmp_path), SCHEMA), TimeWindows(column=column))


def test_numbers_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"start=3 and stop=3"):
        TimeWindows(column="day", start=3, stop=3)
    with pytest.raises(ConfigError, match=r"size"):
        TimeWindows(column="day", size=0)
    for name in ("size", "start", "stop"):
        with pytest.raises(ConfigError, match=rf"{name}=9223372036854775808; it must be between"):
            TimeWindows(column="day", **{name: 2**63})
    seconds = np.arange(10_001)
    table = random_table(random.Random(0), len(seconds)).append_column("t", pa.array(seconds))
    pq.write_table(table, tmp_path / "a.parquet")
    data = ParquetDataset(str(tmp_path), SCHEMA)
    with pytest.raises(ConfigError, match=r"makes 10001 windows of size 1; the most are 10000"):
        WindowedDataset(data, TimeWindows(column="t"))
    assert len(WindowedDataset(data, TimeWindows(column="t", size=2)).windows) == 5001


def test_numbers_at_the_ends_of_64_bits_are_in_their_windows(tmp_path: Path) -> None:
    """Their distance has no room in 64 bits with a sign, nor has the end of the last window."""
    ends = [-(2**63), -1, 2**63 - 1]
    table = random_table(random.Random(0), 3).append_column("t", pa.array(ends))
    pq.write_table(table, tmp_path / "a.parquet")
    data = ParquetDataset(str(tmp_path), SCHEMA)
    for size, starts in ((1, ends), (2**62, [-(2**63), -(2**62), 2**62])):
        cut = WindowedDataset(data, TimeWindows(column="t", size=size))
        assert [window.start for window in cut.windows] == starts
        assert rows_of(cut.loader(0, 1, 10)) == [{0}, {1}, {2}]
