"""Rows of several files as one table, where columns may differ in order and width of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from rayrec.data.column_types import forgotten, is_forgotten
from rayrec.errors import InputError
from rayrec.storage import one_line

if TYPE_CHECKING:
    from rayrec.data.listing import DataFile
    from rayrec.data.order import SampleOrder
    from rayrec.data.rows import RowDataset


def joined(tables: Sequence[pa.Table]) -> pa.Table:
    """All rows, each column in a type that holds those of all tables.

    Raises:
        InputError: a column has types that do not join.
    """
    lost = {field.name for one in tables for field in one.schema if is_forgotten(field)}
    try:
        whole = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise InputError(
            f"columns differ in type between files: {one_line(error)}. Write all files with the "
            "same types."
        ) from error
    # joining keeps what the first table says of a column
    marked = [forgotten(one) if one.name in lost else one for one in whole.schema]
    return whole.cast(pa.schema(marked, whole.schema.metadata)) if lost else whole


def check_joins(data: RowDataset, order: SampleOrder, columns: Sequence[str]) -> None:
    """Check that files whose rows lie in one block can be joined, by their types alone.

    Args:
        order: in which the rows are read.
        columns: that are read beside those of the data.
    Raises:
        InputError: a column has types that do not join, or a file cannot be read.
    Cost: the schema of each file that shares a block is read.
    """
    if len(data.files) < 2:
        return
    names = list(dict.fromkeys([*data.columns, *columns]))
    chunks, opened = data.chunks(), dict[str, pa.Table]()

    def empty(file: DataFile) -> pa.Table:
        if file.path not in opened:
            types = data.open(file).schema
            opened[file.path] = pa.schema([types.field(name) for name in names]).empty_table()
        return opened[file.path]

    for stream in range(order.num_streams):
        for block in range(order.num_blocks(stream)):
            own = [chunks[part.chunk].file for part in order.block_chunks(stream, block)]
            files = {file.path: file for file in own}
            if len(files) > 1:
                joined([empty(file) for file in files.values()])
