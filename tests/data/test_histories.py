"""Histories cut from event logs on reading, against a dict of lists."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.data import ArrowDataset, FeatureSchema, ParquetDataset
from rayrec.errors import ConfigError, InputError
from rayrec.layout.dynamic import DynamicConfig
from tests.data.event_logs import (
    batch_histories,
    log_schema,
    plain_histories,
    random_log,
    write_log,
)

KINDS = {"parquet": ParquetDataset, "arrow": ArrowDataset}


@pytest.mark.seeds(range(100))
def test_a_history_is_the_last_events_of_the_user_before_each_event(tmp_path, seed):
    rng = random.Random(seed)
    events = random_log(rng, rng.randrange(1, 30), texts=rng.random() < 0.3)
    kind, history = rng.choice(list(KINDS)), rng.randrange(1, 15)
    write_log(tmp_path / "log", events, kind, rng)
    where = rng.choice((None, "split == 'test'", "split == 'train' and item < 40"))
    taken = [e for e in events if where is None or e["split"] in where]
    if where is not None and "item" in where:
        taken = [e for e in taken if e["item"] < 40]
    streams, block = rng.randrange(1, 6), rng.randrange(1, 40)
    schema = log_schema(history)
    if not taken:
        with pytest.raises(InputError, match="no rows"):
            KINDS[kind](str(tmp_path / "log"), schema, where=where)
        return
    data = KINDS[kind](
        str(tmp_path / "log"), schema, where=where, num_streams=streams, shuffle_rows=block
    )
    assert data.num_rows == len(taken)
    wanted = plain_histories(events, history)
    size, epoch, shuffle = rng.randrange(1, 30), rng.randrange(3), rng.random() < 0.7
    found = {}
    for batch in data.loader(0, 1, size, seed, epoch, shuffle=shuffle, threaded=False):
        found |= batch_histories(batch)
    assert found == {event["row"]: wanted[event["row"]] for event in taken}
    # any number of ranks, from any batch on
    ranks, first = rng.randrange(1, 5), rng.randrange(data.num_batches(size) + 1)
    whole = list(data.loader(0, 1, size, seed, epoch, first, shuffle, threaded=False))
    parts = [
        list(data.loader(rank, ranks, size, seed, epoch, first, shuffle, threaded=False))
        for rank in range(ranks)
    ]
    for number, batch in enumerate(whole):
        joined: dict = {}
        for part in parts:
            joined |= batch_histories(part[number])
        assert joined == batch_histories(batch)


def test_times_are_int64_and_move_with_the_batch(tmp_path):
    rng = random.Random(0)
    write_log(tmp_path / "log", random_log(rng, 5), "parquet", rng)
    data = ParquetDataset(str(tmp_path / "log"), log_schema(4))
    batch = next(data.loader(0, 1, 8, threaded=False))
    times = batch.sequences["times"]
    assert times.values().dtype == torch.int64
    assert times.lengths().tolist() == batch.sparse_features["items"].lengths().tolist()
    moved = batch.to("meta").sequences["times"]
    assert moved.values().device.type == "meta" and moved.values().shape == times.values().shape


def test_batches_share_no_memory_with_the_log(tmp_path):
    """A batch stays as it is while later ones are made."""
    rng = random.Random(0)
    write_log(tmp_path / "log", random_log(rng, 9), "arrow", rng)
    data = ArrowDataset(str(tmp_path / "log"), log_schema(4))
    batches = list(data.loader(0, 1, 8, threaded=False))
    again = data.loader(0, 1, 8, threaded=False)
    for batch in batches:
        batch.sequences["times"].values().zero_()
        batch.sparse_features.values().zero_()
        assert next(again).sequences["times"].values().sum() > 0


def sorted_log(**columns: list) -> pa.Table:
    """Two users with three events and one."""
    usual = {"user": [1, 1, 1, 2], "time": [5, 5, 6, 1], "item": [7, 8, 9, 7]}
    usual |= {"action": [0, 1, 2, 0], "label": [0, 1, 0, 1], "row": [0, 1, 2, 3]}
    return pa.table(usual | columns)


BAD_LOGS = {
    "times that go back": (
        {"time": [5, 4, 6, 1]},
        r"'time' goes back from 5 to 4 .* row 1 of .*log",
    ),
    "a time that is null": ({"time": [5, None, 6, 1]}, r"'time' of the log holds null in row 1"),
    "users apart": ({"user": [1, 2, 2, 1]}, r"user 1 follows user 2 in column 'user' in row 3"),
    "a user that is null": ({"user": [1, 1, 1, None]}, r"'user' of the log holds null in row 3"),
    "times of fractions": ({"time": [5.0, 5.0, 6.0, 1.0]}, r"time column 'time' has type double"),
    "a user of a fraction": ({"user": [1.0, 1.0, 1.0, 2.0]}, r"user column 'user' has type double"),
    "lists": ({"item": [[7], [8], [9], [7]]}, r"'item' of the history 'items' holds lists"),
    "a column in the way": ({"items": [1, 2, 3, 4]}, r"a column 'items', which is the name of a"),
}


@pytest.mark.parametrize("name", BAD_LOGS)
def test_a_log_that_is_not_sorted_is_refused_when_the_data_set_is_made(tmp_path, name):
    columns, message = BAD_LOGS[name]
    pq.write_table(sorted_log(**columns), tmp_path / "log.parquet")
    with pytest.raises(InputError, match=message):
        ParquetDataset(str(tmp_path / "log.parquet"), log_schema(3))


def test_a_user_in_two_row_groups_or_two_files_is_refused(tmp_path):
    pq.write_table(sorted_log(), tmp_path / "one.parquet", row_group_size=2)
    with pytest.raises(InputError, match=r"events of user 1 go on in row 2 of .*one\.parquet"):
        ParquetDataset(str(tmp_path / "one.parquet"), log_schema(3))
    (tmp_path / "two").mkdir()
    for number in range(2):
        pq.write_table(sorted_log().slice(3 * number, 3), tmp_path / "two" / f"{number}.parquet")
    assert ParquetDataset(str(tmp_path / "two"), log_schema(3)).num_rows == 4
    pq.write_table(sorted_log().slice(2), tmp_path / "two" / "1.parquet")
    with pytest.raises(InputError, match=r"events of user 1 go on in row 0 of .*two/1\.parquet"):
        ParquetDataset(str(tmp_path / "two"), log_schema(3))


def test_a_null_and_a_bad_id_in_a_history_are_told_with_their_rows(tmp_path):
    path = str(tmp_path / "log.parquet")
    pq.write_table(sorted_log(action=[0, None, 2, 0]), path)
    data = ParquetDataset(path, log_schema(3))
    with pytest.raises(InputError, match=r"'action' of the log holds null in row 1 of .*log\.parq"):
        next(data.loader(0, 1, 8, threaded=False))
    pq.write_table(sorted_log(action=[0, 5, 2, 0]), path)
    data = ParquetDataset(path, log_schema(3))
    with pytest.raises(InputError, match=r"'actions' \(column 'action'\) holds id 5 in row 2 of"):
        next(data.loader(0, 1, 8, shuffle=False, ordered=True, threaded=False))


def with_history(**change: object) -> dict:
    features = [{"name": "items", "column": "item", "history": 3} | change]
    table = {"name": "t", "num_embeddings": 9, "embedding_dim": 4, "features": ["items"]}
    return {"label": "label", "user": "user", "features": features, "tables": [table]}


BAD_SCHEMAS = {
    "no user": (with_history() | {"user": None}, "the schema names no user"),
    "no history": (with_history(history=None), "no feature has a history to cut"),
    "an empty history": (with_history(history=0), "history=0; it is a number of entries"),
    "a history beyond any": (with_history(history=2**31), r"at least 1 and below 2\*\*31"),
    "both words": (with_history(most_recent=3), "history=3 and most_recent=3"),
    "weights": (with_history(weights="w"), "a history and weights"),
    "the name of a column": (
        with_history() | {"groups": ["items"]},
        "and of a column that is read",
    ),
    "alone": (with_history(aligned_with="items"), "aligned with 'items', which is no other"),
    "another bound": (
        with_history(aligned_with="s")
        | {"sequences": [{"name": "s", "column": "time", "history": 4}]},
        "keep different numbers of entries",
    ),
    "a label now": (
        with_history() | {"sequences": [{"name": "s", "column": "label"}]},
        "reads the label column 'label'",
    ),
    "ascending": (
        with_history()
        | {"sequences": [{"name": "s", "column": "t", "history": 3, "ascending": True}]},
        "is a history and ascending",
    ),
    "a word": (
        with_history() | {"sequences": [{"name": "s", "column": "t", "dtype": "int8"}]},
        "int8",
    ),
}


@pytest.mark.parametrize("name", BAD_SCHEMAS)
def test_a_schema_that_contradicts_itself_is_refused(name):
    schema, message = BAD_SCHEMAS[name]
    with pytest.raises(ConfigError, match=message):
        FeatureSchema.from_json(json.dumps(schema))


def test_labels_of_earlier_events_may_be_a_history(tmp_path):
    schema = with_history(column="label")
    pq.write_table(sorted_log(), tmp_path / "log.parquet")
    data = ParquetDataset(
        str(tmp_path / "log.parquet"), FeatureSchema.from_json(json.dumps(schema))
    )
    batch = next(data.loader(0, 1, 8, shuffle=False, ordered=True, threaded=False))
    bags = [bag.tolist() for bag in batch.sparse_features["items"].to_dense()]
    assert bags == [[], [0], [0, 1], []]


def test_a_schema_of_sequences_reads_back_and_parts_its_tables():
    schema = log_schema(5)
    assert FeatureSchema.from_json(schema.to_json()) == schema
    assert schema.embedding_bag_configs() == []
    assert [table.name for table in schema.embedding_configs()] == ["t_item", "t_action"]


def test_histories_and_tables_that_go_by_time_read_one_column(tmp_path):
    rng = random.Random(3)
    write_log(tmp_path / "log", random_log(rng, 6), "parquet", rng)
    schema = log_schema(4)
    by_time = DynamicConfig(ttl_s=60)
    schema = replace(schema, tables=tuple(replace(t, dynamic=by_time) for t in schema.tables))
    for batch in ParquetDataset(str(tmp_path / "log"), schema).loader(0, 1, 8, threaded=False):
        assert batch.sparse_features.time == batch.sequences["now"].values().max()
