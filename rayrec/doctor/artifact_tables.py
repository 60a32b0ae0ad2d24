"""Numbers of the tables of an artifact, read a megabyte at a time.

An artifact holds packed rows and ids, and nothing of how they were trained.
"""

from __future__ import annotations

from pathlib import Path

import torch

from rayrec.doctor.checkpoint_tables import health_of
from rayrec.doctor.measure import TableMeasure
from rayrec.doctor.table_health import TableHealth
from rayrec.quant import unpack_rows
from rayrec.quant.tables import CHUNK_BYTES
from rayrec.serve.manifest import Manifest, StoredTable
from rayrec.serve.stored import read_keys, read_stored, read_table
from rayrec.shards.state import IDS, WEIGHT

_NO_STATE = "an artifact holds no optimizer state, no counts and no seed; examine its checkpoint"


def artifact_tables(folder: str, manifest: Manifest) -> list[TableHealth]:
    """Return the numbers of all tables of an artifact, whose other files are checked, too.

    Raises:
        ArtifactError: a file is missing or damaged.
    """
    for file in manifest.other_files():
        read_stored(Path(folder), file)
    return [_examined(Path(folder), table) for table in manifest.tables]


def _examined(folder: Path, table: StoredTable) -> TableHealth:
    keys = None if table.ids is None else read_keys(folder, table.ids, table.rows)
    measure, packed = TableMeasure(), table.packed
    step = max(1, CHUNK_BYTES // (4 * table.width))
    held, first = bytearray(), 0

    def put(piece: memoryview, place: int) -> None:
        nonlocal first
        held.extend(piece)
        count = len(held) // packed.row_bytes
        if count < step and place + len(piece) < packed.num_bytes:
            return
        data = torch.frombuffer(held[: count * packed.row_bytes], dtype=torch.uint8)
        values = unpack_rows(data.view(count, -1), table.type, table.width, table.power)
        rows = range(first, first + count)
        ids = {} if keys is None else {IDS: keys[rows.start : rows.stop]}
        measure.add(rows, {WEIGHT: values, **ids})
        first = rows.stop
        del held[: count * packed.row_bytes]

    read_table(folder, table, put)
    kinds = "dead rows", "first values", "hottest ids", "stale ids", "refused ids"
    why = dict.fromkeys((*kinds, "eviction regret", "collisions"), _NO_STATE)
    shape = table.rows, table.width
    return health_of(measure, table.name, shape, table.type.name, not_told=why)
