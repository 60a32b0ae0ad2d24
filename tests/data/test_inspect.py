"""`inspect_data`: what it says of columns, the schema that it proposes, and what it refuses."""

from __future__ import annotations

import json
import math
import random
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.data import FeatureSchema, ParquetDataset, inspect_data
from rayrec.data.column_profile import COUNTED, Counts, profile_column
from rayrec.data.inspect import DataReport
from rayrec.data.readers import ParquetReader
from rayrec.errors import ConfigError, InputError
from rayrec.models import DLRM, DLRMTrain
from rayrec.modules import EmbeddingBagCollection
from tests.clicks import LEARNABLE, write_clicks

ROWS = 4000


def click_table(seed: int = 0, **more: Any) -> pa.Table:
    """A label, and whatever columns are given."""
    rng = np.random.default_rng(seed)
    columns: dict[str, Any] = {"click": rng.integers(0, 2, ROWS).astype(np.int8)}
    columns["shop_id"] = rng.integers(0, 40, ROWS)
    return pa.table(columns | more)


def write(folder: Path, table: pa.Table, group: int = 500) -> str:
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / "part.parquet", row_group_size=group)
    return str(folder)


def drawn(high: int, low: int = 0, size: int = ROWS) -> np.ndarray:
    return np.random.default_rng(high).integers(low, high, size)


def normal(bad: dict[int, float] | None = None) -> np.ndarray:
    values = np.random.default_rng(5).normal(size=ROWS)
    for row, value in (bad or {}).items():
        values[row] = value
    return values


def lists(lengths: Any, high: int = 90) -> pa.Array:
    rng = random.Random(3)
    return pa.array([[rng.randrange(high) for _ in range(lengths(i))] for i in range(ROWS)])


def nulls(values: Any, share: float) -> pa.Array:
    return pa.array(values, mask=np.random.default_rng(1).random(ROWS) < share)


