"""Arrow to batch against a row-by-row reading with `to_pylist`, in every column type, sliced and
chunked; and what is refused.
"""

from __future__ import annotations

import json
import math
import random
import time

import numpy as np
import pyarrow as pa
import pytest
from arrow_files import batch_rows

from rayrec.data.column_types import check_columns
from rayrec.data.convert import to_batch
from rayrec.data.hashing import hash_bytes, hash_integers
from rayrec.errors import InputError
from rayrec.layout.schema import FeatureSchema
from rayrec.runs.held_out import IdColumn

LIMIT, BUCKETS = 50, 7


def schema_of(feature: dict, dense=("d",), weights=False) -> FeatureSchema:
    features = [{"name": "f", "column": "ids", **feature}, {"name": "g", "column": "g"}]
    if weights:
        features[0]["weights"] = "w"
    tables = [
        {"name": "t", "num_embeddings": LIMIT, "embedding_dim": 4, "features": ["f"]},
        {"name": "u", "num_embeddings": 10_000, "embedding_dim": 4, "features": ["f", "g"]},
    ]
    return FeatureSchema.from_json(
        json.dumps({"label": "label", "dense": list(dense), "features": features, "tables": tables})
    )


def scalar_id(x, buckets: int | None) -> int:
    if isinstance(x, int):
        return x if buckets is None else int(hash_integers(np.array([x]), buckets)[0])
    data = x.encode() if isinstance(x, str) else x
    return int(
        hash_bytes(np.frombuffer(data, np.uint8), np.array([0, len(data)]))[0] % np.uint64(buckets)
    )


def expected(table: pa.Table, buckets: int | None, fill: float = 0.0) -> list[tuple]:
    rows = []
    for r in table.to_pylist():
        ids = r["ids"] if isinstance(r["ids"], list) else ([] if r["ids"] is None else [r["ids"]])
        dense = fill if r["d"] is None else float(np.float32(r["d"]))
        rows.append(
            (float(r["label"]), dense, tuple(scalar_id(x, buckets) for x in ids), (r["g"],))
        )
    return rows


def maybe_null(rng: random.Random, value, share: float):
    return None if rng.random() < share else value


LEAVES = {
    "int64": (pa.int64(), lambda rng: rng.randrange(LIMIT)),
    "int32": (pa.int32(), lambda rng: rng.randrange(LIMIT)),
    "uint8": (pa.uint8(), lambda rng: rng.randrange(LIMIT)),
    "string": (pa.string(), lambda rng: "é" * rng.randrange(9)),
    "large_string": (pa.large_string(), lambda rng: "ab" * rng.randrange(9)),
    "binary": (pa.binary(), lambda rng: rng.randbytes(rng.randrange(20))),
    "fixed_binary": (pa.binary(5), lambda rng: rng.randbytes(5)),
    "dictionary": (
        pa.dictionary(pa.int16(), pa.string()),
        lambda rng: rng.choice(["a", "bb", "", "a long name of a city"]),
    ),
    "int_dictionary": (pa.dictionary(pa.int8(), pa.int64()), lambda rng: rng.randrange(LIMIT)),
}
SHAPES = {
    "scalar": lambda leaf: leaf,
    "list": pa.list_,
    "large_list": pa.large_list,
    "fixed_list": lambda leaf: pa.list_(leaf, 2),
}


