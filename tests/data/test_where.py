"""Folders that are columns, and `where`: its language, which rows it takes, and what it refuses."""

from __future__ import annotations

import json
import operator
import pickle
import random
import re
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from arrow_files import SCHEMA, batch_rows, random_table

from rayrec.data import ArrowDataset, ParquetDataset
from rayrec.data.files import FileDataset
from rayrec.data.filters import check_terms, compile_predicate, mask_of
from rayrec.data.predicate import columns_of, parse_where, terms_of
from rayrec.data.readers import ParquetReader
from rayrec.data.statistics import check_statistics
from rayrec.errors import ConfigError, InputError
from rayrec.layout.schema import FeatureSchema

DAYS = ("2026-10-31", "2026-11-01", "2026-11-02", "2026-11-03")
KINDS: dict[str, type[FileDataset]] = {"parquet": ParquetDataset, "arrow": ArrowDataset}
FOLDERS = FeatureSchema.from_json(
    json.dumps(
        {
            "label": "label",
            "dense": ["row", "hour"],
            "features": [
                {"name": "hour", "column": "hour"},
                {"name": "day", "column": "day", "hash_buckets": 50},
                {"name": "user", "column": "user"},
            ],
            "tables": [
                {"name": "h", "num_embeddings": 24, "embedding_dim": 4, "features": ["hour"]},
                {"name": "d", "num_embeddings": 50, "embedding_dim": 4, "features": ["day"]},
                {"name": "u", "num_embeddings": 1000, "embedding_dim": 4, "features": ["user"]},
            ],
        }
    )
)


def write_days(folder: Path, kind: str, rng: random.Random, rows: int = 300) -> pa.Table:
    """Rows over folders of days and hours, as pyarrow writes them; all rows with both columns."""
    table = random_table(rng, rows)
    day = pa.array([rng.choice(DAYS) for _ in range(rows)])
    hour = pa.array([rng.randrange(3) for _ in range(rows)], pa.int64())
    table = table.append_column("day", day).append_column("hour", hour)
    kinds = pa.schema([("day", pa.string()), ("hour", pa.int64())])
    limits = {"max_rows_per_group": 16, "min_rows_per_group": 16} if kind == "parquet" else {}
    ds.write_dataset(
        table,
        folder,
        format=kind,
        partitioning=ds.partitioning(kinds, flavor="hive"),
        use_threads=False,
        **limits,
    )
    return table


def numbers(data: FileDataset, ranks: int = 1, batch: int = 40, seed: int = 3) -> list[int]:
    """What the rows that all ranks read have in the dense column 'row'."""
    out = []
    for rank in range(ranks):
        for part in data.loader(rank, ranks, batch, seed):
            out += part.dense_features[:, 0].int().tolist()
    return out


