"""Tables in memory that all ranks share: where every rank finds the rows of every shard.

A column block of a table lies there in one piece, whoever owns which of its row blocks, so that a
lookup of any row is that of an uncut table. A replicated table is there once per rank. Only its
owner writes a row, and is the first to touch its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from torch import Tensor

from rayrec.comm.exchange import Exchange
from rayrec.comm.pages import make_huge
from rayrec.layout import BaseEmbeddingConfig, Layout, Shard, TableLayout
from rayrec.modules import torch_dtype
from rayrec.shards.named_memory import Memory

_ALIGNMENT = 32  # values of a cache line or two


@dataclass(frozen=True)
class TableSpace:
    """The tables of one collection.

    Attributes:
        layouts: layout of each table.
        rows: rows of all tables, flat, in the tables' type.
        starts: place in `rows` of the first value of every shard of every rank.
    """

    layouts: Mapping[str, Layout]
    rows: Tensor
    starts: Mapping[Shard, int]

    @staticmethod
    def of(
        tables: Sequence[BaseEmbeddingConfig],
        layouts: Mapping[str, Layout],
        exchange: Exchange,
        memory: Memory | None = None,
    ) -> TableSpace | None:
        """Lay tables out in shared memory; None where the ranks share no memory.

        The rows are zeros, or what an earlier process left in `memory`.

        All ranks call it together.

        Args:
            tables: tables of one element type.
            layouts: layout of each table; it may cut columns into blocks, those into row blocks.
            memory: this rank's memory; that of rank 0 holds the rows.
        """
        starts: dict[Shard, int] = {}
        used = 0
        for table in tables:
            layout = layouts[table.name]
            blocks: dict[tuple[int, int], int] = {}  # (replica, first column) -> first value
            for shard in layout.shards(table.name):
                width = len(shard.cols)
                replica = -1 if isinstance(layout, TableLayout) else shard.rank
                block = (replica, shard.cols.start)
                if block not in blocks:
                    # At a multiple of its width, so that a row number alone tells where a row is.
                    blocks[block] = _round_up(used, lcm(width, _ALIGNMENT))
                    used = blocks[block] + table.num_embeddings * width
                starts[shard] = blocks[block] + shard.rows.start * width
        dtype = torch_dtype(tables[0])
        shared = exchange.share(dtype.itemsize * _round_up(used, _ALIGNMENT), memory)
        if shared is None:
            return None
        space = TableSpace(
            {table.name: layouts[table.name] for table in tables}, shared.view(dtype), starts
        )
        for shard in starts:
            if shard.rank == exchange.rank and exchange.world_size > 1:
                make_huge(space.rows_of(shard))
        return space

    def as_table(self, width: int) -> Tensor:
        """Return all memory as (rows, width), in which shards of that width begin with a row."""
        return self.rows[: self.rows.numel() // width * width].view(-1, width)

    def as_one(self, shard: Shard) -> TableSpace:
        """Return the same memory as one shard, which has all rows of its width."""
        return TableSpace({}, self.as_table(shard.shape[1]).view(-1), {shard: 0})

    def rows_of(self, shard: Shard) -> Tensor:
        """Return (rows, columns) of one shard, a view."""
        start = self.starts[shard]
        return self.rows[start : start + shard.shape[0] * shard.shape[1]].view(shard.shape)

    def column_blocks(self, table: str, rank: int) -> list[tuple[int, int]]:
        """First value and width of each column block of a table, in order, as `rank` reads them."""
        layout = self.layouts[table]
        shards = [
            s
            for s in layout.shards(table)
            if s.rows.start == 0 and (isinstance(layout, TableLayout) or s.rank == rank)
        ]
        return [(self.starts[s], len(s.cols)) for s in sorted(shards, key=lambda s: s.cols.start)]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
