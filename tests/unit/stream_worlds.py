"""A simulated source of a stream, whose rows are numbered and come when the test wants."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pyarrow as pa

from rayrec.layout.schema import FeatureSchema
from rayrec.streaming import Cursor, Lag, Polled

SCHEMA = FeatureSchema.from_json(
    """{"label": "label", "dense": [], "features": [{"name": "item", "column": "item"}], "tables": [
    {"name": "t", "num_embeddings": 100000, "embedding_dim": 4, "pooling": "sum",
     "features": ["item"]}]}"""
)


class Killed(BaseException):
    """The process was killed here."""


def rows_of(times: Sequence[int | None], first: int = 0) -> pa.Table:
    """Rows whose ids are their numbers, with their event times."""
    numbers = range(first, first + len(times))
    return pa.table(
        {
            "item": pa.array(numbers, pa.int64()),
            "label": pa.array([float(n % 2) for n in numbers], pa.float32()),
            "at": pa.array(times, pa.int64()),
        }
    )


class SimulatedStream:
    """Source whose answers are parts of a table, shorter than asked for or none where chance says.

    Args:
        chance: None always answers with all rows that there are.
    """

    name = "simulated"

    def __init__(self, rows: pa.Table, chance: random.Random | None = None) -> None:
        self.rows, self.there, self._chance = rows, rows.num_rows, chance
        self.kill_in: int | None = None
        self._last: tuple[int, int] = (-1, 0)

    def start(self) -> Cursor:
        return {"row": 0}

    def poll(self, cursor: Cursor, most_rows: int) -> Polled | None:
        if self.kill_in is not None:
            self.kill_in -= 1
            if self.kill_in < 0:
                raise Killed
        row = cursor["row"]
        count = min(most_rows, self.there - row)
        if self._chance is not None and row != self._last[0]:
            if self._chance.random() < 0.3:
                return None
            count = min(count, self._chance.randint(1, 40))
        if count <= 0:
            return None
        self._last = (row, count)
        return Polled(self.rows.slice(row, count), {"row": row + count}, float(row + count))

    def lag(self, cursor: Cursor) -> Lag:
        return Lag(self.there - cursor["row"], 0.0)

    def close(self) -> None:
        pass
