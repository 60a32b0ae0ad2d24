"""Data sets and loaders on real files: every world sees the defined rows; broken input is named;
threads end.
"""

from __future__ import annotations

import gc
import pickle
import random
import threading
import time
from dataclasses import replace

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest
from arrow_files import SCHEMA, batch_rows, random_table, write_files

from rayrec.data import convert, readers
from rayrec.data.files import ArrowDataset, FileDataset, ParquetDataset
from rayrec.errors import ConfigError, InputError

KINDS: dict[str, type[FileDataset]] = {"parquet": ParquetDataset, "arrow": ArrowDataset}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.seeds(range(6))
def test_every_world_reads_the_same_global_batches(tmp_path, kind, seed):
    """Rows, values and order equal the definition in `order`, applied to the whole table, for 1 to
    7 ranks and any first batch.
    """
    rng = random.Random(seed)
    table = write_files(tmp_path, rng, kind, (*rng.choices((0, 1, 130, 301), k=3), 77))
    data = KINDS[kind](
        tmp_path,
        SCHEMA,
        num_streams=rng.choice((1, 3, 8)),
        shuffle_rows=rng.choice((16, 100)),
        threads=seed % 2 == 0,
    )
    shuffle, epoch, batch_size = rng.random() < 0.8, rng.randrange(3), rng.choice((37, 64, 1000))
    rows = batch_rows(convert.to_batch(table, SCHEMA))
    order = data.order(seed, epoch, shuffle)
    streams = [
        [place for b in range(order.num_blocks(s)) for place in block_places(order, s, b)]
        for s in range(order.num_streams)
    ]
    assert data.num_rows == len(rows)
    for num_ranks in (1, 2, 3, 4, 5, 7):
        start = rng.randrange(data.num_batches(batch_size) + 1)
        loaders = [
            data.loader(r, num_ranks, batch_size, seed, epoch, start, shuffle)
            for r in range(num_ranks)
        ]
        for t in range(start, data.num_batches(batch_size)):
            batches = [next(loader) for loader in loaders]
            got = [row for batch in batches for row in batch_rows(batch)]
            positions = range(t * batch_size, min((t + 1) * batch_size, len(rows)))
            want = sorted((k % order.num_streams, k // order.num_streams) for k in positions)
            assert got == [rows[streams[s][i]] for s, i in want]
            assert {b.global_rows for b in batches} == {len(want)}
        for loader in loaders:
            with pytest.raises(StopIteration):
                next(loader)


def block_places(order, stream: int, block: int) -> list[int]:
    first = [sum(order.chunk_rows[:c]) for c in range(len(order.chunk_rows))]
    rows = [
        first[c] + i
        for c, start, stop in order.block_chunks(stream, block)
        for i in range(start, stop)
    ]
    perm = order.block_permutation(stream, block)
    return rows if perm is None else [rows[i] for i in perm]


def epoch_rows(data: FileDataset, num_ranks: int = 1, **kwargs) -> list[tuple]:
    return [
        row
        for r in range(num_ranks)
        for batch in data.loader(r, num_ranks, 64, **kwargs)
        for row in batch_rows(batch)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_readers_read_only_the_schemas_columns_and_map_local_ipc_files(tmp_path, kind):
    table = random_table(random.Random(0), 5000)
    pq.write_table(table, tmp_path / "a.parquet")
    with ipc.new_file(tmp_path / "a.arrow", table.schema) as out:
        out.write_table(table)
    data = KINDS[kind](tmp_path, SCHEMA)
    before = pa.total_allocated_bytes()
    chunk = data.open(data.files[0]).read(0, list(SCHEMA.columns()))
    assert set(chunk.column_names) == set(SCHEMA.columns()) and "unused" not in chunk.column_names
    own = pa.total_allocated_bytes() - before
    assert own < chunk.nbytes / 10 if kind == "arrow" else own >= chunk.nbytes / 2


def test_large_row_groups_are_read_in_pieces_with_the_same_rows(tmp_path, monkeypatch):
    write_files(tmp_path, random.Random(0), "parquet", (400, 300), chunk=400)
    data = ParquetDataset(tmp_path, SCHEMA, num_streams=3, shuffle_rows=50)
    whole = epoch_rows(data, 2)
    monkeypatch.setattr("rayrec.data.streams.STREAM_ROWS", 10)
    monkeypatch.setattr(readers.ParquetReader, "PIECE_ROWS", 33)
    assert epoch_rows(data, 2) == whole


def test_files_with_other_types_and_column_orders_join(tmp_path):
    """int32 beside int64, an all-null column beside numbers, another order of columns: one block
    spans all three files.
    """
    write_files(tmp_path, random.Random(0), "parquet", (20, 20, 20))
    rows = epoch_rows(ParquetDataset(tmp_path, SCHEMA))
    a, b, _ = sorted(tmp_path.iterdir())
    table = pq.read_table(a)
    pq.write_table(
        table.set_column(4, "user", table["user"].cast(pa.int32())).select(
            table.column_names[::-1]
        ),
        a,
    )
    pq.write_table(pq.read_table(b).set_column(3, "d1", pa.nulls(20)), b)
    joined = epoch_rows(ParquetDataset(tmp_path, SCHEMA))
    assert [(r[0], r[1], *r[3:]) for r in joined] == [(r[0], r[1], *r[3:]) for r in rows]
    assert all(
        j[2] == (-1.0 if 20 <= j[1] < 40 else r[2]) for j, r in zip(joined, rows, strict=True)
    )
    pq.write_table(pq.read_table(b).set_column(4, "user", pa.array([["x"]] * 20)), b)
    with pytest.raises(InputError, match=r"part-001.*Set hash_buckets"):
        ParquetDataset(tmp_path, SCHEMA)
    pq.write_table(pq.read_table(b).set_column(4, "user", pa.array([[1]] * 20)), b)
    with pytest.raises(InputError, match="differ in type between files"):
        epoch_rows(ParquetDataset(tmp_path, SCHEMA, num_streams=1))


def test_dictionary_columns_join_over_batches_with_other_dictionaries(tmp_path):
    kind = pa.dictionary(pa.int8(), pa.int64())
    parts = [
        pa.DictionaryArray.from_arrays(pa.array([0, 1, None], pa.int8()), pa.array(d))
        for d in ([5, 6], [7, 8], [6, 5])
    ]
    base = random_table(random.Random(0), 9)
    table = base.set_column(base.column_names.index("user"), "user", pa.chunked_array(parts, kind))
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    data = ParquetDataset(tmp_path, SCHEMA, num_streams=1)
    users = [(5,), (6,), (), (7,), (8,), (), (6,), (5,), ()]
    assert [r[3] for r in epoch_rows(data, shuffle=False)] == users
    with ipc.new_file(
        tmp_path / "a.arrow", table.schema, options=ipc.IpcWriteOptions(unify_dictionaries=True)
    ) as out:
        out.write_table(table)
    data = ArrowDataset(tmp_path, SCHEMA, num_streams=1)
    assert [r[3] for r in epoch_rows(data, shuffle=False)] == users


@pytest.mark.parametrize("kind", KINDS)
def test_data_sets_pickle_and_open_by_directory_file_uri_or_file_system(tmp_path, kind):
    write_files(tmp_path / "d", random.Random(0), kind, (100,))
    cls, file = KINDS[kind], next((tmp_path / "d").iterdir())
    (tmp_path / "d" / "_SUCCESS").write_text("")
    (tmp_path / "d" / "notes.txt").write_text("")
    below = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    whole = cls(tmp_path / "d", SCHEMA)
    rows = epoch_rows(whole)
    for other in (
        cls(file, SCHEMA),
        cls((tmp_path / "d").as_uri(), SCHEMA),
        cls("d", SCHEMA, filesystem=below),
        pickle.loads(pickle.dumps(whole)),
    ):
        assert epoch_rows(other) == rows
        assert other.fingerprint() == whole.fingerprint()


def test_the_fingerprint_tells_data_apart(tmp_path):
    for name, sizes in (("a", (100, 50)), ("b", (100, 50)), ("c", (50, 100))):
        write_files(tmp_path / name, random.Random(0), "parquet", sizes)
    a, b, c = (ParquetDataset(tmp_path / n, SCHEMA) for n in "abc")
    assert a.fingerprint() == b.fingerprint() != c.fingerprint()
    assert a.fingerprint() != ParquetDataset(tmp_path / "a", SCHEMA, num_streams=4).fingerprint()


@pytest.mark.parametrize("kind", KINDS)
def test_no_data_and_broken_files_name_the_file(tmp_path, kind):
    cls = KINDS[kind]
    with pytest.raises(InputError, match="no data at"):
        cls(tmp_path / "none", SCHEMA)
    with pytest.raises(InputError, match="holds 0 files, none of them"):
        cls(tmp_path, SCHEMA)
    write_files(tmp_path / "empty", random.Random(0), kind, (0,))
    with pytest.raises(InputError, match="no rows in them"):
        cls(tmp_path / "empty", SCHEMA)
    write_files(tmp_path / "cut", random.Random(0), kind, (100, 100))
    file = sorted((tmp_path / "cut").iterdir())[1]
    whole = file.read_bytes()
    for broken in (whole[: len(whole) // 2], b"", b"not a table at all"):
        file.write_bytes(broken)
        with pytest.raises(InputError, match=r"part-001.* as .*write it again"):
            cls(tmp_path / "cut", SCHEMA)
    other = next(k for k in KINDS if k != kind)
    write_files(tmp_path / "other", random.Random(0), other, (10,))
    with pytest.raises(InputError, match="none of them"):
        cls(tmp_path / "other", SCHEMA)


def test_an_ipc_stream_is_refused(tmp_path):
    table = random_table(random.Random(0), 10)
    with ipc.new_stream(tmp_path / "a.arrow", table.schema) as out:
        out.write_table(table)
    with pytest.raises(InputError, match=r"a\.arrow"):
        ArrowDataset(tmp_path, SCHEMA)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_lacks_a_column_is_named_at_once(tmp_path, kind):
    write_files(tmp_path, random.Random(0), kind, (10,))
    schema = replace(SCHEMA, label="clicked")
    with pytest.raises(InputError, match=r"'clicked' is missing \(file '.*part-000"):
        KINDS[kind](tmp_path, schema)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_id_names_its_row_in_its_file_after_the_good_batches(tmp_path, kind, shuffle):
    """3 files of 100 rows; row 63 of the second holds id 5000. The error arrives from the thread
    with its type, then the end.
    """
    write_files(tmp_path, random.Random(0), kind, (100, 100, 100))
    file = sorted(tmp_path.iterdir())[1]
    table = (
        pq.read_table(file)
        if kind == "parquet"
        else ipc.open_file(pa.memory_map(str(file))).read_all()
    )
    users = table["user"].to_pylist()
    users[63] = 5000
    table = table.set_column(table.column_names.index("user"), "user", pa.array(users, pa.int64()))
    if kind == "parquet":
        pq.write_table(table, file, row_group_size=30)
    else:
        with ipc.new_file(file, table.schema) as out:
            out.write_table(table, max_chunksize=30)
    data = KINDS[kind](tmp_path, SCHEMA, num_streams=3, shuffle_rows=32)
    loader = data.loader(0, 1, 10, shuffle=shuffle)
    good = 0
    with pytest.raises(InputError, match=r"'user' .* holds id 5000 in row 63 of '.*part-001"):
        for _ in loader:
            good += 1
    assert 0 < good < 30 and loader.batches.start == good
    assert list(loader) == []


def test_a_file_lost_after_opening_is_an_input_error(tmp_path):
    write_files(tmp_path, random.Random(0), "parquet", (100, 100))
    data = ParquetDataset(tmp_path, SCHEMA)
    next(iter(sorted(tmp_path.iterdir()))).unlink()
    with pytest.raises(InputError, match="part-000"):
        list(data.loader(0, 1, 64))


def loader_threads() -> int:
    return sum(t.name == "rayrec-loader" for t in threading.enumerate())


def test_the_thread_ends_when_the_loader_is_closed_dropped_or_done(tmp_path):
    write_files(tmp_path, random.Random(0), "parquet", (2000,))
    data = ParquetDataset(tmp_path, SCHEMA)
    before = loader_threads()
    with data.loader(0, 1, 10) as loader:
        next(loader)
        assert loader_threads() == before + 1
    assert loader_threads() == before and list(loader) == []
    loader = data.loader(0, 1, 10)
    next(loader)
    del loader
    gc.collect()
    assert loader_threads() == before
    list(data.loader(0, 1, 10))
    assert loader_threads() == before


def test_a_loader_without_a_thread_reads_the_same_batches(tmp_path):
    write_files(tmp_path, random.Random(0), "parquet", (301, 200))
    data = ParquetDataset(tmp_path, SCHEMA)
    before = loader_threads()
    with data.loader(0, 2, 50, seed=3, start_batch=2, threaded=False) as loader:
        first = next(loader)
        assert loader_threads() == before and loader.batches == range(3, 11)
        rest = list(loader)
        assert list(loader) == []
    wanted = [batch_rows(batch) for batch in data.loader(0, 2, 50, seed=3, start_batch=2)]
    assert [batch_rows(batch) for batch in (first, *rest)] == wanted
    with data.loader(0, 2, 50, threaded=False) as closed:
        next(closed)
    assert list(closed) == []


def test_the_queue_is_bounded(tmp_path, monkeypatch):
    """With prefetch 2 and nobody reading, 2 batches wait and one is in hand: assemble ran 3 times,
    not 100.
    """
    write_files(tmp_path, random.Random(0), "parquet", (1000,))
    made = []
    real = convert.assemble
    monkeypatch.setattr(
        "rayrec.data.streams.assemble", lambda *a, **k: made.append(1) or real(*a, **k)
    )
    with ParquetDataset(tmp_path, SCHEMA).loader(0, 1, 10) as loader:
        deadline = time.monotonic() + 20
        while len(made) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        assert len(made) == 3
        assert len(loader) == 100
    assert len(made) <= 5, "closing stops the work instead of running it to its end"


def test_drop_last_and_ranks_without_rows(tmp_path):
    write_files(tmp_path, random.Random(0), "parquet", (101,))
    data = ParquetDataset(tmp_path, SCHEMA)
    sizes = [[(b.rows, b.global_rows) for b in data.loader(r, 4, 50)] for r in range(4)]
    assert sizes[3][-1] == (1, 1) and sizes[0][-1] == (0, 1)
    assert [sum(s[t][0] for s in sizes) for t in range(3)] == [50, 50, 1]
    assert [b.global_rows for b in data.loader(0, 4, 50, drop_last=True)] == [50, 50]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"rank": 2},
        {"rank": -1},
        {"start_batch": 12},
        {"start_batch": -1},
        {"prefetch": 0},
        {"global_batch_size": 0},
    ],
)
def test_impossible_loaders_are_refused(tmp_path, kwargs):
    write_files(tmp_path, random.Random(0), "parquet", (101,))
    data = ParquetDataset(tmp_path, SCHEMA)
    with pytest.raises(ConfigError, match=str(next(iter(kwargs.values())))):
        data.loader(**{"rank": 0, "num_ranks": 2, "global_batch_size": 10, **kwargs})


def test_impossible_orders_are_refused(tmp_path):
    write_files(tmp_path, random.Random(0), "parquet", (10,))
    with pytest.raises(ConfigError, match="num_streams=0"):
        ParquetDataset(tmp_path, SCHEMA, num_streams=0)
