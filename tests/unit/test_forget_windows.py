"""`rayrec forget` on the kept windows of a stream: no key is left, and every row has its place."""

from __future__ import annotations

import json
import mmap
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest

from rayrec.cli.main import main
from rayrec.data import ArrowDataset, Feature, FeatureSchema, SequenceColumn, to_batch
from rayrec.erasure.keys import KeyFile
from rayrec.erasure.windows import StoredWindows
from rayrec.errors import InputError
from rayrec.layout import DynamicConfig, EmbeddingBagConfig, EmbeddingConfig
from rayrec.streams.kept import ARROW, PARQUET, check_window, write_window

USER = 7_000_000_000_007
SCHEMA = FeatureSchema(
    label="label",
    features=(
        Feature(name="user", column="user_id"),
        Feature(name="past", column="items"),
        Feature(name="item", column="item"),
        Feature(name="word", column="word", hash_buckets=3),
    ),
    sequences=(SequenceColumn(name="times", column="times", aligned_with="past"),),
    tables=(
        EmbeddingBagConfig(64, 4, "t_user", feature_names=["user"], dynamic=DynamicConfig()),
        EmbeddingConfig(30, 4, "t_item", feature_names=["past", "item"]),
        EmbeddingBagConfig(3, 4, "t_word", feature_names=["word"]),
    ),
)


def random_rows(rng: random.Random, count: int) -> pa.Table:
    lists = [[rng.randrange(30) for _ in range(rng.randrange(4))] for _ in range(count)]
    return pa.table(
        {
            "label": pa.array([rng.randrange(2) for _ in range(count)], pa.int64()),
            "user_id": pa.array([USER + rng.randrange(5) for _ in range(count)], pa.int64()),
            "items": pa.array(lists, pa.list_(pa.int64())),
            "times": pa.array([list(range(len(one))) for one in lists], pa.list_(pa.int64())),
            "item": pa.array([rng.randrange(30) for _ in range(count)], pa.int64()),
            "word": pa.array([rng.choice("abcdefgh") for _ in range(count)]),
        }
    )


def put(folder: Path, rows: pa.Table, suffix: str, number: int = 0, group: int = 1000) -> str:
    """Write a window as a run does, and return the name of its file."""
    folder.mkdir(exist_ok=True)
    name = f"window-{number:08d}-x{suffix}"
    record = {
        "file": name,
        "rows": len(rows),
        "crc32": write_window(rows, f"{folder}/{name}", group),
    }
    (folder / f"window-{number:08d}.json").write_text(json.dumps(record))
    return name


def read(folder: Path, name: str) -> tuple[pa.Table, list[int]]:
    """Return the rows of a window, and how many each of its groups has."""
    if name.endswith(PARQUET):
        meta = pq.read_metadata(folder / name)
        sizes = [meta.row_group(g).num_rows for g in range(meta.num_row_groups)]
        return pq.read_table(folder / name), sizes
    record = json.loads((folder / f"{name[:15]}.json").read_text())
    check_window(str(folder / name), record["crc32"])
    with ipc.open_file(folder / name) as file:
        groups = range(file.num_record_batches)
        return file.read_all(), [file.get_batch(g).num_rows for g in groups]


def of_users(**more: Any) -> FeatureSchema:
    """A schema of one dynamic table, whose ids lie in the column user_id."""
    table = EmbeddingBagConfig(64, 4, "t_user", feature_names=["user"], dynamic=DynamicConfig())
    feature = Feature(name="user", column="user_id")
    return FeatureSchema(label="label", features=(feature,), tables=(table,), **more)


def forget(folder: Path, keys: dict[str, Any], schema: FeatureSchema) -> dict[str, int]:
    """Write the windows below "stream" without some keys below "out"; rows that change, by file."""
    pq.write_table(pa.table(keys), folder / "keys.parquet")
    file, stored = KeyFile(str(folder / "keys.parquet")), StoredWindows(folder / "stream")
    found = stored.find(file, [schema])
    stored.rewrite(folder / "out", file, [schema], found)
    return found


