"""Free rows of dynamic tables, which belong to no id: files do not hold them.

A row of a file is one whose place an id has, or a candidate. Where only a candidate has it, the
lists of the row's values are empty. Row numbers are kept, since they are the places of ids, which
are the same on any number of ranks; so a restored table is the one that was saved, and the values
of its free rows are zeros.
"""

# C rows of a part of a shard, L of them in use

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rayrec.checkpoint.entries import ROW, FileEntry
from rayrec.dynamic.columns import NO_KEY
from rayrec.dynamic.kinds import KINDS
from rayrec.errors import DamagedCheckpointError
from rayrec.shards.state import IDS, is_key

# how the names of columns begin that are of places, not values of rows
_OF_PLACES = tuple(f"{kind}_" for kind in KINDS)


def in_use(chunk: Mapping[str, Tensor], first: int) -> dict[str, Tensor]:
    """Return the (L,) rows of a part of a shard that are not free, with their numbers.

    Args:
        chunk: (C,) or (C, cols) by column name.
        first: number of the first row.
    """
    used = torch.stack([chunk[key] != NO_KEY for key in chunk if is_key(key)]).any(0)
    (rows,) = used.nonzero(as_tuple=True)
    if len(rows) < len(used):
        chunk = {name: column[rows] for name, column in chunk.items()}
    # of lists, those of rows that belong to no id are not written
    plain = {name: column for name, column in chunk.items() if column.dim() == 1}
    return {ROW: rows + first, **chunk, **blank_free(plain)}


def blank_free(chunk: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return some rows with zeros as the values of those that belong to no id."""
    is_free = chunk[IDS] == NO_KEY
    if not bool(is_free.any()):
        return chunk
    blank = dict(chunk)
    for name, values in chunk.items():
        if name != ROW and not name.startswith(_OF_PLACES):
            here = is_free.to(values.device)  # rows may be a GPU's, whose ids are the host's
            blank[name] = values.masked_fill(here if values.dim() == 1 else here[:, None], 0)
    return blank


def with_free(
    data: Mapping[str, Tensor], entry: FileEntry, index: int, where: str
) -> dict[str, Tensor]:
    """Return all (C,) rows of a record batch that holds those in use.

    Args:
        data: its columns; those of lists have only the rows that belong to ids.
        index: number of the record batch.
    Raises:
        DamagedCheckpointError: the row numbers, or the lists, are not those of its rows.
    """
    within = entry.batch_range(index)
    rows, has_id = data[ROW] - within.start, data[IDS] != NO_KEY
    whole = {name: column for name, column in data.items() if name != ROW}
    lists = {column.name for column in entry.columns if column.width}
    number = int(has_id.sum())
    is_right = bool((rows.diff() > 0).all()) and all(len(data[name]) == number for name in lists)
    if not is_right or (len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < len(within)):
        raise DamagedCheckpointError(
            f"{where}/{entry.path} has other rows in batch {index} than its manifest says. Restore "
            "an earlier checkpoint."
        )
    if number == len(within):
        return whole
    for name, column in whole.items():
        free = NO_KEY if is_key(name) else 0
        whole[name] = column.new_full((len(within), *column.shape[1:]), free)
        whole[name][rows[has_id] if name in lists else rows] = column
    return whole
