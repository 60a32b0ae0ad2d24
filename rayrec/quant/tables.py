"""`PackedTables`: the packed rows of all tables in one stretch of bytes.

FBGEMM's lookup takes the rows of all tables as one tensor of bytes and the place of each table in
it. It derives the number of rows of a table from where the next one begins, so tables lie in the
order in which they are looked up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from rayrec.layout.tables import BaseEmbeddingConfig, refuse_dynamic
from rayrec.quant.ids import PackedIds, bytes_of_ids
from rayrec.quant.packing import TableRange, pack_rows, unpack_rows
from rayrec.quant.types import QuantType

ALIGNMENT = 64
CHUNK_BYTES = 32 << 20  # of float32 rows that are packed at a time


@dataclass(frozen=True, slots=True)
class PackedTable:
    """One table among the packed ones.

    Attributes:
        name: name of the table.
        rows, width: its size.
        kind: storage type of a row.
        power: rows were multiplied by 2**power before they were packed.
        start: byte at which its first row begins.
        has_ids: it is dynamic. A row of zeros, for unknown ids, and the ids follow its rows.
    """

    name: str
    rows: int
    width: int
    kind: QuantType
    power: int = 0
    start: int = 0
    has_ids: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.kind.row_bytes(self.width)

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes

    @property
    def ids(self) -> slice:
        """Bytes of its ids."""
        start = self.start + _aligned(self.num_bytes + self.row_bytes * self.has_ids)
        return slice(start, start + (bytes_of_ids(self.rows) if self.has_ids else 0))


@dataclass(frozen=True, slots=True, eq=False)
class PackedTables:
    """Tables in the order of their bytes, and the bytes.

    Attributes:
        tables: ascending by `start`.
        data: (bytes,) uint8 on the CPU; may be read-only.
    """

    tables: tuple[PackedTable, ...]
    data: Tensor

    def rows_of(self, number: int) -> Tensor:
        """(rows, row_bytes) uint8 of one table, as a view."""
        table = self.tables[number]
        whole = self.data[table.start : table.start + table.num_bytes]
        return whole.view(table.rows, table.row_bytes)

    def ids_of(self, number: int) -> PackedIds | None:
        """The ids of one table, as a view; None of a table that is not dynamic."""
        table = self.tables[number]
        return PackedIds(self.data[table.ids], table.rows) if table.has_ids else None

    def whole_of(self, number: int) -> Tensor:
        """(bytes,) uint8 of the rows and ids of one table, as a view."""
        table = self.tables[number]
        return self.data[table.start : table.ids.stop]

    def found(self, number: int, ids: Tensor) -> Tensor:
        """The float32 values that some ids are looked up as in one table: (N, width)."""
        table, own = self.tables[number], self.ids_of(number)
        places = ids if own is None else own.find(ids)
        rows = self.rows_of(number)[places.clamp(max=table.rows - 1)]
        values = unpack_rows(rows, table.kind, table.width, table.power)
        values[places == table.rows] = 0.0
        return values

    def unpacked(self, number: int, rows: slice = slice(None)) -> Tensor:
        """The float32 values of some rows of one table: (rows, width)."""
        table = self.tables[number]
        return unpack_rows(self.rows_of(number)[rows], table.kind, table.width, table.power)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def laid_out(tables: Sequence[PackedTable]) -> tuple[tuple[PackedTable, ...], int]:
    """The tables one after another, and the bytes that they take together."""
    placed, end = [], 0
    for table in tables:
        placed.append(replace(table, start=end))
        end = _aligned(placed[-1].ids.stop)
    return tuple(placed), end


def chunks(rows: int, width: int) -> Iterator[slice]:
    """The rows of a table in parts of some 32 MB of float32."""
    step = max(1, CHUNK_BYTES // (4 * width))
    for start, stop in pairwise([*range(0, rows, step), rows]):
        yield slice(start, stop)


@torch.no_grad()
def pack_tables(
    configs: Sequence[BaseEmbeddingConfig],
    weights: Sequence[Tensor],
    types: Mapping[str, QuantType],
) -> PackedTables:
    """Pack whole tables that lie in memory.

    Args:
        weights: (rows, width) of each table, any float type and device.
        types: storage type of every table, by its name.
    Raises:
        ConfigError: a table is dynamic.
        InputError: a row cannot be packed; names table and row.
    """
    refuse_dynamic(configs, "a module does not know its ids; export a checkpoint, which does")
    measured = []
    for config, weight in zip(configs, weights, strict=True):
        kind = types[config.name]
        span = TableRange(config.name, kind)
        for part in chunks(*weight.shape):
            span.add(weight[part].detach().cpu(), part.start)
        rows, width = weight.shape
        measured.append(PackedTable(config.name, rows, width, kind, span.power()))
    tables, num_bytes = laid_out(measured)
    packed = PackedTables(tables, torch.zeros(num_bytes, dtype=torch.uint8))
    for number, (table, weight) in enumerate(zip(tables, weights, strict=True)):
        into = packed.rows_of(number)
        for part in chunks(table.rows, table.width):
            into[part] = pack_rows(weight[part].detach().cpu(), table.kind, table.power)
    return packed