def random_where(rng: random.Random, depth: int = 3) -> tuple[str, object]:
    """A text and the function of a row (a dict) that says True, False or None as SQL would."""
    if depth and rng.random() < 0.6:
        kind = rng.choice(("and", "or", "not"))
        if kind == "not":
            text, inner = random_where(rng, depth - 1)
            return f"not ({text})", lambda row: None if inner(row) is None else not inner(row)
        (left, f), (right, g) = random_where(rng, depth - 1), random_where(rng, depth - 1)
        decides = kind == "or"

        def joined(row: dict) -> bool | None:
            values = [f(row), g(row)]
            if decides in values:
                return decides
            return None if None in values else not decides

        return f"({left}) {kind} ({right})", joined
    column = rng.choice(("day", "hour", "user", "d1", "label", "unused"))
    values: dict[str, tuple] = {
        "day": DAYS,
        "hour": (0, 1, 2, 0.5, 7),
        "user": (100, 500, 900, 499.5),
        "d1": (0.25, 0.5, 1),
        "label": (0, 1),
        "unused": ("5", "1", "zzz"),
    }
    if rng.random() < 0.4:
        chosen = rng.sample(values[column], 2)
        text = f"{column} in ({chosen[0]!r}, {chosen[1]!r})"
        return text, lambda row: None if row[column] is None else row[column] in chosen
    value = rng.choice(values[column])
    sign, compare = rng.choice(
        [
            ("==", operator.eq),
            ("=", operator.eq),
            ("!=", operator.ne),
            ("<", operator.lt),
            ("<=", operator.le),
            (">", operator.gt),
            (">=", operator.ge),
        ]
    )
    text = f"{column} {sign} {value!r}"
    return text, lambda row: None if row[column] is None else compare(row[column], value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.seeds(range(40))
def test_the_rows_taken_are_those_that_plain_python_takes(tmp_path, kind, seed):
    rng = random.Random(seed)
    table = write_days(tmp_path, kind, rng)
    text, holds = random_where(rng)
    wanted = [row["row"] for row in table.to_pylist() if holds(row) is True]
    if not wanted:
        with pytest.raises(InputError, match="no rows where"):
            KINDS[kind](tmp_path, SCHEMA, where=text)
        return
    data = KINDS[kind](tmp_path, SCHEMA, where=text, num_streams=3, shuffle_rows=32)
    assert data.num_rows == len(wanted), text
    assert sorted(numbers(data, rng.choice((1, 3)))) == sorted(wanted), text


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["user >= 400", "day > '2026-10-31' and user < 700", "hour = 1"])
def test_rows_keep_their_numbers_and_places(tmp_path, kind, where, large, monkeypatch):
    """Origins name the row of the file itself, for any rank, also where chunks come in pieces."""
    write_days(tmp_path, kind, random.Random(5))
    if large:
        monkeypatch.setattr("rayrec.data.streams.STREAM_ROWS", 5)
        monkeypatch.setattr("rayrec.data.selected.STREAM_ROWS", 5)
        monkeypatch.setattr("rayrec.data.readers.ParquetReader.PIECE_ROWS", 7)
    data = KINDS[kind](tmp_path, SCHEMA, where=where, num_streams=3, shuffle_rows=32)
    rows_of = [ds.dataset(file.path, format=kind).to_table()["row"] for file in data.files]
    seen = []
    for rank in range(2):
        for batch in data.loader(rank, 2, 64, 1, keep_columns=["hour", "unused"]):
            origin = batch.origin
            places = zip(origin.file, origin.row, strict=True)
            told = [rows_of[file][row].as_py() for file, row in places]
            assert told == batch.dense_features[:, 0].int().tolist()
            folders = [dict(data.files[file].folders)["hour"] for file in origin.file]
            assert origin.columns["hour"].to_pylist() == folders
            seen += told
    assert len(seen) == len(set(seen)) == data.num_rows


def test_a_run_that_resumes_reads_the_rows_that_were_left(tmp_path):
    write_days(tmp_path, "parquet", random.Random(1))
    where = "user < 800 and hour != 2"
    first = ParquetDataset(tmp_path, SCHEMA, where=where, num_streams=3, shuffle_rows=32)
    whole = [batch_rows(batch) for batch in first.loader(0, 1, 20, 7)]
    again = pickle.loads(
        pickle.dumps(ParquetDataset(tmp_path, SCHEMA, where=where, num_streams=3, shuffle_rows=32))
    )
    assert again.fingerprint() == first.fingerprint()
    parts = [again.loader(rank, 3, 20, 7, start_batch=4) for rank in range(3)]
    for wanted in whole[4:]:
        got = [row for part in parts for row in batch_rows(next(part))]
        assert sorted(map(str, got)) == sorted(map(str, wanted))


def test_folders_leave_files_out_unopened_and_nothing_is_read(tmp_path, monkeypatch):
    table = write_days(tmp_path, "parquet", random.Random(2))
    broken = tmp_path / "day=2026-10-31" / "hour=0" / "broken.parquet"
    broken.write_bytes(b"no Parquet")
    read = []
    for name in ("read", "pieces"):
        monkeypatch.setattr(ParquetReader, name, lambda *a, **k: read.append(a))
    data = ParquetDataset(tmp_path, SCHEMA, where="day >= '2026-11-02' and not hour in (0, 2)")
    assert not read
    assert {dict(file.folders)["day"] for file in data.files} == {"2026-11-02", "2026-11-03"}
    assert not data.filters_rows
    wanted = pc.and_(pc.greater_equal(table["day"], "2026-11-02"), pc.equal(table["hour"], 1))
    assert data.num_rows == table.filter(wanted).num_rows
    assert str(broken) not in {path for path, _ in data.local_files()}


