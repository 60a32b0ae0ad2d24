"""`LiveRows`: the rows of a checkpoint as servers know them.

A row of a dynamic table that belongs to no id, or to one whose time is over, is a row of zeros
that belongs to no id. So an artifact does not depend on what such a row was before.

    # R rows of a table, N ids
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rayrec.checkpoint import Manifest, TableReader
from rayrec.dynamic.clock import NO_TIME, Instant
from rayrec.dynamic.columns import NO_KEY
from rayrec.dynamic.known import known_keys
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.shards.state import IDS, SEEN, TIME


class LiveRows:
    """Reads rows of the tables of one checkpoint.

    Args:
        path, manifest: the checkpoint.
        tables: tables of the model.
        clocks: instant of each dynamic table, by which its ids grow old.
    Attributes:
        keys: (R,) int64 of each dynamic table: the id that has the row, or `NO_KEY`.
    Raises:
        DamagedCheckpointError: a file is missing or damaged.
    """

    def __init__(
        self,
        path: str,
        manifest: Manifest,
        tables: Iterable[BaseEmbeddingConfig],
        clocks: Mapping[str, Instant],
    ) -> None:
        self._reader = TableReader(path, manifest)
        self.keys: dict[str, Tensor] = {}
        for table in tables:
            if table.dynamic is not None:
                now = clocks.get(table.name, Instant())
                names = [IDS, SEEN] if now.time == NO_TIME else [IDS, SEEN, TIME]
                key, seen, *time = self._reader.read_whole(table.name, names)
                times = time[0] if time else torch.full_like(key, NO_TIME)
                self.keys[table.name] = known_keys(table, key, seen, times, now)

    def read(self, table: str, rows: range) -> Tensor:
        """Read some rows of a table, (len(rows), D) float32; see `TableReader.read`."""
        values = self._reader.read(table, rows)
        if table in self.keys:
            values[self.keys[table][rows.start : rows.stop] == NO_KEY] = 0.0
        return values

    def rows_of(self, table: str, ids: Tensor) -> Tensor:
        """Return (N,) int64 rows of (N,) different ids, ascending; -1 of ids without a row."""
        if table not in self.keys:
            return ids
        keys, rows = self.keys[table], torch.full_like(ids, -1)
        if len(ids):
            places = torch.searchsorted(ids, keys).clamp_(max=len(ids) - 1)
            (found,) = (ids[places] == keys).nonzero(as_tuple=True)
            rows[places[found]] = found
        return rows
