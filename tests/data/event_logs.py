"""Event logs as real files, and a plain reading of histories that tests compare with."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

from rayrec.data import Batch, FeatureSchema

LABEL, ITEM, ACTION, TIME = "label", "item", "action", "time"


def log_schema(history: int, **fields: Any) -> FeatureSchema:
    """The schema of a log with three aligned histories: items, actions and times."""
    tables = [
        {"name": "t_item", "features": ["item", "items"], "num_embeddings": 50},
        {"name": "t_action", "features": ["actions"], "num_embeddings": 3},
    ]
    given = {
        "label": LABEL,
        "user": "user",
        "time": TIME,
        "dense": ["row"],
        "features": [
            {"name": "item", "column": ITEM},
            {"name": "items", "column": ITEM, "history": history},
            {"name": "actions", "column": ACTION, "history": history},
        ],
        "sequences": [
            {"name": "times", "column": TIME, "history": history},
            {"name": "now", "column": TIME},
        ],
        "tables": [table | {"embedding_dim": 4, "pooling": "none"} for table in tables],
    }
    return FeatureSchema.from_json(json.dumps(given | fields))


def random_log(rng: random.Random, users: int, most: int = 12, texts: bool = False) -> list[dict]:
    """Events sorted by user and time, with equal times among them; `row` numbers them."""
    names = [f"u{number:03}" if texts else number * 7 - 5 for number in range(users)]
    out: list[dict] = []
    for name in names:
        time = rng.randrange(100)
        for _ in range(rng.randrange(1, most + 1)):
            time += rng.choice((0, 0, 1, 5))
            event = {"user": name, "time": time, "item": rng.randrange(50)}
            event |= {"action": rng.randrange(3), "label": rng.randrange(2), "row": len(out)}
            event["split"] = rng.choice(("train", "test"))
            out.append(event)
    return out


def write_log(folder: Path, events: list[dict], kind: str, rng: random.Random) -> None:
    """Write events to some files, whose row groups or record batches hold whole users."""
    folder.mkdir(parents=True)
    ends = [i for i in range(1, len(events)) if events[i]["user"] != events[i - 1]["user"]]
    cuts = sorted(rng.sample(ends, min(len(ends), rng.randrange(6))))
    chunks = [events[a:b] for a, b in zip([0, *cuts], [*cuts, len(events)], strict=True)]
    files = max(1, rng.randrange(len(chunks) + 1))
    places = sorted(rng.randrange(files) for _ in chunks)
    for number in dict.fromkeys(places):
        own = [
            pa.Table.from_pylist(chunk)
            for chunk, place in zip(chunks, places, strict=True)
            if place == number
        ]
        path = folder / f"part-{number:03}.{kind}"
        if kind == "parquet":
            with pq.ParquetWriter(path, own[0].schema) as writer:
                for table in own:
                    writer.write_table(table)
        else:
            with ipc.new_file(path, own[0].schema) as writer:
                for table in own:
                    writer.write_batch(table.combine_chunks().to_batches()[0])


def plain_histories(events: list[dict], history: int) -> dict[int, dict[str, list]]:
    """By the number of an event, the last values of its user before it; a dict of lists."""
    past: dict[Any, list[dict]] = defaultdict(list)
    out = {}
    for event in events:
        before = past[event["user"]][-history:]
        out[event["row"]] = {
            "items": [one["item"] for one in before],
            "actions": [one["action"] for one in before],
            "times": [one["time"] for one in before],
            "item": [event["item"]],
            "now": [event["time"]],
        }
        past[event["user"]].append(event)
    return out


def batch_histories(batch: Batch) -> dict[int, dict[str, list]]:
    """The same of a batch."""
    read = {key: jagged.to_dense() for key, jagged in batch.sparse_features.to_dict().items()}
    read |= {name: jagged.to_dense() for name, jagged in batch.sequences.items()}
    rows = batch.dense_features[:, 0].tolist()
    return {
        int(row): {name: lists[place].tolist() for name, lists in read.items()}
        for place, row in enumerate(rows)
    }
