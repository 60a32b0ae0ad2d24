"""`RowRanges`: size and step of every row that a rank packs, which give the power of a table.

An export looks at all rows to find it. A delta has the touched rows only, so the numbers of the
others are kept: 8 bytes a row.

    # R rows of a shard
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rayrec.layout.geometry import Shard
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.quant import QuantType, TableRange
from rayrec.quant.tables import chunks
from rayrec.serve.live_rows import LiveRows

Extremes = dict[str, tuple[float, float]]


class Changed(NamedTuple):
    """Whole rows of one shard.

    Attributes:
        rows: (U,) int64 row numbers of the table.
        values: (U, width).
        keys: (U,) int64 ids that have the rows, of a dynamic table; else None.
    """

    shard: Shard
    rows: Tensor
    values: Tensor
    keys: Tensor | None


class RowRanges:
    """Size and step of every row that one rank packs, as `TableRange.ranges` measures them.

    Args:
        tables: tables of the model.
        types: type of every table's packed rows, by name.
    """

    def __init__(
        self, tables: Sequence[BaseEmbeddingConfig], types: Mapping[str, QuantType]
    ) -> None:
        self._tables = {table.name: table for table in tables}
        self._types = types
        # (R,) float32 sizes and (R,) float32 steps
        self._kept: dict[Shard, tuple[Tensor, Tensor]] = {}

    @property
    def shards(self) -> set[Shard]:
        """Shards whose rows were measured."""
        return set(self._kept)

    def measure(self, reader: LiveRows, shards: Sequence[Shard]) -> None:
        """Measure all rows of shards.

        Raises:
            InputError: a row cannot be packed; names table and row.
        """
        self._kept = {}
        for shard in shards:
            span = self._span(shard.table)
            parts = []
            for part in chunks(len(shard.rows), self._tables[shard.table].embedding_dim):
                rows = range(shard.rows.start + part.start, shard.rows.start + part.stop)
                parts.append(span.ranges(reader.read(shard.table, rows), rows))
            sizes, steps = (torch.cat(column) for column in zip(*parts, strict=True))
            self._kept[shard] = sizes, steps

    def update(self, changes: Sequence[Changed]) -> None:
        """Measure rows that have changed.

        Raises:
            InputError: a row cannot be packed; names table and row.
        """
        for shard, rows, values, _ in changes:
            measured = self._span(shard.table).ranges(values, rows)
            local = rows - shard.rows.start
            for kept, new in zip(self._kept[shard], measured, strict=True):
                kept[local] = new

    def extremes(self) -> Extremes:
        """Return the largest size and smallest step of the rows of this rank, by table."""
        spans: dict[str, TableRange] = {}
        for shard, (sizes, steps) in self._kept.items():
            spans.setdefault(shard.table, self._span(shard.table)).include(sizes, steps)
        return {name: (span.largest, span.smallest) for name, span in spans.items()}

    def powers(self, measured: Sequence[Extremes]) -> dict[str, int]:
        """Return the power of every table, from the extremes of all ranks."""
        powers = {}
        for name in self._tables:
            span = self._span(name)
            for largest, smallest in (one[name] for one in measured if name in one):
                span.largest = max(span.largest, largest)
                span.smallest = min(span.smallest, smallest)
            powers[name] = span.power()
        return powers

    def _span(self, table: str) -> TableRange:
        return TableRange(table, self._types[table])