@pytest.mark.parametrize("kind", KINDS)
def test_folders_serve_as_features_and_dense_columns(tmp_path, kind):
    table = write_days(tmp_path, kind, random.Random(4))
    data = KINDS[kind](tmp_path, FOLDERS, shuffle_rows=32)
    assert data.num_rows == table.num_rows
    hours, buckets = table["hour"].to_pylist(), {}
    for batch in data.loader(0, 1, 50):
        for _, row, hour, hour_bag, day_bag, _ in batch_rows(batch):
            assert hour == hours[int(row)]
            assert hour_bag == (hour,)
            buckets.setdefault(table["day"][int(row)].as_py(), set()).add(day_bag)
    assert all(len(found) == 1 for found in buckets.values())
    assert set(buckets) == set(DAYS)


def test_a_folder_serves_as_a_label_and_a_weight(tmp_path):
    table = write_days(tmp_path, "parquet", random.Random(4))
    schema = replace(SCHEMA, label=("label", "hour"), weight="hour")
    for batch in ParquetDataset(tmp_path, schema).loader(0, 1, 50):
        hours = table["hour"].take(pa.array(batch.dense_features[:, 0].int().tolist()))
        assert batch.labels[:, 1].tolist() == hours.to_pylist()
        assert batch.weights.tolist() == hours.to_pylist()


def test_a_folder_without_a_value_is_null(tmp_path):
    for value in ("__HIVE_DEFAULT_PARTITION__", "7"):
        folder = tmp_path / f"hour={value}"
        folder.mkdir()
        pq.write_table(random_table(random.Random(0), 10), folder / "part.parquet")
    feature = replace(SCHEMA.features[0], column="hour")
    schema = replace(SCHEMA, features=(feature, SCHEMA.features[1]))
    rows = [row for b in ParquetDataset(tmp_path, schema).loader(0, 1, 20) for row in batch_rows(b)]
    assert sorted(row[3] for row in rows) == [()] * 10 + [(7,)] * 10
    assert ParquetDataset(tmp_path, schema, where="not hour = 3").num_rows == 10


def test_a_column_of_the_file_is_read_as_it_is(tmp_path):
    folder = tmp_path / "user=3"
    folder.mkdir()
    table = random_table(random.Random(0), 10)
    pq.write_table(table, folder / "part.parquet")
    rows = [r for b in ParquetDataset(tmp_path, SCHEMA).loader(0, 1, 20) for r in batch_rows(b)]
    users = [() if user is None else (user,) for user in table["user"].to_pylist()]
    assert sorted(row[3] for row in rows) == sorted(users)


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ("dya = '2026-11-01'", InputError, r"column 'dya' is missing \(file .*'day', 'hour'"),
        ("day = 'x' and dya = 1", InputError, "column 'dya' is missing"),
        ("day >= 20261101", InputError, "'day' has type string .* 20261101: write a text"),
        ("hour = '1'", InputError, "'hour' has type int64 .* '1': write a number"),
        ("user = 'x'", InputError, "'user' has type int64 .* 'x': write a number"),
        ("user in (1, 'x')", InputError, "'user' has type int64 .* 'x': write a number"),
        ("genres = 1", InputError, "'genres' has type list.* 1: it holds no numbers"),
        ("genres = 'x'", InputError, "'genres' has type list.* 'x': it holds no texts"),
        ("label = true", InputError, "'label' has type int32 .* True: true and false go with"),
        ("day > '2027'", InputError, r"12 Parquet files and no rows where day > '2027'"),
        ("user > 5000", InputError, r"12 Parquet files and no rows where user > 5000"),
        ("day", ConfigError, r"at 'day' \(character 1\) .* are expected, and this is a column"),
        ("", ConfigError, r"at its end \(character 1\) something else is expected"),
        ("day >", ConfigError, r"at its end \(character 6\)"),
        ("hour = 1 hour = 2", ConfigError, r"at 'hour = 2' \(character 10\)"),
        ("day = 'x' or float(1)", ConfigError, r"at 'float\(1\)' .*, and this is a Call"),
        ("hour = 1 = 2", ConfigError, "this is a chain of comparisons"),
        ("5 < hour", ConfigError, "name of a column is expected, and this is a literal"),
        ("hour = (1, 2)", ConfigError, "true or false is expected, and this is a Tuple"),
        ("hour in 1", ConfigError, r"at '1' \(character 9\) literals in parentheses"),
        ("hour in (1, (2))", ConfigError, r"at '\)\)'"),
        ("__import__('os').getcwd()", ConfigError, r"'\.getcwd\(\)' .* does not belong there"),
        ("hour in ()", ConfigError, "literals in parentheses are expected"),
        ("hour in (day)", ConfigError, "a 'text' in quotes, .*, and this is a column"),
        ("(" * 500 + "hour = 1" + ")" * 500, ConfigError, "more than 150 levels"),
        ("not " * 9000 + "hour = 1", ConfigError, "more than 150 levels"),
        (5, ConfigError, "where=5; it must be a text"),
    ],
)
def test_what_cannot_be_asked_is_said_before_training(tmp_path, where, error, message):
    write_days(tmp_path, "parquet", random.Random(0))
    with pytest.raises(error, match=message) as raised:
        ParquetDataset(tmp_path, SCHEMA, where=where)
    assert "\n" not in str(raised.value)


