"""`IcebergSource` over real tables: random appends, compactions and restarts; what it refuses."""

from __future__ import annotations

import itertools
import json
import random
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.errors import ConfigError, InputError
from rayrec.streams import IcebergConfig
from rayrec.streams.iceberg import IcebergSource
from rayrec.streams.source import Cursor
from tests.data.iceberg_tables import (
    NAME,
    catalog_of,
    change_summary,
    compact,
    make_delete_file,
    make_table,
    properties_of,
)

pytest.importorskip("pyiceberg", reason="needs the extra iceberg")
pytest.importorskip("sqlalchemy", reason="the catalogs of tests lie in SQLite")

PLACES = ["a b/c%é", "q", None]


def rows_of(first: int, rows: int) -> pa.Table:
    numbers = range(first, first + rows)
    places = pa.array([PLACES[k % 3] for k in numbers], pa.string())
    return pa.table({"x": pa.array(numbers, pa.int64()), "place": places})


def table_of(folder: Path, appends: int = 0, by_place: bool = False, version: int = 2) -> Any:
    """Return a table of columns x and place, with 5 rows of each append."""
    table = make_table(folder, rows_of(0, 0).schema, version)
    if by_place:
        with table.update_spec() as spec:
            spec.add_identity("place")
    for k in range(appends):
        table.append(rows_of(5 * k, 5))
    return table


def merge_manifests(table: Any) -> None:
    """Let each append put the entries of all snapshots into one manifest."""
    properties = {
        "commit.manifest-merge.enabled": "true",
        "commit.manifest.min-count-to-merge": "2",
    }
    table.transaction().set_properties(properties).commit_transaction()


def source_of(folder: Path, after: int | None = None) -> IcebergSource:
    return IcebergSource(NAME, None, properties_of(folder), after)


def numbers_of(found: Any) -> list[int]:
    return [] if found.rows is None else list(found.rows["x"].to_pylist())


def drain(
    source: IcebergSource, cursor: Cursor, draw: random.Random | None = None
) -> tuple[list[int], Cursor]:
    """Return all rows behind a cursor, in pieces that are drawn, and the cursor behind them."""
    got = list[int]()
    while (found := source.read(cursor, most := draw.randint(1, 9) if draw else 4)) is not None:
        if found.rows is not None:
            numbers = numbers_of(found)
            assert 0 < len(numbers) <= most
            assert found.rows["place"].to_pylist() == [PLACES[k % 3] for k in numbers]
        got += numbers_of(found)
        cursor = json.loads(json.dumps(found.cursor))
    return got, cursor


def numbers_in(files: set[Path]) -> list[int]:
    """Return the numbers in Parquet files, by their paths as texts: those of folders are quoted."""
    read = (pq.ParquetFile(path).read(["x"])["x"].to_pylist() for path in sorted(files, key=str))
    return list(itertools.chain(*read))


def put_files(folder: Path, table: Any, first: int, rows: int, draw: random.Random) -> None:
    """Append some files in one snapshot, with names in any order and row groups of two rows."""
    names, done = draw.sample(range(100), draw.randint(2, 4)), 0
    paths = []
    for left, name in zip(range(len(names), 0, -1), names, strict=True):
        size = (rows - done) // left
        path = folder / "files" / f"{name:02}-{len(table.snapshots())}.parquet"
        pq.write_table(rows_of(first + done, size), path, row_group_size=2)
        paths.append(str(path))
        done += size
    table.add_files(paths)


