"""A growing folder as a source: each whole file once, whatever its producer does."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.errors import ConfigError
from rayrec.streaming import Cursor, FolderSource, FolderStream, Polled, folder_source


class World:
    """A folder, its stream and the clock of both."""

    def __init__(self, folder: Path, give_up_s: float = 60.0) -> None:
        self.folder, self.now, self.give_up_s = folder, 0.0, give_up_s
        self.rows: list[int] = []
        self.refused: list[tuple[str, str]] = []
        self.begin_again()
        self.cursor: Cursor = self.stream.start()

    def begin_again(self) -> None:
        """Poll from another process."""
        config = FolderSource(path=str(self.folder), settle_s=1.0, give_up_s=self.give_up_s)
        self.stream = FolderStream(config, clock=lambda: self.now)

    def write(self, name: str, rows: list[int]) -> None:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"n": pa.array(rows, pa.int64())}), path)

    def take(self, most_rows: int = 1_000_000) -> Polled | None:
        polled = self.stream.poll(self.cursor, most_rows)
        if polled is not None:
            self.cursor = polled.cursor
            self.refused += polled.refused
            self.rows += [] if polled.rows is None else polled.rows["n"].to_pylist()
        return polled

    def drain(self, most_rows: int = 1_000_000) -> list[int]:
        """Wait until files have settled, and take all rows."""
        for _ in range(3):
            self.now += 1.1
            while self.take(most_rows) is not None:
                pass
        return self.rows


def test_a_file_counts_once_it_is_whole(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write("b.parquet", [3, 4])
    world.write(".hidden.parquet", [9])
    world.write("_temporary/x.parquet", [9])
    assert world.take() is None  # it was never seen before
    world.now += 0.6
    world.write("b.parquet", [3, 4, 5])
    assert world.take() is None
    world.now += 0.6
    assert world.take() is None  # it has changed since
    assert world.drain() == [3, 4, 5]
    os.rename(tmp_path / ".hidden.parquet", tmp_path / "c.parquet")
    # names of earlier files may come later
    world.write("a.parquet", [1])
    assert world.drain() == [3, 4, 5, 1, 9]
    assert world.refused == []


def test_a_file_that_is_not_whole_is_waited_for_and_then_refused(tmp_path: Path) -> None:
    world = World(tmp_path, give_up_s=20.0)
    world.write("a.parquet", [1, 2])
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[:-30])
    world.write("b.parquet", [3])
    assert world.drain() == [3]
    world.now += 20
    assert world.drain() == [3]
    ((name, why),) = world.refused
    assert name == "a.parquet" and "Parquet" in why
    assert world.drain() == [3] and len(world.refused) == 1
    # none of its rows was taken, so it counts once it is whole
    (tmp_path / "a.parquet").write_bytes(whole)
    assert world.drain() == [3, 1, 2]


def test_a_file_that_changes_or_goes_is_told_of_and_taken_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write("a.parquet", [1, 2, 3])
    assert world.drain() == [1, 2, 3]
    world.write("a.parquet", [1, 2, 3, *range(100, 200)])
    assert world.drain() == [1, 2, 3]
    world.write("b.parquet", [4, 5, 6])
    world.now += 1.1
    world.take()
    world.now += 1.1
    assert world.take(1) is not None and world.rows == [1, 2, 3, 4]
    os.remove(tmp_path / "b.parquet")
    # this process has read the file
    assert world.stream.poll(world.cursor, 10) is not None
    world.begin_again()
    assert world.drain() == [1, 2, 3, 4]
    assert [name for name, _ in world.refused] == ["a.parquet", "b.parquet"]
    assert "from 1 on" in world.refused[-1][1]


def test_a_name_before_all_that_a_cursor_holds_is_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_source, "KEPT_NAMES", 3)
    world = World(tmp_path)
    for number in range(1, 6):
        world.write(f"{number}.parquet", [number])
    assert world.drain() == [1, 2, 3, 4, 5]
    assert list(world.cursor["taken"]) == ["3.parquet", "4.parquet", "5.parquet"]
    world.write("0.parquet", [0])
    world.write("35.parquet", [35])
    assert world.drain() == [1, 2, 3, 4, 5, 35]
    assert [name for name, _ in world.refused] == ["0.parquet"]


@pytest.mark.seeds(range(200))
def test_every_row_comes_once_from_any_process(seed: int, tmp_path: Path) -> None:
    chance, world = random.Random(seed), World(tmp_path)
    wanted = list[int]()
    for number in range(chance.randint(1, 12)):
        rows = list(range(100 * number, 100 * number + chance.randint(0, 30)))
        world.write(f"{chance.randint(0, 3)}/{number}.parquet", rows)
        wanted += rows
        for _ in range(chance.randint(0, 6)):
            world.now += chance.choice([0.1, 0.6, 1.2])
            before = world.cursor
            polled = world.take(chance.randint(1, 20))
            if polled is not None and polled.rows is not None and chance.random() < 0.5:
                # the first part of the same rows, from the same cursor
                fewer = chance.randint(1, polled.rows.num_rows)
                again = world.stream.poll(before, fewer)
                assert again is not None
                assert again.rows.equals(polled.rows.slice(0, fewer))
                del world.rows[len(world.rows) - polled.rows.num_rows + fewer :]
                world.cursor = again.cursor
            if chance.random() < 0.3:
                world.begin_again()
    lag = world.stream.lag(world.cursor)
    assert lag.rows <= len(wanted) - len(world.rows)
    assert sorted(world.drain(chance.randint(1, 50))) == wanted
    assert world.refused == []
    assert world.stream.lag(world.cursor) == (0, 0.0)


def test_a_stream_follows_a_local_folder() -> None:
    with pytest.raises(ConfigError, match="s3://"):
        FolderSource(path="s3://bucket/events")
