"""Writes an event log with planted truth, and the best possible scores of it and of its days.

The events come from `planted_log` and are sorted, split by time and written by `event_log`, so that
histories are cut from them on reading. DIN attends with the row of an item, and the rows of what
came before must say what was done with it: the column `played` numbers the pairs of action and
item, behind the items in the same table. `next_item.json` is the schema of the plain histories of
items, actions and times, which lie next to each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rayrec.data.event_log import PARTS, SPLIT, EventSplit, WrittenLog, write_sorted
from rayrec.data.planted_log import ACTIONS, DAY, SKIP, PlantedLog, PlantedLogConfig
from rayrec.data.synthetic import bayes_scores, check_free
from rayrec.layout.schema import FeatureSchema
from rayrec.layout.schema_columns import Feature, SequenceColumn
from rayrec.layout.tables import EmbeddingBagConfig, EmbeddingConfig

_EVENT_BYTES = 16  # of an event in the files, by a cautious estimate


def write_planted_log(directory: str | Path, config: PlantedLogConfig | None = None) -> WrittenLog:
    """Write log/, schema.json, next_item.json and truth.json below a local directory.

    Equal configs write equal files.

    Raises:
        ConfigError: the disk has no room, or a part of the split is empty.
    Cost: about 2 s and 11 MB of Parquet per million events; memory of the events of 4,096 users,
    and 13 bytes for each event of the log.
    """
    config, root = config or PlantedLogConfig(), Path(directory)
    check_free(root, config.events, "events", config.events * _EVENT_BYTES)
    root.mkdir(parents=True, exist_ok=True)
    told: list[tuple[NDArray[np.int16], NDArray[np.bool_], NDArray[np.float64]]] = []

    def tables() -> Iterator[pa.Table]:
        for events in PlantedLog(config).chunks():
            engaged, day = events.action > SKIP, events.time // DAY
            told.append((day.astype(np.int16), engaged, events.logits))
            played = config.items * (1 + events.action) + events.item
            columns = {"user": events.user, "item": events.item, "action": events.action}
            columns |= {"played": played, "day": day, "engaged": engaged.astype(np.int64)}
            arrays = {name: pa.array(column.astype(np.int32)) for name, column in columns.items()}
            if len(day):
                yield pa.table(arrays | {"time": pa.array(events.time)})

    validation, test = config.first_held_out
    split = EventSplit(
        validation_from=validation * DAY, test_from=test * DAY, windows=config.history
    )
    users, events = write_sorted(tables(), root / "log", "user", "time", split)
    day, engaged, logits = (np.concatenate(column) for column in zip(*told, strict=True))
    whole: dict[str, Any] = bayes_scores(logits, engaged)
    wheres = [f"{SPLIT} == '{part}'" for part in PARTS]
    parts = dict(zip(wheres, np.split(np.arange(config.days), [validation, test]), strict=True))
    parts |= {f"day == {one}": np.array([one]) for one in range(config.days)}
    whole["parts"] = []
    for where, days in parts.items():
        rows = np.isin(day, days)
        # a part of one label has no AUC
        if 0 < engaged[rows].sum() < rows.sum():
            whole["parts"].append({"where": where, **bayes_scores(logits[rows], engaged[rows])})
    whole["config"] = asdict(config)
    (root / "truth.json").write_text(json.dumps(whole, indent=2) + "\n")
    click_schema(config).save(root / "schema.json")
    next_item_schema(config).save(root / "next_item.json")
    return WrittenLog(root / "log", users, events)


def click_schema(config: PlantedLogConfig) -> FeatureSchema:
    """Return the schema for DIN: an item that attends to what its user did with others."""
    rows = config.items * (1 + len(ACTIONS))
    return FeatureSchema(
        label="engaged",
        user="user",
        time="time",
        features=(
            Feature(name="user", column="user"),
            Feature(name="item", column="item"),
            Feature(name="history", column="played", history=config.history),
        ),
        tables=(
            EmbeddingBagConfig(config.users, config.dim, "t_user", feature_names=["user"]),
            EmbeddingConfig(rows, config.dim, "t_item", feature_names=["item", "history"]),
        ),
    )


def next_item_schema(config: PlantedLogConfig) -> FeatureSchema:
    """Return the schema of aligned histories of items, actions and times."""

    def past(name: str) -> dict[str, Any]:
        return {"column": name, "history": config.history}

    actions = EmbeddingConfig(len(ACTIONS), config.dim, "t_action", feature_names=["actions"])
    items = EmbeddingConfig(config.items, config.dim, "t_item", feature_names=["item", "history"])
    return FeatureSchema(
        label="engaged",
        user="user",
        time="time",
        features=(
            Feature(name="item", column="item"),
            Feature(name="history", **past("item")),
            Feature(name="actions", **past("action")),
        ),
        sequences=(
            SequenceColumn(name="event_time", column="time"),
            SequenceColumn(name="history_time", **past("time")),
        ),
        tables=(items, actions),
    )