@pytest.mark.seeds(range(60))
def test_rows_lose_keys_and_nothing_else(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    (tmp_path / "stream" / "refused").mkdir(parents=True)
    windows = {}
    for k in range(3):
        rows, suffix = random_rows(rng, rng.randint(1, 40)), rng.choice([ARROW, PARQUET])
        windows[put(tmp_path / "stream", rows, suffix, k, rng.randint(1, 50))] = rows
    columns = {
        "user": [USER + rng.randrange(5)],
        "t_item": [rng.randrange(30)],
        "word": [rng.choice("abcdefgh")],
    }
    some = {name: columns[name] for name in rng.sample(sorted(columns), rng.randint(1, 3))}
    pq.write_table(pa.table(some), tmp_path / "keys.parquet")
    keys, stored = KeyFile(str(tmp_path / "keys.parquet")), StoredWindows(tmp_path / "stream")
    found = stored.find(keys, [SCHEMA])
    out = tmp_path / "out"
    stored.rewrite(out, keys, [SCHEMA], found)
    assert not StoredWindows(out).find(keys, [SCHEMA])
    assert {path.name for path in out.iterdir()} == {
        path.name for path in (tmp_path / "stream").iterdir() if path.is_file()
    }
    user, item, word = (some.get(name, [None])[0] for name in ("user", "t_item", "word"))
    for name, before in windows.items():
        (after, groups), touched = read(out, name), 0
        assert after.schema == before.schema
        assert groups == read(tmp_path / "stream", name)[1]
        assert json.loads((out / f"{name[:15]}.json").read_text())["rows"] == len(before)
        for was, now in zip(before.to_pylist(), after.to_pylist(), strict=True):
            wanted = dict(was)
            if was["user_id"] == user:
                wanted["user_id"] = None
            if item in was["items"]:
                wanted["items"] = wanted["times"] = None
            if was["item"] == item:
                wanted["item"] = None
            if was["word"] == word:
                wanted["word"] = None
            touched += wanted != was
            assert now == wanted
        assert found.get(name, 0) == touched
        # what is left can be trained on
        assert len(to_batch(after, SCHEMA).labels) == len(before)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([USER, 2**62 + 5, None]),
        pa.array([[USER], None, [3, 2**62 + 5]]),
        pa.array([[USER], None, [2**62 + 5]], pa.list_(pa.int64(), 1)),
        pa.array(["a", "a key of many bytes"]),
        pa.array(["a", "a key of many bytes"], pa.large_string()),
        pa.array([b"0123456789012345678", b"a key of many bytes"], pa.binary(19)),
    ],
)
def test_no_byte_of_a_key_is_left_below_a_null(column: pa.Array, tmp_path: Path) -> None:
    key = pa.array([2**62 + 5 if "int64" in str(column.type) else "a key of many bytes"])
    told = (
        b"a key of many bytes"
        if pa.types.is_string(key.type)
        else (2**62 + 5).to_bytes(8, "little")
    )
    name = put(tmp_path / "stream", pa.table({"user_id": column}), ARROW)
    assert told in (tmp_path / "stream" / name).read_bytes()
    forget(tmp_path, {"user": key}, of_users())
    assert told not in (tmp_path / "out" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_lists_of_a_window_hold_more_than_2_gib_of_text(tmp_path: Path) -> None:
    count, each = 110, 10_000_000
    ends = np.arange(count + 1, dtype=np.int32)
    zeros = pa.py_buffer(mmap.mmap(-1, count * each))  # takes memory where it is written alone
    buffers = [None, pa.py_buffer(ends * np.int32(each)), zeros]
    texts = pa.Array.from_buffers(pa.string(), count, buffers)
    long = pa.ListArray.from_arrays(pa.array(ends), texts)
    users = pa.chunked_array([pa.array([["a key"], ["another"]]), long, long])
    name = put(tmp_path / "stream", pa.table({"user_id": users}), ARROW, group=50)
    assert forget(tmp_path, {"user": ["a key"]}, of_users()) == {name: 1}
    with ipc.open_file(tmp_path / "out" / name) as file:
        groups = [file.get_batch(number) for number in range(file.num_record_batches)]
    assert [group.num_rows for group in groups] == [50, 50, 50, 50, 22]
    assert groups[0]["user_id"].slice(0, 2).to_pylist() == [None, ["another"]]
    assert not any(group["user_id"].slice(2).null_count for group in groups)


@pytest.mark.parametrize("suffix", [ARROW, PARQUET])
@pytest.mark.parametrize(
    ("column", "keys", "left"),
    [
        # one key beyond the column's type hides no other
        (pa.array([7, 8, 9], pa.int32()), pa.array([7, 2**40]), [None, 8, 9]),
        (pa.array([7, 2**64 - 9], pa.uint64()), pa.array([-9, 3]), [7, None]),
        # a number and the text of its digits are two ids
        (pa.array([7, 8]), pa.array(["7", "x"]), [7, 8]),
        (pa.array(["7", "8"]), pa.array([7]), ["7", "8"]),
        (pa.array(["a", "b"]), pa.array([b"a"]), [None, "b"]),
        (pa.array(["a", "b", None]).dictionary_encode(), pa.array(["b"]), ["a", None, None]),
        (pa.array(["a", "b"]), pa.array(["b"]).dictionary_encode(), ["a", None]),
        (
            pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)),
            pa.array([4]),
            [[1, 2], None, None],
        ),
        (pa.array([[1], None, [], [2, 3]], pa.list_view(pa.int64())), pa.array([3, 1]), "edges"),
        (pa.array([["a"], ["b", "c"]], pa.large_list(pa.large_string())), pa.array(["c"]), "first"),
    ],
)
def test_keys_are_found_in_all_types_of_columns(
    column: pa.Array, keys: pa.Array, left: object, suffix: str, tmp_path: Path
) -> None:
    left = {"edges": [None, None, [], None], "first": [["a"], None]}.get(str(left), left)
    # producers may say that a column has no nulls
    field = pa.field("user_id", column.type, nullable=bool(column.null_count))
    name = put(tmp_path / "stream", pa.table([column], pa.schema([field])), suffix)
    found = forget(tmp_path, {"user": keys}, of_users())
    assert read(tmp_path / "out", name)[0]["user_id"].to_pylist() == left
    assert sum(found.values()) == sum(a != b for a, b in zip(column.to_pylist(), left, strict=True))