@pytest.mark.seeds(range(4))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("leaf", LEAVES)
def test_every_column_type_equals_reading_row_by_row(leaf, shape, seed):
    rng = random.Random(seed)
    kind, value = LEAVES[leaf]
    nulls, buckets = (
        (0.3 if seed % 2 else 0.0),
        (BUCKETS if "int" not in leaf or seed >= 2 else None),
    )
    chunks = []
    for _ in range(rng.randint(1, 3)):
        n = rng.randint(0, 30)
        if shape == "scalar":
            ids = [maybe_null(rng, value(rng), nulls) for _ in range(n)]
        else:
            ids = [
                maybe_null(
                    rng,
                    [value(rng) for _ in range(2 if shape == "fixed_list" else rng.randrange(5))],
                    nulls,
                )
                for _ in range(n)
            ]
        columns = {
            "ids": pa.array(ids, SHAPES[shape](kind))
            if leaf != "dictionary" or shape == "scalar"
            else encode_lists(ids, shape, kind),
            "d": pa.array(
                [maybe_null(rng, rng.random(), nulls) for _ in range(n)],
                rng.choice((pa.float32(), pa.float64())),
            ),
            "g": pa.array([rng.randrange(100) for _ in range(n)], pa.int32()),
            "label": pa.array([rng.randrange(2) for _ in range(n)], pa.int8()),
        }
        chunks.append(
            pa.table(columns).cast(
                pa.schema(
                    [
                        ("ids", columns["ids"].type),
                        ("d", pa.float64()),
                        ("g", pa.int32()),
                        ("label", pa.int8()),
                    ]
                )
            )
        )
    table = pa.concat_tables(chunks)
    start = rng.randint(0, table.num_rows)
    for part in (table, table.slice(start), table.slice(0, start), table.slice(start // 2, 7)):
        batch = to_batch(part, schema_of({"hash_buckets": buckets}))
        known = batch.sparse_features.length_per_key_or_none()
        assert known == batch.sparse_features.unsync().length_per_key()
        assert batch_rows(batch) == expected(part, buckets)


def encode_lists(ids: list, shape: str, kind: pa.DataType) -> pa.Array:
    """pa.array cannot build lists of dictionaries from Python; join the parts by hand."""
    plain = pa.array(ids, SHAPES[shape](pa.string()))
    if shape == "fixed_list":
        return plain
    leaves = plain.values.dictionary_encode()
    cls = pa.ListArray if shape == "list" else pa.LargeListArray
    return (
        cls.from_arrays(plain.offsets, leaves, mask=plain.is_null())
        if plain.null_count
        else cls.from_arrays(plain.offsets, leaves)
    )


def test_a_null_list_that_spans_values_is_an_empty_bag():
    ids = pa.ListArray.from_arrays(
        pa.array([0, 2, 4, 5], pa.int32()),
        pa.array([1, 2, 3, 4, 5]),
        mask=pa.array([False, True, False]),
    )
    table = pa.table({"ids": ids, "d": [0.0] * 3, "g": [0] * 3, "label": [0] * 3})
    assert [r[2] for r in batch_rows(to_batch(table, schema_of({})))] == [(1, 2), (), (5,)]
    assert [r[2] for r in batch_rows(to_batch(table.slice(1), schema_of({})))] == [(), (5,)]


def test_all_null_columns_are_empty_bags_and_fills():
    table = pa.table(
        {"ids": pa.nulls(3), "d": pa.nulls(3), "g": [1, 2, 3], "label": [True, False, True]}
    )
    schema = schema_of({}, dense=[{"column": "d", "fill": 2.5}])
    assert batch_rows(to_batch(table, schema)) == [
        (1.0, 2.5, (), (1,)),
        (0.0, 2.5, (), (2,)),
        (1.0, 2.5, (), (3,)),
    ]


def test_no_rows_make_an_empty_batch():
    table = pa.table(
        {
            "ids": pa.array([], pa.list_(pa.int64())),
            "d": pa.array([], pa.float32()),
            "g": pa.array([], pa.int64()),
            "label": [],
        }
    )
    table = table.set_column(3, "label", pa.array([], pa.float32()))
    batch = to_batch(table, schema_of({}))
    assert (
        batch.rows,
        batch.dense_features.shape,
        batch.sparse_features.stride(),
        batch.global_rows,
    ) == (0, (0, 1), 0, 0)


def test_a_schema_without_dense_columns_makes_a_dense_tensor_of_width_zero():
    table = pa.table({"ids": [1, 2], "g": [0, 0], "label": [0.0, 1.0]})
    assert to_batch(table, schema_of({}, dense=())).dense_features.shape == (2, 0)


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64(), pa.int32()])
def test_weights_follow_their_ids_and_others_weigh_one(kind):
    ids = pa.array([[1, 2], None, [3], []], pa.list_(pa.int64()))
    weights = pa.array([[2, 3], None, [4], []], pa.list_(kind))
    table = pa.table({"ids": ids, "w": weights, "d": [0.0] * 4, "g": [7] * 4, "label": [0] * 4})
    batch = to_batch(table.slice(0, 3), schema_of({}, weights=True))
    assert [r[4:] for r in batch_rows(batch)] == [
        ((2.0, 3.0), (1.0,)),
        ((), (1.0,)),
        ((4.0,), (1.0,)),
    ]