WORDS = np.array([f"w{i}" for i in range(30)])
# column name, values -> use, hashed, rows of its table, a trouble (or "" for none)
COLUMNS: dict[str, tuple[str, Any, str, bool, int, str]] = {
    "ids": ("user_id", drawn(700), "feature", False, 700, ""),
    "ids of a round size": ("user_id", drawn(1987), "feature", False, 2000, ""),
    "codes": ("weekday", drawn(7), "feature", False, 7, ""),
    "words": ("city", WORDS[drawn(30)], "feature", True, 64, ""),
    "bytes": ("city", pa.array(WORDS[drawn(30)]).cast(pa.binary()), "feature", True, 64, ""),
    "dictionary": ("city", pa.array(WORDS[drawn(30)]).dictionary_encode(), "feature", True, 64, ""),
    "lists": ("clicked", lists(lambda i: i % 4), "feature", False, 90, ""),
    "negative ids": ("user_id", drawn(90, -5), "feature", True, 256, "ids reach down to -5"),
    "sparse ids": (
        "user_id",
        drawn(60) * 10**9,
        "feature",
        True,
        128,
        "ids reach up to .* about 60 of them different",
    ),
    "skewed ids": (
        "user_id",
        np.where(drawn(10) > 3, 5, drawn(50)),
        "feature",
        False,
        50,
        r"5 is 59\.4% of all values",
    ),
    "null ids": (
        "user_id",
        nulls(drawn(50), 0.7),
        "feature",
        False,
        50,
        r"(69|70|71)\.\d% of the rows are null",
    ),
    "empty lists": (
        "clicked",
        lists(lambda i: int(i % 5 == 0)),
        "feature",
        False,
        90,
        r"80\.0% of the lists are empty",
    ),
    "mixed lists": (
        "clicked",
        lists(lambda i: 300 if i == 7 else 1),
        "feature",
        False,
        90,
        r"list lengths are mixed, from 1 to 300 with a mean of 1\.1",
    ),
    "fractions": ("price", normal(), "dense", False, 0, ""),
    "null fractions": ("price", nulls(normal(), 0.3), "dense", False, 0, ""),
    "flags": ("is_new", drawn(2), "dense", False, 0, ""),
    "amounts": ("num_views", drawn(300), "dense", False, 0, ""),
    "negative amounts": ("balance", drawn(300, -300), "dense", False, 0, ""),
    "whole fractions": ("item", drawn(50) * 1.0, "dense", False, 0, "Cast them to int64"),
    "constant": ("country", np.full(ROWS, 3), "none", False, 0, "all values are 3"),
    "one word": ("country", np.full(ROWS, "no"), "none", False, 0, "all values are 'no'"),
    "nothing": ("gap", pa.nulls(ROWS, pa.int64()), "none", False, 0, "all rows are null"),
    "no type": ("gap", pa.nulls(ROWS), "none", False, 0, "the type null is not read"),
    "nan": ("price", normal({9: math.nan}), "none", False, 0, "NaN or infinite. Write null"),
    "infinity": ("price", normal({9: -math.inf}), "none", False, 0, "NaN or infinite"),
    "too large": ("price", normal({9: 1e300}), "none", False, 0, "beyond float32"),
    "a key": ("row", np.random.default_rng(0).permutation(ROWS), "none", False, 0, "a key"),
    "free text": ("note", [f"text {i}" for i in range(ROWS)], "none", False, 0, "free text"),
    "times": (
        "time",
        pa.array([datetime(2026, 11, 1)] * ROWS),
        "none",
        False,
        0,
        "the type timestamp.* is not read",
    ),
    "weights": (
        "scores",
        pa.array([[0.5, i / ROWS] for i in range(ROWS)]),
        "none",
        False,
        0,
        "lists of fractions are no ids",
    ),
    "nulls in lists": (
        "clicked",
        pa.array([[1, None] if i == 3 else [i % 5] for i in range(ROWS)]),
        "none",
        False,
        0,
        "1 nulls lie inside of lists",
    ),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_every_kind_of_column_has_its_use(tmp_path, case):
    name, values, use, hashed, size, trouble = COLUMNS[case]
    path = write(tmp_path / "d", click_table(**{name: values}))
    report = inspect_data(path)
    (column,) = (column for column in report.columns if column.name == name)
    assert column.advice.use == use, column.advice
    assert column.advice.hash_buckets == (size if hashed else None)
    assert column.advice.rows == size
    troubles = " ".join(column.advice.troubles)
    if trouble:
        assert re.search(trouble, troubles), troubles
        assert any(told.startswith(f"{name}: ") for told in report.troubles)
    else:
        assert not troubles
    # whatever it says of the column, the schema fits the rows as training reads them
    data = ParquetDataset(path, report.schema())
    batches = list(data.loader(0, 1, 512, binary_labels=True))
    assert sum(batch.rows for batch in batches) == ROWS
    assert (name in data.schema.feature_names()) == (use == "feature")
    assert (name in [dense.column for dense in data.schema.dense]) == (use == "dense")


@pytest.mark.parametrize(
    ("columns", "label", "trouble"),
    [
        ({"label": drawn(2), "x": drawn(2)}, "label", ""),
        ({"Clicked": drawn(2), "x": drawn(2)}, "Clicked", ""),
        ({"x": drawn(2), "y": drawn(2) * 1.0}, "y", ""),
        ({"bought": drawn(2).astype(bool), "z": drawn(9)}, "bought", ""),
        ({"a": drawn(2), "b": drawn(2)}, None, "no column looks like the label"),
        ({"a": drawn(9)}, None, "no column looks like the label"),
        ({"target": drawn(5)}, "target", "the labels lie between 0 and 4"),
        ({"label": np.zeros(ROWS)}, "label", "all labels are the same"),
        ({"label": nulls(drawn(2), 0.1)}, "label", "of the labels are null"),
        ({"label": normal({3: math.nan})}, "label", "of the labels are NaN or infinite"),
        ({"label": (np.arange(ROWS) == 7) * 1}, "label", "0.00025 of 1 of the labels are 1"),
    ],
)
def test_the_label_is_guessed_by_name_and_values(tmp_path, columns, label, trouble):
    report = inspect_data(write(tmp_path / "d", pa.table({**columns, "shop_id": drawn(40)})))
    assert report.labels == (() if label is None else (label,))
    assert trouble in " ".join(report.troubles)
    if label is None:
        with pytest.raises(ConfigError, match=r"looks like the label. Name it; .*'shop_id'"):
            report.schema()
        assert report.to_dict()["schema"] is None


def test_a_column_without_a_name_is_told(tmp_path):
    report = inspect_data(write(tmp_path, click_table().append_column("", pa.array(drawn(9)))))
    with pytest.raises(ConfigError, match=f"a column of '{report.path}' has no name; give it one"):
        report.schema()


def test_labels_that_are_given_are_taken(tmp_path):
    stars = {"stars": drawn(6), "like": drawn(2)}
    path = write(tmp_path / "d", click_table(**stars))
    report = inspect_data(path, label=["click", "stars"])
    schema = report.schema()
    assert schema.labels == ("click", "stars")
    assert [dense.column for dense in schema.dense] == ["like"]
    assert report.label_rate == pytest.approx(0.5, abs=0.05)
    assert inspect_data(path, label="stars").label_rate is None


@pytest.mark.seeds(range(10))
def test_a_profile_is_what_plain_python_counts(seed):
    rng = random.Random(seed)
    high = rng.choice((3, 200, 10**12))
    rows = [
        None if rng.random() < 0.2 else [rng.randrange(-2, high) for _ in range(rng.randrange(4))]
        for _ in range(rng.randrange(1, 400))
    ]
    values = [value for row in rows for value in row or ()]
    column = pa.chunked_array(
        [pa.array(rows[:50], pa.list_(pa.int64())), pa.array(rows[50:], pa.list_(pa.int64()))]
    )
    told = profile_column("x", column)
    assert (told.rows, told.nulls, told.values) == (len(rows), rows.count(None), len(values))
    lengths = [len(row) for row in rows if row is not None]
    if lengths:
        assert told.lengths is not None
        assert (told.lengths.least, told.lengths.most) == (min(lengths), max(lengths))
        assert told.lengths.mean == pytest.approx(sum(lengths) / len(lengths))
        assert told.lengths.empty == pytest.approx(lengths.count(0) / len(lengths))
    if values:
        assert (told.low, told.high) == (min(values), max(values))
        assert told.counts is not None
        frequent = max(values.count(value) for value in set(values))
        assert values.count(told.counts.top) == frequent
        assert told.counts.top_share == frequent / len(values)
        assert (told.counts.distinct, told.counts.counted) == (len(set(values)), len(values))


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([2**63 + 5, 2**63 + 9, 2**63 + 9], pa.uint64()),
        ([2**64 - 2, 2**64 - 1, 2**64 - 1], pa.uint64()),
        ([-(2**63), 1 - 2**63, 1 - 2**63], pa.int64()),
        ([-128, 127, 127], pa.int8()),
    ],
)
def test_numbers_at_the_ends_of_their_type_are_counted(values, kind):
    told = profile_column("x", pa.chunked_array([pa.array(values, kind)]))
    assert told.counts is not None and (told.low, told.high) == (values[0], values[1])
    assert (told.counts.distinct, told.counts.top) == (2, values[1])