def test_one_file_whose_column_does_not_fit_is_named(tmp_path):
    write_days(tmp_path, "parquet", random.Random(0))
    table = random_table(random.Random(0), 5)
    words = table.set_column(4, "user", pa.array(["a"] * 5))
    path = tmp_path / "day=2026-11-02" / "hour=1" / "words.parquet"
    pq.write_table(words, path)
    with pytest.raises(InputError, match=r"'user' has type string \(file '.*words\.parquet'"):
        ParquetDataset(tmp_path, SCHEMA, where="user > 3")
    path.rename(tmp_path / "outside.parquet")
    with pytest.raises(InputError, match=r"'day' is missing \(file '.*outside\.parquet'"):
        ParquetDataset(tmp_path, SCHEMA, where="day >= '2026-11-02'")


def test_the_fingerprint_tells_filters_apart(tmp_path):
    write_days(tmp_path, "parquet", random.Random(0))

    def of(where: str | None) -> str:
        return ParquetDataset(tmp_path, SCHEMA, where=where).fingerprint()

    assert of("user < 500 and hour=1") == of("(user<500) AND `hour` == 1")
    # the same rows by other words, and other rows
    texts = [None, "hour >= 0", "user < 500", "user < 501", "not user >= 500"]
    assert len({of(where) for where in texts}) == len(texts)


def test_the_fingerprint_of_a_data_set_without_where_is_as_it_was(tmp_path):
    (tmp_path / "part.parquet").write_bytes(b"")
    pq.write_table(
        pa.table({"label": [1], "row": [1], "d1": [0.5], "user": [1], "genres": [[1]]}),
        tmp_path / "part.parquet",
    )
    data = ParquetDataset(tmp_path, SCHEMA)
    import hashlib

    size = (tmp_path / "part.parquet").stat().st_size
    text = json.dumps(["Parquet", 8, 8192, [["part.parquet", size, [1]]]])
    assert data.fingerprint() == hashlib.sha256(text.encode()).hexdigest()[:32]


def test_bad_values_are_named_by_their_rows_in_the_file(tmp_path):
    """A bad value among the rows that are taken has its own number; among the others it is no
    matter.
    """
    table = random_table(random.Random(0), 60)
    users = [10] * 60
    users[41] = 5000
    spoilt = table.set_column(4, "user", pa.array(users, pa.int64()))
    pq.write_table(spoilt, tmp_path / "part.parquet", row_group_size=20)
    taken = ParquetDataset(tmp_path, SCHEMA, where="row >= 35", shuffle_rows=16)
    message = r"holds id 5000 in row 41 of '.*part\.parquet'"
    with pytest.raises(InputError, match=message):
        list(taken.loader(0, 1, 50))
    with pytest.raises(InputError, match=message):
        check_statistics(taken)
    sound = ParquetDataset(tmp_path, SCHEMA, where="user < 1000", shuffle_rows=16)
    check_statistics(sound)
    assert sorted(numbers(sound)) == [row for row in range(60) if row != 41]