@pytest.mark.parametrize("name", ["item", "past", "items"])
def test_a_key_goes_from_all_features_of_its_table(name: str, tmp_path: Path) -> None:
    (tmp_path / "stream").mkdir()
    rows = random_rows(random.Random(0), 40)
    pq.write_table(rows, tmp_path / "stream" / "window-00000000-x.parquet")
    forget(tmp_path, {name: [3]}, SCHEMA)
    now = pq.read_table(tmp_path / "out" / "window-00000000-x.parquet")
    assert 3 in rows["item"].to_pylist() and 3 not in now["item"].to_pylist()
    assert any(3 in one for one in rows["items"].to_pylist())
    assert not any(3 in (one or ()) for one in now["items"].to_pylist())


def test_what_reads_a_forgotten_column_beside_lists_of_its_own_loses_them_too(
    tmp_path: Path,
) -> None:
    names = ("key", "weighed", "timed")
    schema = FeatureSchema(
        label="label",
        features=(
            Feature(name="key", column="items"),
            Feature(name="weighed", column="items", weights="weights"),
            Feature(name="timed", column="items"),
        ),
        sequences=(SequenceColumn(name="times", column="times", aligned_with="timed"),),
        tables=tuple(EmbeddingBagConfig(64, 4, f"t_{one}", feature_names=[one]) for one in names),
    )
    rows = pa.table(
        {
            "label": [0, 1],
            "items": [[1, 2], [3]],
            "weights": [[0.5, 1.5], [2.5]],
            "times": [[7, 8], [9]],
        }
    )
    (tmp_path / "stream").mkdir()
    pq.write_table(rows, tmp_path / "stream" / "window-00000000-x.parquet")
    forget(tmp_path, {"key": [2]}, schema)
    now = pq.read_table(tmp_path / "out" / "window-00000000-x.parquet")
    assert now.to_pylist()[0] == {"label": 0, "items": None, "weights": None, "times": None}
    assert now.to_pylist()[1] == rows.to_pylist()[1]
    assert len(to_batch(now, schema).labels) == 2


def test_a_key_of_a_feature_is_none_of_a_table_that_has_its_name(tmp_path: Path) -> None:
    schema = FeatureSchema(
        label="label",
        features=(Feature(name="user", column="u"), Feature(name="item", column="i")),
        tables=(
            EmbeddingBagConfig(64, 4, "user", feature_names=["item"]),
            EmbeddingBagConfig(64, 4, "other", feature_names=["user"]),
        ),
    )
    pq.write_table(pa.table({"user": [1]}), tmp_path / "keys.parquet")
    keys = KeyFile(str(tmp_path / "keys.parquet"))
    assert set(keys.ids([schema], [])) == {"other"}
    assert [feature.name for feature, _ in keys.of_features(schema)] == ["user"]


