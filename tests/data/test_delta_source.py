"""`DeltaSource` over real tables: random appends, compactions and restarts; what it refuses."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime
from operator import itemgetter
from pathlib import Path

import pyarrow as pa
import pytest

from rayrec.errors import ConfigError, InputError
from rayrec.streams.delta import DeltaSource
from rayrec.streams.source import Cursor

deltalake = pytest.importorskip("deltalake", reason="needs the extra delta")

PLACES = ["a b/c%é", "q", None]


def append(path: Path, first: int, rows: int, **options: object) -> None:
    numbers = range(first, first + rows)
    columns = {"x": pa.array(numbers, pa.int64())}
    if "partition_by" in options:
        columns["place"] = pa.array([PLACES[k % 3] for k in numbers], pa.string())
    deltalake.write_deltalake(path, pa.table(columns), mode="append", **options)


def drain(source: DeltaSource, cursor: Cursor, most: int) -> tuple[list[int], Cursor]:
    got, places = list[int](), list[str]()
    while (found := source.read(cursor, most)) is not None:
        if found.rows is None:  # behind versions that add none
            cursor = found.cursor
            continue
        assert 0 < found.rows.num_rows <= most
        if "place" in found.rows.column_names:
            numbers = found.rows["x"].to_pylist()
            assert found.rows["place"].to_pylist() == [PLACES[k % 3] for k in numbers]
        got += found.rows["x"].to_pylist()
        places.append(found.place)
        cursor = json.loads(json.dumps(found.cursor))
    # by versions, which have one digit here, and by paths
    assert places == sorted(places)
    return got, cursor


@pytest.mark.parametrize("seed", range(10))
def test_each_appended_row_is_read_once(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    options: dict[str, object] = {"partition_by": ["place"]} if seed % 2 else {}
    if draw.random() < 0.5:
        options["writer_properties"] = deltalake.WriterProperties(max_row_group_size=2)
    append(tmp_path, 0, 3, **options)
    count, got = 3, list[int]()
    source = DeltaSource(str(tmp_path))
    cursor = source.start()
    for _ in range(8):
        if draw.random() < 0.3:
            deltalake.DeltaTable(tmp_path).optimize.compact()
        else:
            rows = draw.randint(1, 9)
            append(tmp_path, count, rows, **options)
            count += rows
        if draw.random() < 0.5:
            source = DeltaSource(str(tmp_path))
        found = source.read(cursor, draw.randint(1, 5))
        if found is not None and draw.random() < 0.5:
            got += [] if found.rows is None else found.rows["x"].to_pylist()
            cursor = found.cursor
        lag = source.lag(cursor)
        assert lag.rows == count - len(got) and lag.seconds is not None
        assert (lag.seconds > 0) == (count > len(got))
        if draw.random() < 0.3:
            new, cursor = drain(source, cursor, draw.randint(1, 5))
            assert sorted(got + new) == list(range(count))
            got += new
    got += drain(source, cursor, 4)[0]
    if seed % 2:
        # files of a version are read in the order of their paths, which is that of partitions
        assert got == drain(DeltaSource(str(tmp_path)), source.start(), 7)[0]
        got.sort()
    assert got == list(range(count))


def test_a_run_begins_at_a_version_of_its_own(tmp_path: Path) -> None:
    for first in (0, 5, 10):
        append(tmp_path, first, 5)
    source = DeltaSource(str(tmp_path), 1)
    assert source.lag(source.start()).rows == 10
    assert drain(source, source.start(), 3)[0] == list(range(5, 15))
    later = DeltaSource(str(tmp_path), 3)
    assert later.read(later.start(), 3) is None and later.lag(later.start()) == (0, 0.0)
    with pytest.raises(InputError, match=r"at version 4, .* newest version is 2"):
        DeltaSource(str(tmp_path), 4).read(DeltaSource(str(tmp_path), 4).start(), 3)


def test_columns_that_a_version_adds_come_with_its_rows(tmp_path: Path) -> None:
    append(tmp_path, 0, 2)
    more = pa.table({"x": [2], "y": [0.5]})
    deltalake.write_deltalake(tmp_path, more, mode="append", schema_mode="merge")
    source = DeltaSource(str(tmp_path))
    first = source.read(source.start(), 9)
    assert first is not None and first.rows == pa.table({"x": [0, 1]})
    second = source.read(first.cursor, 9)
    assert second is not None and second.rows == more


def delete(path: Path) -> None:
    deltalake.DeltaTable(path).delete("x = 1")


def overwrite(path: Path) -> None:
    deltalake.write_deltalake(path, pa.table({"x": [1]}), mode="overwrite")


def change_schema(path: Path) -> None:
    rows = pa.table({"x": ["one"]})
    deltalake.write_deltalake(path, rows, mode="overwrite", schema_mode="overwrite")


def update(path: Path) -> None:
    deltalake.DeltaTable(path).update({"x": "x + 1"})


def test_columns_of_partitions_have_their_types(tmp_path: Path) -> None:
    """Their values lie in the log alone, as text."""
    instant, day = datetime(2020, 1, 1, 1, 2, 3, 5, UTC), date(2021, 1, 1)
    table = pa.table(
        {
            "x": [0, 1, 2, 3],
            "whole": [5, 5, -6, None],
            "day": [day, None, date(1969, 12, 31), day],
            "at": pa.array([instant] * 4, pa.timestamp("us", "UTC")),
            "local": pa.array([instant.replace(tzinfo=None)] * 4, pa.timestamp("us")),
            "flag": [True, False, None, True],
            "part": [1.5, 2.5, None, 1e-9],
            "text": ["a b", "", "é/%20", None],
        }
    )
    names = [name for name in table.column_names if name != "x"]
    deltalake.write_deltalake(tmp_path, table, partition_by=names)
    wanted = deltalake.DeltaTable(tmp_path).to_pyarrow_table().to_pylist()
    source = DeltaSource(str(tmp_path))
    cursor, got = source.start(), list[dict[str, object]]()
    while (found := source.read(cursor, 10)) is not None:
        assert found.rows is not None
        got += found.rows.to_pylist()
        cursor = found.cursor
    assert sorted(got, key=itemgetter("x")) == sorted(wanted, key=itemgetter("x"))


@pytest.mark.parametrize("mode", ["name", "id"])
def test_mapped_columns_are_refused(tmp_path: Path, mode: str) -> None:
    """Their names in the files are not those of the table."""
    append(tmp_path, 0, 5)
    path = tmp_path / "_delta_log" / f"{0:020d}.json"
    actions = [json.loads(line) for line in path.read_text().splitlines()]
    for action in actions:
        if "metaData" in action:
            action["metaData"]["configuration"] = {"delta.columnMapping.mode": mode}
    path.write_text("\n".join(map(json.dumps, actions)))
    source = DeltaSource(str(tmp_path))
    with pytest.raises(InputError, match=rf"version 0 cannot be read: .*columnMapping by {mode}"):
        source.read(source.start(), 10)


@pytest.mark.parametrize("change", [delete, overwrite, change_schema, update])
def test_versions_that_take_rows_away_are_refused(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    append(tmp_path, 0, 5)
    source = DeltaSource(str(tmp_path))
    _, cursor = drain(source, source.start(), 10)
    change(tmp_path)
    for ask in (lambda: source.read(cursor, 10), lambda: source.lag(cursor)):
        with pytest.raises(InputError, match=r"version 1 \([A-Z]+\) takes rows away"):
            ask()
    # a run may begin behind it
    later = DeltaSource(str(tmp_path), 2)
    assert later.read(later.start(), 10) is None


def test_a_lag_before_a_version_that_takes_rows_away_is_not_negative(tmp_path: Path) -> None:
    append(tmp_path, 0, 5)
    append(tmp_path, 5, 5)
    deltalake.DeltaTable(tmp_path).delete()
    source = DeltaSource(str(tmp_path), 1)
    assert source.lag(source.start()).rows == 0


def test_rows_that_are_put_back_are_refused(tmp_path: Path) -> None:
    append(tmp_path, 0, 5)
    deltalake.DeltaTable(tmp_path).delete()
    source = DeltaSource(str(tmp_path), 2)
    assert source.read(source.start(), 10) is None
    deltalake.DeltaTable(tmp_path).restore(0)
    with pytest.raises(InputError, match=r"version 2 \(RESTORE\)"):
        source.read(source.start(), 10)


def test_deletion_by_vectors_is_refused(tmp_path: Path) -> None:
    """The library writes no deletion vectors, so the commit of another writer stands in its log."""
    append(tmp_path, 0, 5)
    log = tmp_path / "_delta_log"
    source = DeltaSource(str(tmp_path))
    _, cursor = drain(source, source.start(), 10)
    add = next(
        one["add"]
        for one in map(json.loads, (log / f"{0:020d}.json").read_text().splitlines())
        if "add" in one
    )
    vector = {"storageType": "i", "pathOrInlineDv": "0rr9100000", "sizeInBytes": 8}
    features = ["deletionVectors"]
    versions = {"minReaderVersion": 3, "minWriterVersion": 7}
    protocol = {**versions, "readerFeatures": features, "writerFeatures": features}
    added = {**add, "deletionVector": {**vector, "cardinality": 1}}
    lines = [{"commitInfo": {"operation": "DELETE"}}, {"protocol": protocol}, {"add": added}]
    (log / f"{1:020d}.json").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(InputError, match=r"version 1 \(DELETE\) takes rows away"):
        source.read(cursor, 10)


def test_what_was_vacuumed_or_cleaned_is_refused(tmp_path: Path) -> None:
    append(tmp_path, 0, 5)
    append(tmp_path, 5, 5)
    table = deltalake.DeltaTable(tmp_path)
    table.optimize.compact()
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    source = DeltaSource(str(tmp_path))
    assert source.lag(source.start()).rows == 10
    with pytest.raises(InputError, match=r"version 0 cannot be read.*first_version"):
        source.read(source.start(), 10)
    deltalake.DeltaTable(tmp_path).create_checkpoint()
    (tmp_path / "_delta_log" / f"{0:020d}.json").unlink()
    with pytest.raises(InputError, match=r"the log of version 0 is lost.*first_version"):
        DeltaSource(str(tmp_path)).read(source.start(), 10)


def test_versions_that_add_no_rows_may_be_cleaned_once_they_are_passed(tmp_path: Path) -> None:
    append(tmp_path, 0, 3)
    append(tmp_path, 3, 3)
    source = DeltaSource(str(tmp_path))
    got, cursor = drain(source, source.start(), 9)
    deltalake.DeltaTable(tmp_path).optimize.compact()
    assert drain(source, cursor, 9)[0] == []
    cursor = drain(source, cursor, 9)[1]
    assert cursor["version"] == 3
    append(tmp_path, 6, 3)
    deltalake.DeltaTable(tmp_path).create_checkpoint()
    for version in range(3):
        (tmp_path / "_delta_log" / f"{version:020d}.json").unlink()
    assert got + drain(source, cursor, 9)[0] == list(range(9))


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(ConfigError, match=r"pip install 'rayrec\[delta\]'"):
        DeltaSource("table")


def test_a_table_that_was_made_anew_is_refused(tmp_path: Path) -> None:
    append(tmp_path / "a", 0, 5)
    source = DeltaSource(str(tmp_path / "a"))
    _, cursor = drain(source, source.start(), 10)
    (tmp_path / "a").rename(tmp_path / "b")
    with pytest.raises(InputError, match=r"it cannot be opened"):
        source.read(cursor, 10)
    append(tmp_path / "a", 0, 5)
    append(tmp_path / "a", 5, 5)
    with pytest.raises(InputError, match=r"is not the one it has read"):
        source.read(cursor, 10)