@pytest.mark.parametrize(
    ("array", "where", "taken"),
    [
        (pa.array([1, 2**63 + 5, None], pa.uint64()), "x > 5", [1]),
        (pa.array([1, 2**63 + 5, None], pa.uint64()), "x > -5", [0, 1]),
        (pa.array([2**53 + 1, 2**53], pa.int64()), "x > 9007199254740992", [0]),
        (pa.array([2**53 + 1, 2**53], pa.int64()), "x > 9007199254740992.0", [0]),
        (pa.array([1, 2, 100], pa.int8()), "x < 300", [0, 1, 2]),
        (pa.array([1, 2, 100], pa.int8()), "x in (2, 300, 2.5)", [1]),
        (pa.array([1, 2, None], pa.int8()), "x not in (2)", [0]),
        (pa.array([0.1, 0.2, float("nan"), None], pa.float64()), "x = 0.1", [0]),
        (pa.array([0.1, 0.2, float("nan"), None], pa.float64()), "x in (0.1, 3)", [0]),
        (pa.array([0.5, 2.0], pa.float32()), "x in (0.5, 2)", [0, 1]),
        (pa.array([Decimal("1.25"), Decimal("2.50")]), "x >= 2.5", [1]),
        (pa.array(["a", "b", None]).dictionary_encode(), "x != 'a'", [1]),
        (pa.array(["a", "b", None], pa.large_string()), "x in ('b', 'it''s')", [1]),
        (pa.array([True, False, None]), "x = TRUE", [0]),
        (pa.array([date(2026, 11, 1), date(2026, 10, 1)]), "x >= '2026-11-01'", [0]),
        (pa.array([date(2026, 11, 1), None]), "x in ('2026-11-01')", [0]),
        (pa.array([datetime(2026, 11, 1, 5)], pa.timestamp("ms")), "x > '2026-11-01'", [0]),
        (pa.array([7, -2, 2]), "x in (007, +2,)", [0, 2]),
        (pa.array(["a\\n", "a\n", '"']), "x = 'a\\n' or x = " + '"' * 4, [0, 2]),
        (pa.array([None, None], pa.null()), "x = 1 or not x = 1", []),
        (pa.array(range(3000)), " or ".join(f"x = {i}" for i in range(2500)), list(range(2500))),
    ],
)
def test_every_type_is_compared_exactly(array, where, taken):
    table = pa.table({"x": array})
    predicate = parse_where(where)
    check_terms(terms_of(predicate), table.schema, "x")
    mask = mask_of(table, compile_predicate(predicate, table.schema))
    assert mask.nonzero()[0].tolist() == taken


@pytest.mark.seeds(range(20))
def test_the_canonical_text_says_the_same_of_columns_of_any_name(seed):
    """Words of Python are names of columns, and words of `where` in either case are not."""
    rng = random.Random(seed)
    text, names = random_where(rng)[0], ("class", "None", "is", "c0", "v0", "`in`", "`a - b`", "ﬁ")
    for column in ("day", "hour", "user", "d1", "label", "unused"):
        text = re.sub(rf"\b{column}\b", rng.choice(names), text)
    for word in ("and", "or", "not", "in"):
        text = re.sub(rf"(?<!`)\b{word}\b(?!`)", rng.choice((word, word.upper())), text)
    predicate = parse_where(text)
    again = parse_where(str(predicate))
    assert again == predicate and str(again) == str(predicate)
    assert set(columns_of(predicate)) <= {name.strip("`") for name in names}


@pytest.mark.parametrize(
    ("array", "where"),
    [
        (pa.array([date(2026, 11, 1)]), "x = 'yesterday'"),
        (pa.array([b"a"]), "x = 'a'"),
        (pa.array([1.5]), f"x = {10**400}"),
        (pa.array([True]), "x = 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(array, where):
    with pytest.raises(InputError, match=r"where: column 'x' has type .* cannot be compared"):
        check_terms(terms_of(parse_where(where)), pa.table({"x": array}).schema, "file x")