@pytest.mark.parametrize("users", [[7, 8, 9], ["7", "8", "9"]])
def test_rows_whose_group_is_forgotten_are_one_group(users: list[object], tmp_path: Path) -> None:
    schema = of_users(groups=("user_id",))
    rows = pa.table({"label": [0, 1, 1, 0], "user_id": [*users, users[0]]})
    (tmp_path / "stream").mkdir()
    pq.write_table(rows, tmp_path / "stream" / "window-00000000-x.parquet")
    forget(tmp_path, {"user": users[:1]}, schema)
    now = pq.read_table(tmp_path / "out" / "window-00000000-x.parquet")
    groups, before = (to_batch(one, schema).groups["user_id"].tolist() for one in (now, rows))
    assert groups[1:3] == before[1:3] and groups[0] == groups[3] not in before
    # of other rows a null is an error as ever
    with pytest.raises(InputError, match="group column 'user_id' holds null"):
        to_batch(now.replace_schema_metadata().cast(rows.schema), schema)


@pytest.mark.parametrize("marked", [0, 1])
def test_windows_that_are_read_together_keep_what_was_forgotten(
    marked: int, tmp_path: Path
) -> None:
    """By hand, as no run reads them; the mark of one window is that of the rows of both."""
    schema = of_users(groups=("user_id",))
    rows = pa.table({"label": [0, 1], "user_id": [7 + marked, 8 + marked]})
    put(tmp_path / "stream", rows, ARROW, marked)
    put(tmp_path / "stream", pa.table({"label": [0], "user_id": [10]}), ARROW, 1 - marked)
    forget(tmp_path, {"user": [7 + marked]}, schema)
    both = ArrowDataset(str(tmp_path / "out"), schema, num_streams=1)
    with both.loader(0, 1, 3, shuffle=False, threaded=False) as batches:
        (batch,) = list(batches)
    assert len(set(batch.groups["user_id"].tolist())) == 3


def test_a_stream_forgets_a_user_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    users = USER + rng.integers(0, 50, 900)
    rows = pa.table({"label": rng.integers(0, 2, 900), "user_id": users})
    (tmp_path / "in").mkdir()
    for k in range(3):
        pq.write_table(rows.slice(300 * k, 300), tmp_path / "in" / f"{k}.parquet")
    of_users().save(tmp_path / "schema.json")
    keys = {
        "model.dense_layers": "[8]",
        "data.schema": tmp_path / "schema.json",
        "data.stream.folder": tmp_path / "in",
        "data.stream.rows": 200,
        "data.stream.seconds": 0.05,
        "data.stream.stop_when_idle_s": 0.5,
        "run.storage_path": tmp_path / "runs",
        "run.name": "a",
        "run.global_batch_size": 64,
    }
    words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    stop = ["--set", "data.stream.stop_after_windows=2"]
    assert main(["train", "--local", *words, *stop]) == 0
    run, key_file = tmp_path / "runs" / "a", tmp_path / "keys.csv"
    key_file.write_text(f"user\n{users[0]}\n")
    told = int(users[0]).to_bytes(8, "little")
    files = [path for path in run.rglob("*") if path.is_file()]
    assert sum(told in path.read_bytes() for path in files) >= 2  # a window, and the table's ids
    capsys.readouterr()
    assert main(["forget", "--keys", str(key_file), str(run)]) == 0
    for path in run.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert told not in data and str(users[0]).encode() not in data, path
    (receipt,) = run.glob("forgotten-*.json")
    changed = {one["path"]: one["rows"] for one in json.loads(receipt.read_text())["files"]}
    of_windows = {path: rows for path, rows in changed.items() if path.startswith("stream/")}
    assert sum(of_windows.values()) == int((users[:400] == users[0]).sum())
    assert main(["train", "--local", *words, "--set", "run.resume_from=latest"]) == 0
    assert "done: step 18" in capsys.readouterr().out


def test_rows_of_a_window_that_was_not_finished_are_removed(tmp_path: Path) -> None:
    rows = random_rows(random.Random(0), 5)
    for name in ("window-00000000-a", "window-00000000-b", "window-00000001-c"):
        pq.write_table(rows, tmp_path / f"{name}.parquet")
    put(tmp_path, rows, ARROW, 5)
    write_window(rows, f"{tmp_path}/window-00000005-y.arrow", 9)
    (tmp_path / "window-00000000.json").write_text('{"file": "window-00000000-a.parquet"}')
    (tmp_path / "window-00000001-d.parquet").write_bytes(b"PAR1")  # it was cut short
    for number, record in ((2, "{"), (3, "[]")):  # damaged, as the run will say
        pq.write_table(rows, tmp_path / f"window-0000000{number}-e.parquet")
        (tmp_path / f"window-0000000{number}.json").write_text(record)
    StoredWindows(tmp_path).clear_unfinished()
    assert sorted(path.name for path in tmp_path.glob("window-*-*")) == [
        "window-00000000-a.parquet",
        "window-00000002-e.parquet",
        "window-00000003-e.parquet",
        "window-00000005-x.arrow",
    ]
