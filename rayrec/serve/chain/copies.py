"""`TableCopies`: the tables of a follower, in memory that forked processes share.

There are two copies. One is read by whoever scores; the other is brought up to date, and then they
change places. So a batch is scored by the rows of one version. With one copy, rows are written
where they are read: that takes half the memory, and a batch may meet rows of two versions while a
delta is applied.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rayrec.quant import PackedTable, PackedTables
from rayrec.quant.ids import PackedIds
from rayrec.quant.tables import laid_out
from rayrec.serve.chain.row_files import ChangedRows


class TableCopies:
    """Packed tables in shared memory, in one or two copies.

    Args:
        tables: tables to copy; not kept.
        count: number of copies, 1 or 2.
    Attributes:
        active: number of the copy that holds the newest version.
        data: the bytes of every copy, (bytes,) uint8.
    """

    def __init__(self, tables: PackedTables, count: int) -> None:
        self._tables, num_bytes = laid_out(tables.tables)
        self.data = [_shared(num_bytes) for _ in range(count)]
        self.active = 0
        # tables and rows of which the resting copy lacks the newest values; None where all of them
        self._all: list[tuple[int, Tensor]] | None = None if count > 1 else []
        self._lacks = self._all
        # ids of every copy, by table: they know how full their maps are
        self._ids: list[list[PackedIds | None]] = [[] for _ in range(count)]
        self._fill(0, tables)

    @property
    def resting(self) -> int:
        """Number of the copy that is written next."""
        return (self.active + 1) % len(self.data)

    def load(self, tables: PackedTables) -> None:
        """Take the rows of all tables, of the same sizes and types, as a new version."""
        self._lacks = self._all  # before a row is written
        self._fill(self.resting, tables)
        self.active = self.resting

    def apply(self, changes: Sequence[ChangedRows]) -> None:
        """Take some rows as a new version; they were checked before."""
        into, newest = self.tables(self.resting), self.tables(self.active)
        lacks, self._lacks = self._lacks, self._all  # until all is written
        if lacks is None:
            self.data[self.resting].copy_(self.data[self.active])
            self._look_at_ids(self.resting)
        ids = self._ids[self.resting]
        for number, rows in lacks or ():
            _write(into.rows_of(number), rows, newest.rows_of(number), rows)
            if (own := ids[number]) is not None and (of := newest.ids_of(number)) is not None:
                own.write(rows, of.keys[rows])
        for number, rows, packed, keys in changes:
            _write(into.rows_of(number), rows, packed)
            if (own := ids[number]) is not None and keys is not None:
                own.write(rows, keys)
        self.active = self.resting
        # values of this version will be taken from the copy that has them
        self._lacks = [(one.number, one.rows) for one in changes] if len(self.data) > 1 else []

    def _fill(self, copy: int, tables: PackedTables) -> None:
        into = self.tables(copy)
        for number in range(len(tables.tables)):
            into.whole_of(number).copy_(tables.whole_of(number))
        self._look_at_ids(copy)

    def _look_at_ids(self, copy: int) -> None:
        """Take the ids of a copy, all of whose bytes were written, as they lie there now."""
        tables = self.tables(copy)
        self._ids[copy] = [tables.ids_of(number) for number in range(len(self._tables))]

    def tables(self, copy: int, powers: Iterable[int] | None = None) -> PackedTables:
        """Return the tables of one copy, with the powers by which their rows are packed."""
        tables: tuple[PackedTable, ...] = self._tables
        if powers is not None:
            pairs = zip(tables, powers, strict=True)
            tables = tuple(replace(table, power=power) for table, power in pairs)
        return PackedTables(tables, self.data[copy])


def _write(into: Tensor, rows: Tensor, values: Tensor, of: Tensor | None = None) -> None:
    """into[rows] = values, or values[of]; numpy moves whole rows, torch single bytes."""
    if not len(rows):
        return
    kind = np.dtype((np.void, into.shape[1]))
    target = into.numpy().view(kind)[:, 0]
    source = values.contiguous().numpy().view(kind)[:, 0]
    target[rows.numpy()] = source if of is None else source[of.numpy()]


def _shared(num_bytes: int) -> Tensor:
    """Zeros in memory that processes forked from this one share."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8))
