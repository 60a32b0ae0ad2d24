"""Several labels, and weights of rows: in the schema, in batches, and what they may not hold."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest
import torch
from arrow_files import SCHEMA, random_table

from rayrec.data import ArrowDataset, ParquetDataset, check_columns, to_batch
from rayrec.data.files import FileDataset
from rayrec.data.statistics import check_statistics
from rayrec.errors import ConfigError, InputError
from rayrec.layout.schema import FeatureSchema
from rayrec.layout.schema_columns import DenseColumn

BOTH = replace(SCHEMA, label=("label", "stars"), weight="share")
ONE_LABEL = """{
  "label": "label",
  "dense": ["row", {"column": "d1", "fill": -1.0}],
  "features": [
    {"name": "user", "column": "user"},
    {"name": "genres", "column": "genres"}
  ],
  "tables": [
    {"name": "t_user", "num_embeddings": 1000, "embedding_dim": 4, "pooling": "sum", \
"features": ["user"]},
    {"name": "t_genre", "num_embeddings": 20, "embedding_dim": 4, "pooling": "mean", \
"features": ["genres"]}
  ]
}
"""


def rated_table(rng: random.Random, rows: int, first: int = 0) -> pa.Table:
    """Rows with a second label 'stars' and a weight 'share', each in a type that is converted."""
    stars = pa.array([rng.randrange(6) for _ in range(rows)], pa.int8())
    share = pa.array([rng.choice((0.0, rng.random())) for _ in range(rows)], pa.float64())
    table = random_table(rng, rows, first)
    return table.append_column("stars", stars).append_column("share", share)


def write_rated(folder: Path, kind: str, rng: random.Random, sizes: tuple[int, ...]) -> pa.Table:
    tables = []
    for i, rows in enumerate(sizes):
        table = rated_table(rng, rows, sum(sizes[:i]))
        tables.append(table)
        if kind == "parquet":
            pq.write_table(table, folder / f"part-{i:03}.parquet", row_group_size=40)
            continue
        with ipc.new_file(folder / f"part-{i:03}.arrow", table.schema) as out:
            out.write_table(table, max_chunksize=40)
    return pa.concat_tables(tables)


def spoil(path: Path, column: str, row: int, value: object) -> None:
    table = pq.read_table(path)
    values = table[column].to_pylist()
    values[row] = value
    spoilt = pa.array(values, table[column].type)
    place = table.column_names.index(column)
    pq.write_table(table.set_column(place, column, spoilt), path, row_group_size=7)


def test_a_schema_of_one_label_is_written_as_before():
    assert SCHEMA.to_json() == ONE_LABEL
    assert SCHEMA.labels == ("label",)
    assert SCHEMA.columns() == ("label", "row", "d1", "user", "genres")


def test_several_labels_and_a_weight_survive_json():
    assert FeatureSchema.from_json(BOTH.to_json()) == BOTH
    assert json.loads(BOTH.to_json())["label"] == ["label", "stars"]
    assert BOTH.labels == ("label", "stars")
    assert BOTH.columns() == ("label", "stars", "row", "d1", "user", "genres", "share")


def test_one_label_in_a_list_is_one_label():
    text = ONE_LABEL.replace('"label": "label"', '"label": ["label"]')
    assert FeatureSchema.from_json(text) == SCHEMA
    assert replace(SCHEMA, label=("label",)).to_json() == ONE_LABEL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": []}, "no label column"),
        ({"label": ["label", ""]}, "no label column"),
        ({"label": ["label", 5]}, r"the schema: label\[1\] is 5; it must be a text"),
        ({"label": ["label", "label"]}, "label column 'label' is named twice"),
        ({"label": {"a": 1}}, "the schema: label is .*; it must be a text or a list"),
        ({"weight": ""}, "a weight without a name"),
        ({"weight": 0.5}, "the schema: weight is 0.5; it must be a text or null"),
        ({"label": ["label", "user"]}, "'user' reads the label column 'user'"),
        ({"label": ["label", "d1"]}, "dense column 'd1' is the label"),
        ({"weight": "user"}, "'user' reads the weight column 'user'"),
        ({"weight": "d1"}, "the dense part reads the weight column 'd1'"),
    ],
)
def test_contradictions_of_labels_and_weight_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        FeatureSchema.from_json(json.dumps(json.loads(ONE_LABEL) | change))


@pytest.mark.parametrize("column", ["stars", "share"])
def test_weights_of_ids_may_not_read_a_label_or_the_weight(column):
    weighted = replace(SCHEMA.features[0], weights=column)
    with pytest.raises(ConfigError, match=f"'user' reads the (label|weight) column '{column}'"):
        replace(BOTH, features=(weighted, SCHEMA.features[1]))


def test_what_takes_one_label_says_so():
    assert SCHEMA.one_label("retrieval") == "label"
    with pytest.raises(ConfigError, match=r"2 labels \(label, stars\), and retrieval takes one"):
        BOTH.one_label("retrieval")


@pytest.mark.parametrize("kind", ["int32", "int64", "uint64"])
@pytest.mark.parametrize("labels", [("label",), ("label", "other")])
def test_whole_numbers_beyond_what_float32_holds_stay_exact(labels, kind):
    values = [2**24 + 1, 3, 2**30 + 7] + ([2**53 - 1] if kind != "int32" else [])
    few = [5 - 9 * (kind != "uint64"), 2**24]
    schema = replace(SCHEMA, label=labels, dense=())

    def batch_of(*parts):
        other = pa.array([0.5] * sum(map(len, parts)), pa.float32())
        column = pa.chunked_array([pa.array(part, getattr(pa, kind)()) for part in parts])
        ids = {name: pa.nulls(len(other)) for name in ("user", "genres")}
        return to_batch(pa.table({"label": column, "other": other, **ids}), schema)

    got = batch_of(few, values).labels
    column = got if len(labels) == 1 else got[:, 0]
    assert column.long().tolist() == [*few, *values]
    assert len(labels) == 1 or got[:, 1].tolist() == [0.5] * len(got)
    assert batch_of(few).labels.dtype == torch.float32


@pytest.mark.parametrize("value", [2**53 + 1, -(2**60)])
def test_a_label_that_no_float_holds_is_refused(value):
    ids = {name: pa.nulls(2) for name in ("user", "genres")}
    with pytest.raises(InputError, match=rf"holds {value} in row 1 of .*beyond 2\*\*53"):
        to_batch(pa.table({"label": [1, value], **ids}), replace(SCHEMA, dense=()))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_groups_stay_with_their_rows(tmp_path, kind):
    table = write_rated(tmp_path, kind, random.Random(1), (90, 33))
    schema = replace(BOTH, groups=("stars", "word"), dense=(DenseColumn(column="row"),))
    words = [f"word {i % 5}" for i in range(table.num_rows)]
    for path in sorted(tmp_path.iterdir()):
        path.unlink()
    text = pa.array(words).dictionary_encode() if kind == "arrow" else pa.array(words)
    table = table.append_column("word", text).combine_chunks()
    if kind == "parquet":
        pq.write_table(table, tmp_path / "all.parquet", row_group_size=20)
    else:
        with ipc.new_file(tmp_path / "all.arrow", table.schema) as out:
            out.write_table(table, max_chunksize=20)
    data = (ParquetDataset if kind == "parquet" else ArrowDataset)(tmp_path, schema)
    number_of: dict[str, int] = {}
    for batch in data.loader(1, 2, 32, seed=3):
        rows = batch.dense_features[:, 0].int().tolist()
        assert batch.groups["stars"].tolist() == table["stars"].take(pa.array(rows)).to_pylist()
        for row, number in zip(rows, batch.to("cpu").groups["word"].tolist(), strict=True):
            assert number_of.setdefault(words[row], number) == number
    assert len(set(number_of.values())) == 5
    assert to_batch(table, schema, with_labels=False).groups == {}
    assert FeatureSchema.from_json(schema.to_json()) == schema


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([1, None]), "group column 'day' holds null in row 1"),
        (pa.array([1.5, 2.0]), "group column 'day' has type double; cast it to int64"),
        (pa.array([[1], [2]]), "group column 'day' has type list"),
    ],
)
def test_what_names_no_group_is_refused(column, message):
    ids = {name: pa.nulls(2) for name in ("user", "genres")}
    table = pa.table({"label": [0, 1], "day": column, **ids})
    with pytest.raises(InputError, match=message):
        to_batch(table, replace(SCHEMA, dense=(), groups=("day",)))
    with pytest.raises(ConfigError, match="group column 'day' is named twice"):
        replace(SCHEMA, groups=("day", "day"))
    text = replace(SCHEMA, groups=("day",)).to_json().replace('["day"]', "[5]")
    with pytest.raises(ConfigError, match=r"the schema: groups\[0\] is 5; it must be a text"):
        FeatureSchema.from_json(text)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.seeds(range(5))
def test_labels_and_weights_stay_with_their_rows(tmp_path, kind, seed):
    rng = random.Random(seed)
    table = write_rated(tmp_path, kind, rng, (rng.randrange(1, 120), 77, 3))
    dataset: type[FileDataset] = ParquetDataset if kind == "parquet" else ArrowDataset
    data = dataset(tmp_path, BOTH, num_streams=rng.choice((1, 3)), shuffle_rows=32)
    ranks, seen = rng.choice((1, 2, 3)), 0
    for rank in range(ranks):
        for batch in data.loader(rank, ranks, 64, seed):
            rows = table.take(pa.array(batch.dense_features[:, 0].int().tolist(), pa.int64()))
            assert batch.labels.shape == (batch.rows, 2)
            assert batch.labels[:, 0].tolist() == rows["label"].to_pylist()
            assert batch.labels[:, 1].tolist() == rows["stars"].to_pylist()
            assert batch.weights is not None
            assert batch.weights.tolist() == rows["share"].cast(pa.float32()).to_pylist()
            seen += batch.rows
    assert seen == table.num_rows


def test_a_batch_without_rows_has_the_shapes_of_the_others():
    empty = to_batch(rated_table(random.Random(0), 0), BOTH)
    assert empty.labels.shape == (0, 2)
    assert empty.weights is not None and empty.weights.shape == (0,)
    assert empty.rows == 0


def test_a_batch_moves_with_its_weights():
    table = rated_table(random.Random(0), 5)
    moved = to_batch(table, BOTH).to("meta")
    assert moved.weights is not None
    assert moved.weights.device.type == moved.labels.device.type == "meta"
    assert to_batch(table, SCHEMA).to("cpu").weights is None


def test_one_label_is_a_vector_without_weights():
    table = rated_table(random.Random(0), 50)
    batch = to_batch(table, SCHEMA)
    assert batch.labels.shape == (50,)
    assert batch.weights is None


def test_labels_that_must_be_binary_are_named(tmp_path):
    write_rated(tmp_path, "parquet", random.Random(0), (60, 60))
    data = ParquetDataset(tmp_path, BOTH, num_streams=2, shuffle_rows=16)
    assert sum(batch.rows for batch in data.loader(0, 1, 50, binary_labels=["label"])) == 120
    with pytest.raises(InputError, match=r"'stars' holds \d in row \d+ of '.*parquet'"):
        list(data.loader(0, 1, 50, binary_labels=True))
    with pytest.raises(InputError, match="'stars'"):
        check_statistics(data)
    check_statistics(data, ["label"])
    spoil(tmp_path / "part-001.parquet", "label", 41, 2)
    for look in (
        lambda data: list(data.loader(0, 1, 50, binary_labels=("label",))),
        lambda data: check_statistics(data, ("label",)),
    ):
        with pytest.raises(InputError, match=r"'label' holds 2 in row 41 of '.*part-001"):
            look(ParquetDataset(tmp_path, BOTH))


def test_a_binary_label_must_be_a_label(tmp_path):
    write_rated(tmp_path, "parquet", random.Random(0), (60,))
    data = ParquetDataset(tmp_path, BOTH)
    for look in (
        lambda: data.loader(0, 1, 50, binary_labels=["clicks"]),
        lambda: check_statistics(data, "clicks"),
        lambda: to_batch(rated_table(random.Random(0), 5), BOTH, binary_labels=["clicks"]),
    ):
        with pytest.raises(ConfigError, match=r"'clicks', which is no label; .*'label', 'stars'"):
            look()


@pytest.mark.parametrize("value", [-0.5, math.nan, math.inf, None])
def test_a_bad_weight_is_named_with_file_and_row(tmp_path, value):
    write_rated(tmp_path, "parquet", random.Random(0), (60, 60))
    spoil(tmp_path / "part-001.parquet", "share", 41, value)
    data = ParquetDataset(tmp_path, BOTH, num_streams=2, shuffle_rows=16)
    shown = "null" if value is None else f"{value:g}"
    message = rf"weight column 'share' holds {shown} in row 41 of '.*part-001\.parquet'"
    with pytest.raises(InputError, match=message):
        list(data.loader(0, 1, 50))
    if value is None or value < 0:  # of these the statistics of the file tell
        with pytest.raises(InputError, match=message):
            check_statistics(data, ["label"])


def test_a_null_in_any_label_is_named(tmp_path):
    write_rated(tmp_path, "parquet", random.Random(0), (60,))
    spoil(tmp_path / "part-000.parquet", "stars", 9, None)
    with pytest.raises(InputError, match=r"label column 'stars' holds null in row 9 of"):
        list(ParquetDataset(tmp_path, BOTH).loader(0, 1, 50))


@pytest.mark.parametrize(("column", "use"), [("stars", "label"), ("share", "weight")])
def test_columns_that_do_not_fit_are_found_before_reading(column, use):
    table = rated_table(random.Random(0), 3)
    with pytest.raises(InputError, match=f"'{column}' is missing"):
        check_columns(table.drop_columns([column]).schema, BOTH, "file x")
    words = table.set_column(table.column_names.index(column), column, pa.array(["a", "b", "c"]))
    with pytest.raises(InputError, match=f"{use} column '{column}' has type string"):
        check_columns(words.schema, BOTH, "file x")


def test_a_weight_may_be_a_label_too():
    """A time that was watched may be learned and weigh the click as well."""
    schema = replace(BOTH, weight="stars", dense=(DenseColumn(column="row"),))
    batch = to_batch(rated_table(random.Random(0), 20), schema)
    assert batch.weights is not None
    assert batch.weights.tolist() == batch.labels[:, 1].tolist()