@pytest.mark.seeds(range(100))
def test_each_appended_row_is_read_once_in_the_order_of_files(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    table = table_of(tmp_path, by_place=seed % 2 == 1, version=1 + seed // 2 % 2)
    if draw.random() < 0.5:
        merge_manifests(table)
    source = source_of(tmp_path)
    cursors = [source.start()]
    wanted, got = list[int](), list[int]()
    for _ in range(8):
        before = set(tmp_path.rglob("*.parquet"))
        rows, step = draw.randint(0, 20), draw.random()
        if step < 0.25 and wanted:
            compact(table)
        else:
            if step < 0.5 and not seed % 2:
                put_files(tmp_path, table, len(wanted), rows, draw)
            else:
                table.append(rows_of(len(wanted), rows))
            wanted += numbers_in(set(tmp_path.rglob("*.parquet")) - before)
        if draw.random() < 0.5:
            source.close()
            source = source_of(tmp_path)
        found = source.read(cursors[-1], draw.randint(1, 5))
        if found is not None and draw.random() < 0.5:
            got += numbers_of(found)
            cursors.append(found.cursor)
        if draw.random() < 0.3:
            new, cursor = drain(source, cursors[-1], draw)
            got += new
            cursors.append(cursor)
            assert got == wanted
        lag = source.lag(cursors[-1])
        assert lag.rows == len(wanted) - len(got) and lag.seconds is not None
        assert (lag.seconds > 0) == (len(wanted) > len(got))
    got += drain(source, cursors[-1], draw)[0]
    assert got == wanted and sorted(got) == list(range(len(got)))
    # any cursor gives the rows behind it again
    again = draw.choice(cursors)
    assert drain(source, again, draw)[0] == wanted[len(wanted) - source.lag(again).rows :]


def test_a_run_begins_behind_a_snapshot(tmp_path: Path) -> None:
    table = table_of(tmp_path, 3)
    first, _, third = (one.snapshot_id for one in table.snapshots())
    source = source_of(tmp_path, first)
    assert source.lag(source.start()).rows == 10
    assert drain(source, source.start())[0] == list(range(5, 15))
    newest = source_of(tmp_path, third)
    assert newest.read(newest.start(), 3) is None and newest.lag(newest.start()) == (0, 0.0)
    with pytest.raises(InputError, match=rf"lead back to snapshot 7, .* = {first}, the"):
        source_of(tmp_path, 7).read(source_of(tmp_path, 7).start(), 3)


def test_columns_come_with_the_rows_that_have_them_by_their_current_names(tmp_path: Path) -> None:
    from pyiceberg.types import DoubleType

    table = table_of(tmp_path, 1)
    with table.update_schema() as schema:
        schema.add_column("y", DoubleType())
    table.append(pa.table({"x": [5], "place": ["q"], "y": [0.5]}))
    with table.update_schema() as schema:
        schema.rename_column("x", "number")
        schema.delete_column("place")
    table.append(pa.table({"number": [6], "y": [0.25]}))
    source, cursor, found = source_of(tmp_path), source_of(tmp_path).start(), list[Any]()
    while (one := source.read(cursor, 9)) is not None:
        assert one.rows is not None
        found.append(one.rows.to_pydict())
        cursor = one.cursor
    first = {"number": [0, 1, 2, 3, 4]}
    assert found == [first, {"number": [5], "y": [0.5]}, {"number": [6], "y": [0.25]}]


def delete_file(table: Any) -> None:
    table.delete("x < 5")


def delete_row(table: Any) -> None:
    table.delete("x = 1")


def overwrite(table: Any) -> None:
    table.overwrite(rows_of(7, 1))


def add_delete_file(table: Any) -> None:
    table.append(rows_of(5, 1))
    make_delete_file(table)


@pytest.mark.parametrize("change", [delete_file, delete_row, overwrite, add_delete_file])
def test_snapshots_that_take_rows_away_are_refused(
    tmp_path: Path, change: Callable[[Any], None]
) -> None:
    table = table_of(tmp_path, 1)
    source = source_of(tmp_path)
    got, cursor = drain(source, source.start())
    assert got == list(range(5))
    change(table)
    path = table.refresh().snapshots()[1]
    with pytest.raises(
        InputError, match=rf"snapshot {path.snapshot_id} \([a-z]+\) takes rows away .* after_snapsh"
    ):
        source.read(cursor, 10)
    # a run may begin behind it
    table.append(rows_of(9, 1))
    later = source_of(tmp_path, table.snapshots()[-2].snapshot_id)
    assert drain(later, later.start())[0] == [9]


def test_an_overwrite_that_takes_nothing_away_is_read(tmp_path: Path) -> None:
    from pyiceberg.io.pyarrow import _dataframe_to_data_files

    table = table_of(tmp_path, 1)
    with table.transaction() as change, change.update_snapshot().overwrite() as snapshot:
        for file in _dataframe_to_data_files(table.metadata, rows_of(5, 3), table.io):
            snapshot.append_data_file(file)
    source = source_of(tmp_path)
    assert [one.summary.operation.value for one in table.snapshots()] == ["append", "overwrite"]
    assert source.lag(source.start()).rows == 8
    assert drain(source, source.start())[0] == list(range(8))


def test_rows_are_counted_by_manifests_where_the_summary_does_not_say(tmp_path: Path) -> None:
    table = table_of(tmp_path, 2)
    change_summary(table, lambda summary: [summary.pop(k) for k in set(summary) - {"operation"}])
    source = source_of(tmp_path)
    assert source.lag(source.start()).rows == 10


def expire(table: Any, numbers: list[int], keeps_parents: bool) -> None:
    """Expire snapshots as pyiceberg does, or as writers that keep the ids of lost parents."""
    parents = {str(one.snapshot_id): one.parent_snapshot_id for one in table.snapshots()}
    table.maintenance.expire_snapshots().by_ids(numbers).commit()
    if keeps_parents:
        path = Path(table.metadata_location)
        metadata = json.loads(path.read_text())
        for one in metadata["snapshots"]:
            one["parent-snapshot-id"] = parents[str(one["snapshot-id"])]
        path.write_text(json.dumps(metadata))
        table.refresh()


@pytest.mark.parametrize("keeps_parents", [False, True])
def test_a_snapshot_that_is_read_may_expire_and_another_may_not(
    tmp_path: Path, keeps_parents: bool
) -> None:
    table = table_of(tmp_path, 2)
    source = source_of(tmp_path)
    _, cursor = drain(source, source.start())
    table.append(rows_of(10, 5))
    compact(table)
    _, passed = drain(source, cursor)
    assert source.read(passed, 10) is None
    compact(table)
    after = source.read(passed, 10)
    assert after is not None and after.rows is None and source.read(after.cursor, 10) is None
    for first in (15, 20):
        table.append(rows_of(first, 5))
    numbers = [one.snapshot_id for one in table.snapshots()]
    assert passed["snapshot"] == numbers[3] and after.cursor["snapshot"] == numbers[4]
    expire(table, numbers[:2], keeps_parents)
    assert drain(source, cursor)[0] == list(range(10, 25))
    expire(table, numbers[2:4], keeps_parents)
    assert drain(source, passed)[0] == list(range(15, 25))
    for place in (cursor, source.start()):
        for ask in (source.lag, lambda at: source.read(at, 10)):
            with pytest.raises(InputError, match=rf"were expired .* = {numbers[4]}, the oldest"):
                ask(place)
    expire(table, numbers[4:5], keeps_parents)
    assert drain(source_of(tmp_path), after.cursor)[0] == list(range(15, 25))
    # as the message says, and with rows of a snapshot left when it expires
    with pytest.raises(InputError, match=rf"were expired .* = {numbers[5]}, the oldest"):
        source.read(passed, 10)
    later = source_of(tmp_path, numbers[5])
    half = later.read(later.start(), 3)
    assert half is not None and numbers_of(half) == [20, 21, 22]
    table.append(rows_of(25, 5))
    assert drain(later, half.cursor)[0] == list(range(23, 30))
    expire(table, numbers[6:], keeps_parents)
    with pytest.raises(InputError, match=r"were expired before their rows were read"):
        source_of(tmp_path).read(half.cursor, 3)


def test_a_snapshot_of_format_1_that_expired_is_not_taken_for_the_last_one(tmp_path: Path) -> None:
    table = table_of(tmp_path, 1, version=1)
    source = source_of(tmp_path)
    _, cursor = drain(source, source.start())
    table.append(rows_of(5, 5))
    with table.transaction() as change:
        change.upgrade_table_version(2)
    table.append(rows_of(10, 5))
    assert [one.sequence_number for one in table.snapshots()] == [0, 0, 1]
    assert drain(source, cursor)[0] == list(range(5, 15))
    expire(table, [one.snapshot_id for one in table.snapshots()[:2]], keeps_parents=False)
    with pytest.raises(InputError, match=r"were expired before their rows were read"):
        source.read(cursor, 10)


def append_once_more(table: Any) -> None:
    table.append(rows_of(5, 5))


def append_and_merge(table: Any) -> None:
    merge_manifests(table)
    table.append(rows_of(5, 5))


@pytest.mark.parametrize("keeps_parents", [False, True])
@pytest.mark.parametrize("change", [append_once_more, append_and_merge, compact])
def test_what_is_left_of_a_history_is_not_taken_for_the_whole(
    tmp_path: Path, change: Callable[[Any], None], keeps_parents: bool
) -> None:
    table = table_of(tmp_path, 1)
    change(table)
    first, second = (one.snapshot_id for one in table.snapshots())
    expire(table, [first], keeps_parents)
    source = source_of(tmp_path)
    with pytest.raises(InputError, match=rf"back to its first snapshot, .* = {second}, the oldest"):
        source.read(source.start(), 10)


@pytest.mark.parametrize("keeps_parents", [False, True])
def test_an_expired_snapshot_behind_the_cursors_is_no_rollback(
    tmp_path: Path, keeps_parents: bool
) -> None:
    table = table_of(tmp_path, 1)
    source = source_of(tmp_path)
    _, cursor = drain(source, source.start())
    for first in (5, 10):
        table.append(rows_of(first, 5))
    _, second, third = (one.snapshot_id for one in table.snapshots())
    expire(table, [second], keeps_parents)
    with pytest.raises(InputError, match=rf"were expired .* = {third}, the oldest"):
        source.read(cursor, 10)


def test_a_branch_that_was_rolled_back_or_moved_is_refused(tmp_path: Path) -> None:
    table = table_of(tmp_path, 3)
    first, second, third = (one.snapshot_id for one in table.snapshots())
    source = source_of(tmp_path)
    _, cursor = drain(source, source.start())
    table.manage_snapshots().rollback_to_snapshot(second).commit()
    for ask in (lambda: source.read(cursor, 10), lambda: source.lag(cursor)):
        with pytest.raises(InputError, match=rf"snapshot {third}, where .* is not on main"):
            ask()
    table.append(rows_of(15, 5))
    with pytest.raises(InputError, match=rf"snapshot {third}, where .* is not on main"):
        source.read(cursor, 10)
    # a run that has read no row that was taken back goes on
    later = source_of(tmp_path, first)
    assert drain(later, later.start())[0] == [*range(5, 10), *range(15, 20)]
    table.manage_snapshots().set_current_snapshot(third).commit()
    assert source.read(cursor, 10) is None


def test_files_that_are_gone_or_changed_are_refused(tmp_path: Path) -> None:
    table = table_of(tmp_path, 1)
    source = source_of(tmp_path)
    file = next(iter(tmp_path.rglob("*.parquet")))
    pq.write_table(pq.ParquetFile(file).read().slice(1), file)
    with pytest.raises(InputError, match=r"has 4 rows in place of 5.*after_snapshot"):
        source.read(source.start(), 10)
    file.unlink()
    with pytest.raises(InputError, match=r"snapshot \d+ cannot be read.*after_snapshot"):
        source.read(source.start(), 10)
    Path(table.current_snapshot().manifest_list).unlink()
    with pytest.raises(InputError, match=r"the manifests of snapshot \d+ cannot be read"):
        source_of(tmp_path).read(source.start(), 10)


def test_a_table_that_is_gone_or_was_made_anew_is_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    with pytest.raises(InputError, match=r"it cannot be opened"):
        source.read(source.start(), 10)
    with closing(sqlite3.connect(tmp_path / "catalog.db")) as catalog:
        assert not catalog.execute("select * from sqlite_master").fetchall()
    table_of(tmp_path, 1)
    _, cursor = drain(source, source.start())
    catalog_of(tmp_path).drop_table(NAME)
    with pytest.raises(InputError, match=r"it cannot be opened: Table does not exist: shop.clicks"):
        source.read(cursor, 10)
    table = table_of(tmp_path)
    for _ in range(2):
        with pytest.raises(InputError, match=r"not the table that the run has read"):
            source.read(cursor, 10)
        table.append(rows_of(0, 5))


def test_a_table_without_rows_waits_for_them(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    source = source_of(tmp_path)
    assert source.read(source.start(), 5) is None and source.lag(source.start()) == (0, 0.0)
    with pytest.raises(InputError, match=r"snapshot 7, where the run goes on, is not on main"):
        source_of(tmp_path, 7).read(source_of(tmp_path, 7).start(), 5)
    table.append(rows_of(0, 2))
    assert drain(source, source.start())[0] == [0, 1]


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyiceberg.io.pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'rayrec\[iceberg\]'"):
        IcebergSource("shop.clicks")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"table": "clicks"}, "namespace.name"),
        ({"table": "shop."}, "namespace.name"),
        ({"properties": {"s3.secret-access-key": "x"}}, r"\['s3.secret-access-key'\]"),
        ({"properties": {"uri": "postgresql://me:word@host/catalog"}}, r"\['uri'\]"),
        ({"properties": {"uri": 1}}, "properties"),
        ({"after_snapshot": 0}, "after_snapshot=0"),
    ],
)
def test_configs_that_do_not_fit_are_refused(options: dict[str, Any], why: str) -> None:
    IcebergConfig(table="a.b.c", properties={"uri": "postgresql://me@host:5432/catalog"})
    with pytest.raises(ConfigError, match=why):
        IcebergConfig(**{"table": "shop.clicks", **options})
