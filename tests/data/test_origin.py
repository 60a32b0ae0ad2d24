"""Batches that say where their rows come from, loaders in file order, and labels that click models
refuse.
"""

from __future__ import annotations

import math
import mmap
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from arrow_files import SCHEMA, batch_rows, write_files

from rayrec.data.files import ArrowDataset, FileDataset, ParquetDataset
from rayrec.data.origin import RowOrigin, join_origins
from rayrec.data.readers import ParquetReader
from rayrec.data.statistics import check_statistics
from rayrec.errors import ConfigError, InputError

KINDS: dict[str, type[FileDataset]] = {"parquet": ParquetDataset, "arrow": ArrowDataset}


def first_rows(data: FileDataset) -> list[int]:
    """The number that the first row of each file has in the whole table."""
    starts = [0]
    for file in data.files:
        starts.append(starts[-1] + sum(file.chunk_rows))
    return starts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.seeds(range(4))
def test_every_row_names_its_file_and_number(tmp_path, kind, seed):
    """Rows number themselves in a dense column, to compare the origin with what was read."""
    rng = random.Random(seed)
    table = write_files(tmp_path, rng, kind, (*rng.choices((0, 1, 130, 301), k=3), 77))
    data = KINDS[kind](
        tmp_path, SCHEMA, num_streams=rng.choice((1, 3)), shuffle_rows=rng.choice((16, 100))
    )
    starts, seen = first_rows(data), 0
    for rank in range(3):
        for batch in data.loader(rank, 3, 64, seed, keep_columns=["unused", "row"]):
            origin = batch.origin
            assert origin is not None and origin.columns is not None
            whole = [starts[file] + row for file, row in zip(origin.file, origin.row, strict=True)]
            assert whole == batch.dense_features[:, 0].int().tolist()
            assert origin.columns["row"].to_pylist() == whole
            assert (
                origin.columns["unused"].to_pylist()
                == table["unused"].take(pa.array(whole)).to_pylist()
            )
            seen += batch.rows
    assert seen == data.num_rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_ordered_batches_are_the_rows_in_file_order(tmp_path, kind, num_ranks):
    write_files(tmp_path, random.Random(0), kind, (130, 0, 77, 51))
    data = KINDS[kind](tmp_path, SCHEMA, num_streams=4, shuffle_rows=40)
    loaders = [data.loader(r, num_ranks, 50, shuffle=False, ordered=True) for r in range(num_ranks)]
    rows = []
    for _ in range(data.num_batches(50)):
        for loader in loaders:
            rows += next(loader).dense_features[:, 0].int().tolist()
    assert rows == list(range(258))