@pytest.mark.parametrize("pool", [1000, 20_000, 200_000])
def test_the_number_of_different_values_is_estimated(pool):
    """Ids of a known number, drawn evenly, of which a part is counted."""
    values = np.random.default_rng(0).integers(0, pool, 300_000)
    counts = profile_column("x", pa.chunked_array([values])).counts
    assert counts is not None and counts.counted <= COUNTED
    assert counts.distinct <= pool
    assert counts.estimate(10**9) == pytest.approx(pool, rel=0.15)


def test_an_estimate_is_never_above_the_number_of_values():
    counts = Counts(100, 100, 100, 0, 1, 0.01)
    assert counts.estimate(150) == 150
    assert counts.estimate(100) == 100


def test_the_proposed_schema_trains(tmp_path):
    """Clicks with a known truth: the proposed schema reads all of them, and a DLRM learns."""
    numbers = LEARNABLE | {"num_features": 5, "rows_train": 6000, "rows_eval": 500}
    clicks = write_clicks(tmp_path, **numbers)
    report = inspect_data(str(clicks.train))
    given, schema = FeatureSchema.load(clicks.schema), report.schema(embedding_dim=8)
    assert schema.labels == given.labels
    assert schema.feature_names() == given.feature_names()
    assert schema.dense == given.dense
    for proposed, wanted in zip(schema.tables, given.tables, strict=True):
        # every id of the data has its row, and there are hardly more
        assert 0.9 * wanted.num_embeddings <= proposed.num_embeddings
        assert proposed.num_embeddings <= max(1.1 * wanted.num_embeddings, 4)
    torch.manual_seed(0)
    tables = EmbeddingBagCollection(tables=schema.embedding_bag_configs())
    model = DLRMTrain(DLRM(tables, 3, [16, 8], [16, 1]))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    data, losses = ParquetDataset(str(clicks.train), schema), []
    for epoch in range(3):
        for batch in data.loader(0, 1, 200, epoch=epoch, binary_labels=True):
            optimizer.zero_grad()
            loss, _ = model(batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert np.mean(losses[-30:]) < np.mean(losses[:30]) - 0.01


def test_a_sample_is_spread_evenly_and_the_rest_is_not_read(tmp_path, monkeypatch):
    folder = tmp_path / "d"
    folder.mkdir()
    for i in range(4):
        table = click_table(i, day=np.full(ROWS, i))
        pq.write_table(table, folder / f"part-{i}.parquet", row_group_size=500)
    read: list[int] = []
    whole = ParquetReader.read
    monkeypatch.setattr(
        ParquetReader,
        "read",
        lambda self, chunk, columns: read.append(chunk) or whole(self, chunk, columns),
    )
    report = inspect_data(str(folder), rows=2000)
    assert (report.rows, report.sampled_rows, report.sampled_chunks) == (4 * ROWS, 2000, 4)
    assert read == [4, 4, 4, 4]
    days = next(column for column in report.columns if column.name == "day")
    assert days.profile.counts is not None and days.profile.counts.distinct == 4
    read.clear()
    assert inspect_data(str(folder), rows=10**9).sampled_rows == 4 * ROWS
    assert len(read) == 32


def test_of_a_large_row_group_only_the_first_pieces_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(ParquetReader, "PIECE_ROWS", 100)
    path = write(tmp_path / "d", click_table(), group=ROWS)
    assert inspect_data(path, rows=250).sampled_rows == 300


def test_ids_beyond_the_sample_have_their_row(tmp_path):
    """The statistics of the files tell of ids in row groups that are not read."""
    ids = np.arange(ROWS) * 100 // ROWS
    path = write(tmp_path / "d", click_table(item_id=ids))
    report = inspect_data(path, rows=500)
    item = next(column for column in report.columns if column.name == "item_id")
    assert item.profile.high is not None and item.profile.high < 99
    assert item.advice.rows == 100
    data = ParquetDataset(path, report.schema())
    assert sum(batch.rows for batch in data.loader(0, 1, 512)) == ROWS


@pytest.mark.parametrize("kind", ["without statistics", "arrow"])
def test_where_files_do_not_tell_how_far_ids_reach_they_are_hashed(tmp_path, kind):
    table = click_table(user_id=drawn(90))
    if kind == "arrow":
        with ipc.new_file(tmp_path / "part.arrow", table.schema) as out:
            out.write_table(table, max_chunksize=500)
    else:
        pq.write_table(table, tmp_path / "part.parquet", write_statistics=False)
    report = inspect_data(str(tmp_path))
    user = next(column for column in report.columns if column.name == "user_id")
    assert user.advice.hash_buckets == 256
    assert "do not say how far ids reach" in user.advice.troubles[0]


def test_folders_are_columns_and_where_takes_a_part(tmp_path):
    for day in (1, 2, 3):
        write(tmp_path / f"day={day}", click_table(day))
    report = inspect_data(str(tmp_path), where="day >= 2 and shop_id < 20")
    (day,) = (column for column in report.columns if column.name == "day")
    assert day.profile.counts is not None and day.profile.counts.distinct == 2
    shop = next(column for column in report.columns if column.name == "shop_id")
    assert shop.profile.high == 19
    assert report.rows == 2 * ROWS
    assert report.sampled_rows < 2 * ROWS


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rows": 0}, ConfigError, "rows=0"),
        ({"label": "clicks"}, InputError, r"column 'clicks' is missing .*'click', 'shop_id'"),
        ({"label": "city"}, InputError, "label column 'city' has type string"),
        ({"where": "shop_id >"}, ConfigError, "where='shop_id >'"),
        ({"where": "shop = 1"}, InputError, "column 'shop' is missing"),
        ({"where": "shop_id = 'x'"}, InputError, "'shop_id' has type int64"),
        ({"where": "shop_id > 500"}, InputError, "none of the rows that were read"),
    ],
)
def test_what_cannot_be_looked_at_is_said(tmp_path, options, error, message):
    path = write(tmp_path / "d", click_table(city=WORDS[drawn(30)]))
    with pytest.raises(error, match=message) as raised:
        inspect_data(path, **options)
    assert "\n" not in str(raised.value)


