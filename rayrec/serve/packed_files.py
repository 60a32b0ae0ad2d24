"""Packs the tables of a checkpoint into files, chunk by chunk, and keeps the rows of a sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rayrec.checkpoint import TableReader
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.quant import PackedTable, QuantType, TableRange, pack_rows
from rayrec.quant.tables import chunks
from rayrec.serve.manifest import StoredTable
from rayrec.serve.sampled import SampledRows
from rayrec.serve.table_file import table_path, write_table


def measured(
    reader: TableReader, tables: Iterable[BaseEmbeddingConfig], types: Mapping[str, QuantType]
) -> list[PackedTable]:
    """Read every row of every table, and return the packing of each table.

    Raises:
        InputError: a row cannot be packed; names table and row.
        CheckpointError: the checkpoint cannot be read, or is damaged.
    """
    packed = []
    for table in tables:
        rows, width, kind = table.num_embeddings, table.embedding_dim, types[table.name]
        span = TableRange(table.name, kind)
        for part in chunks(rows, width):
            span.add(reader.read(table.name, range(part.start, part.stop)), part.start)
        packed.append(PackedTable(table.name, rows, width, kind, span.power()))
    return packed


def write_packed(
    reader: TableReader, folder: Path, tables: Iterable[PackedTable], wanted: Mapping[str, Tensor]
) -> tuple[list[StoredTable], dict[str, SampledRows]]:
    """Write the file of every table.

    Args:
        wanted: table -> (n,) ids, ascending, whose float32 rows are kept on the way.
    Returns:
        the written tables, and the kept rows by table.
    Raises:
        OSError: the file system refuses.
        CheckpointError: the checkpoint cannot be read, or is damaged.
    """
    stored, kept = [], {}
    for number, table in enumerate(tables):
        ids = wanted[table.name]
        values = torch.empty(len(ids), table.width)
        parts = _packed_parts(reader, table, ids, values)
        stored.append(write_table(folder, table_path(table.name, number), table, parts))
        kept[table.name] = SampledRows(ids, values)
    return stored, kept


def _packed_parts(
    reader: TableReader, table: PackedTable, ids: Tensor, values: Tensor
) -> Iterator[Tensor]:
    """Yield the packed chunks of a table, and copy the wanted rows among them to `values`."""
    for part in chunks(table.rows, table.width):
        rows = reader.read(table.name, range(part.start, part.stop))
        first, last = torch.searchsorted(ids, torch.tensor([part.start, part.stop])).tolist()
        values[first:last] = rows[ids[first:last] - part.start]
        yield pack_rows(rows, table.kind, table.power)
