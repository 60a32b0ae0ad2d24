"""Files of a stream, and the windows that are cut of them without a run."""

from __future__ import annotations

import io
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

from rayrec.data import DenseColumn, Feature, FeatureSchema
from rayrec.layout import EmbeddingBagConfig
from rayrec.streams import StreamConfig, StreamWindow
from rayrec.streams.cutting import WindowCutter
from rayrec.streams.kept import WindowFolder

SCHEMA = FeatureSchema(
    label="label",
    dense=(DenseColumn(column="amount"),),
    features=(Feature(name="item", column="item"),),
    tables=(EmbeddingBagConfig(1000, 4, "t_item", feature_names=["item"]),),
)


def rows_of(first: int, count: int, event: int = 0) -> pa.Table:
    """Rows whose amounts are their numbers in the stream."""
    numbers = np.arange(first, first + count)
    return pa.table(
        {
            "label": (numbers % 2).astype(np.int64),
            "amount": numbers.astype(np.float32),
            "item": numbers % 1000,
            "at": np.full(count, event, np.int64),
        }
    )


def as_bytes(rows: pa.Table, group: int = 7) -> bytes:
    out = io.BytesIO()
    pq.write_table(rows, out, row_group_size=group)
    return out.getvalue()


def config_of(folder: Path, **options: object) -> StreamConfig:
    return StreamConfig(folder=str(folder), **{"rows": 10, "seconds": 1e-6, **options})  # type: ignore[arg-type]


def cutter_of(run: Path, config: StreamConfig) -> WindowCutter:
    return WindowCutter(WindowFolder(str(run)), config.open(), config, SCHEMA, True)


def cut(cutter: WindowCutter, number: int, polls: int = 3) -> StreamWindow | None:
    """Ask for a window some times, each time until the thread has answered."""
    for _ in range(polls):
        cutter.begin(number)
        while not cutter._task.done():  # type: ignore[union-attr]
            time.sleep(1e-4)
        window = cutter.window(number)
        if window is not None:
            return window
    return None


def amounts(run: Path, window: StreamWindow) -> list[int]:
    with ipc.open_file(Path(WindowFolder(str(run)).path, window.file)) as file:
        return [int(value) for value in file.read_all()["amount"].to_pylist()]