def test_batches_say_nothing_of_their_origin_unless_asked(tmp_path):
    write_files(tmp_path, random.Random(0), "parquet", (60,))
    assert next(ParquetDataset(tmp_path, SCHEMA).loader(0, 1, 50)).origin is None


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_batch_has_its_place_in_the_run(tmp_path, num_ranks):
    """Which is the same for any number of ranks, and another one in each epoch."""
    write_files(tmp_path, random.Random(0), "parquet", (30, 41))
    data = ParquetDataset(str(tmp_path), SCHEMA)
    seeds = set()
    for seed, epoch in ((5, 0), (5, 1), (6, 0)):
        for rank in range(num_ranks):
            loader = data.loader(rank, num_ranks, 7, seed=seed, epoch=epoch, start_batch=1)
            for step, batch in enumerate(loader, 1):
                moved = batch.to("cpu").place
                assert moved == (moved.seed, step, rank * batch.global_rows // num_ranks)
                seeds.add((seed, epoch, moved.seed))
    assert len(seeds) == len({own for *_, own in seeds}) == 3


def test_rows_in_file_order_cannot_be_shuffled(tmp_path):
    write_files(tmp_path, random.Random(0), "parquet", (60,))
    with pytest.raises(ConfigError, match=r"ordered=True.*shuffle=False"):
        ParquetDataset(tmp_path, SCHEMA).loader(0, 1, 50, ordered=True)


def test_a_column_to_keep_must_be_in_every_file(tmp_path):
    write_files(tmp_path, random.Random(0), "parquet", (60, 60))
    pq.write_table(
        pq.read_table(tmp_path / "part-001.parquet").drop_columns(["unused"]),
        tmp_path / "part-001.parquet",
    )
    with pytest.raises(InputError, match=r"'unused' is missing \(file .*part-001\.parquet"):
        ParquetDataset(tmp_path, SCHEMA).loader(0, 1, 50, keep_columns=["unused"])


@pytest.mark.parametrize("value", [2, -1])
def test_a_label_that_is_neither_0_nor_1_is_named_with_file_and_row(tmp_path, value):
    write_files(tmp_path, random.Random(0), "parquet", (60, 60))
    path = tmp_path / "part-001.parquet"
    table = pq.read_table(path)
    labels = table["label"].to_pylist()
    labels[41] = value
    pq.write_table(
        table.set_column(1, "label", pa.array(labels, pa.int32())), path, row_group_size=7
    )
    data = ParquetDataset(tmp_path, SCHEMA, num_streams=2, shuffle_rows=16)
    assert sum(batch.rows for batch in data.loader(0, 1, 50)) == 120, (
        "a regression may have any label"
    )
    with pytest.raises(
        InputError, match=rf"'label' holds {value} in row 41 of '.*part-001\.parquet'"
    ):
        list(data.loader(0, 1, 50, binary_labels=True))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("label", 2),
        ("label", None),
        ("user", 1000),
        ("user", -1),
        ("genres", [3, 20]),
        ("d1", math.inf),
        ("d1", -math.inf),
    ],
)
def test_statistics_lead_to_the_bad_row_without_reading_the_others(
    tmp_path, monkeypatch, column, value
):
    write_files(tmp_path, random.Random(0), "parquet", (60, 60))
    path = tmp_path / "part-001.parquet"
    table = pq.read_table(path)
    check_statistics(ParquetDataset(tmp_path, SCHEMA))
    values = table[column].to_pylist()
    values[41] = value
    place = table.column_names.index(column)
    pq.write_table(
        table.set_column(place, column, pa.array(values, table[column].type)),
        path,
        row_group_size=7,
    )
    data = ParquetDataset(tmp_path, SCHEMA)
    read = []
    monkeypatch.setattr(
        ParquetReader,
        "read",
        lambda self, group, columns: read.append(group) or whole(self, group, columns),
    )
    with pytest.raises(InputError, match=r"in row 41 of '.*part-001\.parquet'"):
        check_statistics(data)
    assert read == [41 // 7]


whole = ParquetReader.read


def test_files_without_statistics_are_left_to_the_readers(tmp_path):
    write_files(tmp_path, random.Random(0), "parquet", (60,))
    table = pq.read_table(tmp_path / "part-000.parquet")
    users = table["user"].to_pylist()
    users[3] = 5000
    spoilt = table.set_column(table.column_names.index("user"), "user", pa.array(users, pa.int64()))
    pq.write_table(spoilt, tmp_path / "part-000.parquet", write_statistics=False)
    check_statistics(ParquetDataset(tmp_path, SCHEMA))
    with pytest.raises(InputError, match="holds id 5000 in row 3"):
        list(ParquetDataset(tmp_path, SCHEMA).loader(0, 1, 50))


def test_a_part_is_not_searched_for_columns_to_keep(tmp_path, monkeypatch):
    write_files(tmp_path, random.Random(0), "parquet", (60, 60), chunk=20)
    data = ParquetDataset(tmp_path, SCHEMA)
    wanted = [
        row
        for batch in data.loader(0, 1, 50, shuffle=False, ordered=True)
        for row in batch_rows(batch)
    ]
    part = data.of_chunks(data.chunks()[1:5])
    assert [file.path for file in part.files] == [file.path for file in data.files]
    opened = []
    real = ParquetDataset.open
    monkeypatch.setattr(
        ParquetDataset, "open", lambda self, file: opened.append(file.path) or real(self, file)
    )
    given = {"shuffle": False, "ordered": True, "keep_columns": ["user"], "threaded": False}
    loader = part.loader(0, 1, 50, **given)
    assert not opened
    assert [row for batch in loader for row in batch_rows(batch)] == wanted[20:100]
    assert sorted(set(opened)) == sorted(opened), "each file once"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kept_columns_of_a_batch_hold_more_than_2_gib_of_text():
    count, each = 110, 10_000_000
    ends = pa.py_buffer(np.arange(count + 1, dtype=np.int32) * np.int32(each))
    zeros = pa.py_buffer(mmap.mmap(-1, count * each))  # takes memory where it is written alone
    texts = pa.Array.from_buffers(pa.string(), count, [None, ends, zeros])
    kept = pa.record_batch({"text": texts, "row": np.arange(count)})
    one = RowOrigin(np.zeros(count, np.int32), np.arange(count), kept)
    columns = join_origins([one, one]).columns
    assert columns is not None
    assert columns["row"].to_pylist() == [*range(count), *range(count)]
    assert len(columns["text"]) == 2 * count