def test_what_is_no_data_is_said(tmp_path):
    with pytest.raises(InputError, match="none"):
        inspect_data(str(tmp_path / "none"))
    (tmp_path / "part.parquet").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match=r"cannot read '.*part\.parquet' as Parquet"):
        inspect_data(str(tmp_path))
    pq.write_table(click_table().slice(0, 0), tmp_path / "part.parquet")
    with pytest.raises(InputError, match="1 Parquet files and no rows"):
        inspect_data(str(tmp_path))
    (tmp_path / "part.arrow").write_bytes(b"")
    with pytest.raises(InputError, match="holds Parquet and Arrow IPC files"):
        inspect_data(str(tmp_path))


def test_files_that_do_not_fit_together_are_said(tmp_path):
    write(tmp_path, click_table())
    other = pa.table({"click": ["a"], "shop_id": [1]})
    pq.write_table(other, tmp_path / "second.parquet")
    with pytest.raises(InputError, match="columns differ in type between files"):
        inspect_data(str(tmp_path))


def shown(report: DataReport) -> dict[str, str]:
    return {line.split()[0]: line for line in report.to_text().splitlines() if line.strip()}


def test_the_text_says_what_the_json_says(tmp_path):
    table = click_table(city=WORDS[drawn(30)], country=np.full(ROWS, 3), clicked=lists(lambda i: 2))
    report = inspect_data(write(tmp_path / "d", table))
    told, lines = json.loads(report.to_json()), shown(report)
    assert FeatureSchema.from_json(json.dumps(told["schema"])) == report.schema()
    assert told["troubles"] == list(report.troubles) == ["country: all values are 3."]
    assert {column["name"] for column in told["columns"]} == set(table.column_names)
    assert f"feature 64 x {report.width} hashed" in lines["city"]
    assert "x 2-2" in lines["clicked"]
    assert "1 Parquet files, 4,000 rows; read 4,000 rows of 8 chunks" in report.to_text()
    assert f"label: click, {report.label_rate:.2%} of it are 1" in report.to_text()
    assert len({table.embedding_dim for table in report.schema().tables}) == 1