def good(n: int = 5) -> dict:
    return {
        "ids": [[1], [2, 3], [], [4], [5]],
        "d": [0.5] * n,
        "g": [1] * n,
        "label": [0.0, 1.0, 0.0, 1.0, 0.0],
    }


def replaced(column: str, row: int, value, kind=None) -> pa.Table:
    columns = good()
    columns[column][row] = value
    return pa.table(
        {
            k: pa.array(v, kind) if k == column and kind is not None else pa.array(v)
            for k, v in columns.items()
        }
    )


BAD = {
    "id beyond the smallest table": (
        replaced("ids", 3, [4, LIMIT]),
        r"'f' \(column 'ids'\) holds id 50 in row 13 of x; table 't' takes ids in \[0, 50\)",
    ),
    "negative id": (replaced("ids", 1, [2, -1]), r"holds id -1 in row 11 of x"),
    "id beyond int64": (
        replaced("ids", 1, [2**63 + 5], pa.list_(pa.uint64())),
        r"'f' .* holds id 9223372036854775813 in row 11 of x",
    ),
    "other feature": (replaced("g", 4, 10_000), r"'g' .* holds id 10000 in row 14 of x; table 'u'"),
    "null in a list": (
        replaced("ids", 1, [2, None]),
        r"'ids' has a null inside the list in row 11 of x",
    ),
    "lists of lists": (
        pa.table({**good(), "ids": [[[1]]] * 5}),
        r"'ids' of feature 'f' has type list<.*; ids are integers",
    ),
    "null label": (replaced("label", 2, None), r"label column 'label' holds null in row 12 of x"),
    "nan label": (replaced("label", 2, math.nan), r"label column 'label' holds nan in row 12 of x"),
    "inf label": (replaced("label", 2, math.inf), r"label column 'label' holds inf in row 12 of x"),
    "nan dense": (replaced("d", 4, math.nan), r"dense column 'd' holds nan in row 14 of x"),
    "dense beyond float32": (replaced("d", 4, 1e300), r"dense column 'd' holds inf in row 14 of x"),
    "string ids": (
        pa.table({**good(), "ids": ["a"] * 5}),
        r"'ids' of feature 'f' holds string. Set hash_buckets",
    ),
    "views of text with nulls, which Arrow drops from no view": (
        pa.table({**good(), "ids": pa.array(["a", None, "b", "c", "d"], pa.string_view())}),
        r"'ids' of feature 'f' holds large_string. Set hash_buckets",
    ),
    "float ids": (
        pa.table({**good(), "ids": [1.0] * 5}),
        r"'ids' of feature 'f' has type double.* Cast the column to int64",
    ),
    "string dense": (pa.table({**good(), "d": ["a"] * 5}), r"dense column 'd' has type string"),
    "string label": (
        pa.table({**good(), "label": ["a"] * 5}),
        r"label column 'label' has type string",
    ),
    "missing column": (
        pa.table({k: v for k, v in good().items() if k != "g"}),
        r"column 'g' is missing .*the columns are \['ids', 'd', 'label'\]",
    ),
    "column twice": (
        pa.Table.from_arrays([pa.array(v) for v in [*good().values(), [1] * 5]], [*good(), "g"]),
        r"column 'g' occurs 2 times",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_and_named(case):
    table, message = BAD[case]
    for data in (
        table,
        table.to_batches()[0],
        pa.concat_tables([table.slice(0, 2), table.slice(2)]),
    ):
        with pytest.raises(InputError, match=message):
            to_batch(data, schema_of({}), source="x", first_row=10)


def test_ids_without_a_sign_are_told_as_they_are_by_a_column_of_ids_too():
    rows = pa.table({"ids": pa.array([3, 2**63 + 5], pa.uint64())})
    with pytest.raises(InputError, match=r"has ids from 3 to 9223372036854775813, its table has"):
        IdColumn(schema_of({}), "f").ids(rows)


def test_the_number_that_is_no_id_of_a_dynamic_table_has_its_own_remedy():
    plain = json.loads(schema_of({}).to_json())
    for table in plain["tables"]:
        table["dynamic"] = {}
    message = (
        r"'f' \(column 'ids'\) holds id -1 in row 11 of x; table 't' takes any number of 64 bits "
        r"but -1\. Leave the list of a row without an id empty, or map missing values to another "
        r"id\.$"
    )
    with pytest.raises(InputError, match=message):
        to_batch(
            replaced("ids", 1, [-2, -1]),
            FeatureSchema.from_json(json.dumps(plain)),
            source="x",
            first_row=10,
        )


TYPE_CASES = (
    "string ids",
    "float ids",
    "string dense",
    "string label",
    "missing column",
    "column twice",
)


@pytest.mark.parametrize("case", TYPE_CASES)
def test_a_files_columns_are_checked_before_reading(case):
    table, _ = BAD[case]
    with pytest.raises(InputError, match="file y"):
        check_columns(table.schema, schema_of({}), "file y")
    check_columns(pa.table(good()).schema, schema_of({}), "file y")


def test_weights_must_match_ids():
    table = pa.table({**good(), "w": pa.array([[1.0], [1.0], [], [1.0], [1.0]])})
    with pytest.raises(
        InputError, match="'f' has 2 ids in column 'ids' and 1 weights in column 'w' in row 1 of x"
    ):
        to_batch(table, schema_of({}, weights=True), source="x")
    table = pa.table({**good(), "w": pa.array([[1.0], [1.0, math.nan], [], [1.0], [1.0]])})
    with pytest.raises(InputError, match="'w' holds nan in row 1 of x"):
        to_batch(table, schema_of({}, weights=True), source="x")


def test_weights_that_are_no_numbers_are_refused():
    table = pa.table({**good(), "w": pa.array([["a"], ["b", "c"], [], ["d"], ["e"]])})
    with pytest.raises(InputError, match="column 'w' has type string"):
        to_batch(table, schema_of({}, weights=True), source="x")
    with pytest.raises(InputError, match="file y: weights column 'w' has type string"):
        check_columns(table.schema, schema_of({}, weights=True), "file y")


# a figure of the machine, which benchmarks/data.py measures; this one finds a path through Python
# lists
@pytest.mark.slow
def test_conversion_costs_a_few_memcpys():
    """8192 rows x 26 list<int64> within 8x of one copy of the ids and 10x faster than to_pylist;
    best of 15 (quiet: 4x).
    """
    rng = np.random.default_rng(0)
    columns, features, size = {"label": pa.array(np.zeros(8192, np.float32))}, [], 0
    for f in range(26):
        offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 11, 8192))]).astype(np.int32)
        columns[f"c{f}"] = pa.ListArray.from_arrays(
            pa.array(offsets), pa.array(rng.integers(0, 1000, offsets[-1]))
        )
        features.append({"name": f"f{f}", "column": f"c{f}"})
        size += int(offsets[-1]) * 8
    tables = [
        {
            "name": "t",
            "num_embeddings": 1000,
            "embedding_dim": 4,
            "features": [f["name"] for f in features],
        }
    ]
    schema = FeatureSchema.from_json(
        json.dumps({"label": "label", "features": features, "tables": tables})
    )
    data = pa.record_batch(columns)
    source = rng.integers(0, 9, size // 8)

    def timed(fn) -> float:
        start = time.process_time()
        fn()
        return time.process_time() - start

    convert, copy = zip(
        *((timed(lambda: to_batch(data, schema)), timed(source.copy)) for _ in range(15)),
        strict=True,
    )
    slow = timed(lambda: [column.to_pylist() for column in data.columns])
    assert min(convert) < 8 * min(copy)
    assert min(convert) < slow / 10
    print(
        f"convert {min(convert) * 1e3:.2f} ms, memcpy {min(copy) * 1e3:.2f} ms, to_pylist "
        f"{slow * 1e3:.0f} ms"
    )
