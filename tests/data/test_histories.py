"""Histories cut from event logs on reading, against a dict of lists."""

from __future__ import annotations

import random

import pytest
import torch

from rayrec.data import ArrowDataset, ParquetDataset
from rayrec.errors import InputError
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
