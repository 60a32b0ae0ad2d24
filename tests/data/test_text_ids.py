"""Text as ids of dynamic tables: every type of Arrow gives the hash that plain Python gives."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from arrow_files import batch_rows
from plain_hashes import MASK, scalar_hash, scalar_id, scalar_mix, unmixed

from rayrec.data import ArrowDataset, ParquetDataset
from rayrec.data.column_types import check_columns
from rayrec.data.convert import to_batch
from rayrec.data.files import FileDataset
from rayrec.data.statistics import check_statistics
from rayrec.errors import InputError
from rayrec.layout.schema import FeatureSchema

DYNAMIC = {"name": "t", "num_embeddings": 8, "embedding_dim": 4, "features": ["f"], "dynamic": {}}
STATIC = {"name": "u", "num_embeddings": 8, "embedding_dim": 4, "features": ["f"]}
WORDS = ["", "a", "user-17", "12345678", "123456789", "Zürich", "東京都渋谷区", "\0", "x" * 100]
TYPES: dict[str, pa.DataType] = {
    "string": pa.string(),
    "large_string": pa.large_string(),
    "binary": pa.binary(),
    "large_binary": pa.large_binary(),
    "dictionary": pa.dictionary(pa.int8(), pa.string()),
    "large dictionary": pa.dictionary(pa.uint32(), pa.large_string()),
    "views": pa.string_view(),
    "views of bytes": pa.binary_view(),
    "dictionary of views": pa.dictionary(pa.int8(), pa.string_view()),
}


def schema_of(*tables: dict[str, Any], **feature: Any) -> FeatureSchema:
    features = [{"name": "f", "column": "ids", **feature}]
    text = {"label": "label", "features": features, "tables": tables}
    return FeatureSchema.from_json(json.dumps(text))


def column_of(rows: list[Any], kind: pa.DataType, lists: bool) -> pa.Array:
    """Rows of words as a column of a type, or of lists of it."""
    if not lists:
        return pa.array(rows, pa.string()).cast(kind)
    plain = pa.array(rows, pa.list_(pa.string()))
    # pa.array makes no lists of dictionaries
    return pa.ListArray.from_arrays(plain.offsets, plain.values.cast(kind), mask=plain.is_null())


def table_of(ids: pa.Array) -> pa.Table:
    return pa.table({"ids": ids, "label": pa.array([0] * len(ids), pa.int8())})


@pytest.mark.seeds(range(4))
@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("kind", TYPES)
def test_text_of_every_type_is_the_id_that_plain_python_gives(
    kind: str, lists: bool, seed: int
) -> None:
    rng = random.Random(seed)

    def words() -> Any:
        if rng.random() < 0.2:
            return None
        word = rng.choice([*WORDS, f"{rng.getrandbits(40):x}"])
        return rng.choices(WORDS, k=rng.randrange(4)) if lists else word

    rows = [words() for _ in range(rng.randint(1, 60))]
    table = table_of(column_of(rows, TYPES[kind], lists))
    wanted = []
    for row in rows:
        bag = [] if row is None else row if lists else [row]
        wanted.append(tuple(scalar_id(word.encode()) for word in bag))
    start = rng.randint(0, len(rows))
    for first, part in ((0, table), (start, table.slice(start))):
        batch = to_batch(part, schema_of(DYNAMIC))
        assert [row[1] for row in batch_rows(batch)] == wanted[first:]


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()], ids=str)
@pytest.mark.parametrize("dataset", [ParquetDataset, ArrowDataset])
def test_files_of_views_are_read_as_those_of_text(
    tmp_path: Path, dataset: type[FileDataset], kind: pa.DataType, lists: bool
) -> None:
    """Shuffled, chosen by `where`, and in one block with a file of plain text."""
    words = [None if n % 7 == 0 else f"user {n}, of a longer name" for n in range(40)]
    rows: list[Any] = [word if word is None else [word] * 2 for word in words] if lists else words
    plain = pa.binary() if kind == pa.binary_view() else pa.string()
    for folder, one in (("plain", plain), ("views", kind)):
        (tmp_path / folder).mkdir()
        for file, own in enumerate((one, plain)):
            part = rows[file * 20 : file * 20 + 20]
            table = table_of(column_of(part, own, lists)).append_column("n", pa.array(range(20)))
            write = pq.write_table if dataset is ParquetDataset else feather.write_feather
            write(table, tmp_path / folder / f"{file}{dataset.SUFFIXES[0]}", compression="lz4")

    def read(folder: str) -> list[Any]:
        data = dataset(
            str(tmp_path / folder), schema_of(DYNAMIC), num_streams=1, where="n < 15 or n == 17"
        )
        return [row for batch in data.loader(0, 1, 16, seed=3) for row in batch_rows(batch)]

    assert read("views") == read("plain") and len(read("views")) == 32


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()], ids=str)
def test_list_views_of_views_are_refused_with_what_to_write(kind: pa.DataType) -> None:
    """Arrow casts them to lists of the same lengths with other words."""
    table = table_of(pa.array([["a"], None], pa.list_view(kind)))
    says = f"column 'ids' of feature 'f' has list views of {kind}, .* Write plain lists"
    with pytest.raises(InputError, match=says):
        to_batch(table, schema_of(DYNAMIC))


@pytest.mark.parametrize("kind", [pa.string(), pa.string_view()], ids=str)
def test_a_null_is_an_empty_bag_also_in_a_column_that_says_it_has_none(kind: pa.DataType) -> None:
    table = table_of(column_of(["a", None], kind, False))
    says = pa.schema([pa.field("ids", kind, nullable=False), table.schema.field("label")])
    whole = pa.Table.from_arrays(table.columns, schema=says)
    for rows in (whole, whole.to_batches()[0]):
        read = batch_rows(to_batch(rows, schema_of(DYNAMIC)))
        assert [row[1] for row in read] == [(scalar_id(b"a"),), ()]


def test_text_of_fixed_size_has_the_ids_of_its_bytes() -> None:
    words = [b"abc", b"xyz", b"abc"]
    batch = to_batch(table_of(pa.array(words, pa.binary(3))), schema_of(DYNAMIC))
    assert batch.sparse_features.values().tolist() == [scalar_id(word) for word in words]


def test_text_whose_hash_is_no_id_has_another_number() -> None:
    """The one text of 8 bytes whose hash is -1, found by the inverse of the hash."""
    word = (unmixed(MASK) ^ scalar_mix(8)).to_bytes(8, "little")
    assert scalar_hash(word) == MASK
    batch = to_batch(table_of(pa.array([word, b"a"], pa.binary())), schema_of(DYNAMIC))
    assert batch.sparse_features.values().tolist() == [-2, scalar_id(b"a")]


def test_ids_of_text_are_pinned_for_ever() -> None:
    """Other values would part every trained row from its id."""
    batch = to_batch(table_of(pa.array(["", "user-17", "Zürich"])), schema_of(DYNAMIC))
    assert batch.sparse_features.values().tolist() == [
        -2152535657050944081,
        8497844488295125425,
        -4957138623675147257,
    ]


@pytest.mark.parametrize("tables", [(STATIC,), (DYNAMIC, STATIC)], ids=["static", "both"])
def test_text_for_a_table_of_numbered_rows_is_refused_with_both_ways_out(
    tables: tuple[dict[str, Any], ...],
) -> None:
    table = table_of(pa.array(["a", "b"]))
    message = (
        r"column 'ids' of feature 'f' holds string\. Set hash_buckets on the feature .*, or make "
        r"all of its tables dynamic, which take every hash of 64 bits as an id\.$"
    )
    with pytest.raises(InputError, match=message):
        to_batch(table, schema_of(*tables))
    with pytest.raises(InputError, match=f"file y: {message}"):
        check_columns(table.schema, schema_of(*tables), "file y")
    check_columns(table.schema, schema_of(*tables, hash_buckets=8), "file y")
    check_columns(table.schema, schema_of(DYNAMIC), "file y")


def test_buckets_of_a_dynamic_table_stay_buckets() -> None:
    batch = to_batch(table_of(pa.array(["a", "b"])), schema_of(DYNAMIC, hash_buckets=5))
    wanted = [scalar_hash(word) % 5 for word in (b"a", b"b")]
    assert batch.sparse_features.values().tolist() == wanted


@pytest.mark.parametrize("ids", [[-1, 5], [-7, -1], [-9, 4, -1]])
def test_statistics_tell_of_no_id_where_it_is_an_end_of_the_range(
    tmp_path: Any, ids: list[int]
) -> None:
    """Negative ids are ids, so a range that only spans -1 says nothing: the rank finds it."""
    pq.write_table(table_of(pa.array(ids)), tmp_path / "rows.parquet")
    data = ParquetDataset(tmp_path, schema_of(DYNAMIC))
    if -1 in (min(ids), max(ids)):
        with pytest.raises(InputError, match=f"holds id -1 in row {ids.index(-1)} of"):
            check_statistics(data)
    else:
        check_statistics(data)
        with pytest.raises(InputError, match=f"holds id -1 in row {ids.index(-1)} of"):
            list(data.loader(0, 1, 8))
