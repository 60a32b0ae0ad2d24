"""The schema's column of times: a batch has the largest of its rows, in seconds."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from arrow_files import SCHEMA, random_table

from rayrec.data import ParquetDataset, check_columns, to_batch
from rayrec.errors import ConfigError, InputError
from rayrec.layout import DynamicConfig, EmbeddingBagConfig
from rayrec.layout.schema import FeatureSchema
from rayrec.layout.schema_columns import DenseColumn

FIRST, *OTHERS = SCHEMA.tables
BY_TIME = replace(
    FIRST, feature_names=list(FIRST.feature_names), dynamic=DynamicConfig(ttl_s=60, blocks=1)
)
TIMED = replace(SCHEMA, time="at", dense=(DenseColumn(column="row"),), tables=(BY_TIME, *OTHERS))
START = int(datetime(2026, 3, 1, tzinfo=UTC).timestamp())


@pytest.mark.parametrize(
    "kind",
    [
        pa.int32(),
        pa.int64(),
        pa.uint64(),
        pa.timestamp("s"),
        pa.timestamp("ms", tz="Europe/Berlin"),
        pa.timestamp("us"),
        pa.timestamp("ns", tz="UTC"),
    ],
)
def test_each_rank_has_the_largest_time_of_its_rows(tmp_path, kind):
    rng = random.Random(1)
    times = [START + rng.randint(-5000, 5000) for _ in range(123)]
    seconds = pa.array(times)
    if pa.types.is_timestamp(kind):  # a timezone changes how a time is shown, and not the time
        per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit]
        part = [rng.randrange(per_second) for _ in times]
        exact = [time * per_second + more for time, more in zip(times, part, strict=True)]
        seconds = pa.array(exact)
    table = random_table(rng, 123).append_column("at", seconds.cast(kind))
    pq.write_table(table, tmp_path / "all.parquet", row_group_size=20)
    data = ParquetDataset(tmp_path, TIMED)
    found = 0
    for rank in range(2):
        for batch in data.loader(rank, 2, 50, seed=3):
            rows = batch.dense_features[:, 0].int().tolist()
            wanted = max((times[row] for row in rows), default=None)
            assert batch.sparse_features.time == batch.to("cpu").sparse_features.time == wanted
            found += batch.rows
    assert found == 123
    assert to_batch(table, TIMED).sparse_features.time == max(times)
    assert to_batch(table.slice(0, 0), TIMED).sparse_features.time is None
    assert to_batch(table, SCHEMA).sparse_features.time is None
    # what is to be scored needs no time
    assert to_batch(table.drop(["at"]), TIMED, with_labels=False).sparse_features.time is None
    assert TIMED.columns()[-1] == "at" and "at" not in TIMED.columns(with_labels=False)
    assert FeatureSchema.from_json(TIMED.to_json()) == TIMED


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([START, None]), "time column 'at' holds null in row 1 of clicks"),
        (pa.array([5.0, 6.0]), "time column 'at' has type double; cast it to whole seconds or to"),
        (pa.array(["5", "6"]), "time column 'at' has type string; cast it to whole seconds"),
        (pa.array([True, False]), "time column 'at' has type bool"),
        (
            pa.array([START, -1]),
            "'at' in row 1 of clicks: the time -1 is not in seconds since 1970",
        ),
        (pa.array([START, START * 1000]), f"the time {START * 1000} is not in seconds since 1970"),
        (pa.array([0, 2**64 - 1], pa.uint64()), f"the time {2**64 - 1} is not in seconds"),
        (pa.array([-1, 0], pa.timestamp("ns")), "'at' in row 0 of clicks: the time -1 is not in"),
    ],
)
def test_what_is_no_time_is_told_with_its_row(column, message):
    ids = {name: pa.nulls(2) for name in ("user", "genres")}
    table = pa.table({"label": [0, 1], "at": column, **ids})
    with pytest.raises(InputError, match=message):
        to_batch(table, replace(TIMED, dense=()), source="clicks")
    if "type" in message:
        with pytest.raises(InputError, match=rf"part-0: {message}"):
            check_columns(table.schema, replace(TIMED, dense=()), "part-0")


def test_the_latest_time_is_that_of_the_year_9999():
    ids = {name: pa.nulls(1) for name in ("user", "genres")}
    latest = int(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp())
    table = pa.table({"label": [0], "at": [latest], **ids})
    assert to_batch(table, replace(TIMED, dense=())).sparse_features.time == latest


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (
            DynamicConfig(ttl_s=60),
            "table 't' has ttl_s=60, and the schema names no column of times",
        ),
        (DynamicConfig(eviction="timestamp"), "table 't' has eviction='timestamp', and the schema"),
    ],
)
def test_a_table_that_asks_for_time_needs_a_column_of_times(rule, says):
    table = EmbeddingBagConfig(8, 4, "t", feature_names=["user", "genres"], dynamic=rule)
    with pytest.raises(ConfigError, match=says):
        replace(SCHEMA, tables=(table,))
    timed = replace(SCHEMA, tables=(table,), time="at")
    assert FeatureSchema.from_json(timed.to_json()) == timed
    with pytest.raises(ConfigError, match="the schema has a time without a name"):
        replace(timed, time="")
    with pytest.raises(ConfigError, match="the schema: time is 5; it must be a text"):
        FeatureSchema.from_json(timed.to_json().replace('"time": "at"', '"time": 5'))
