"""`PackedIds`: whose the rows of a packed dynamic table are, and where the row of an id lies.

Both lie behind the rows of the table, in the same bytes: so they are sealed, shared by processes
and brought up to date as the rows are.

    # R rows of the table, N ids
"""

from __future__ import annotations

import torch
from torch import Tensor

from rayrec.dynamic.columns import NO_KEY
from rayrec.dynamic.id_map import IdMap, slots_of


def bytes_of_ids(rows: int) -> int:
    """Return the bytes of the keys and of the map of so many rows."""
    return 8 * rows + 16 * slots_of(rows)


class PackedIds:
    """The ids of one table.

    Args:
        data: (`bytes_of_ids`,) uint8.
        rows: R.
    Attributes:
        keys: (R,) int64, the id that has each row, or `NO_KEY`.
        unknown: how many ids were looked for, and had no row; whoever counts them sets it to 0.
    """

    def __init__(self, data: Tensor, rows: int) -> None:
        numbers = data.view(torch.int64)
        self.keys = numbers[:rows]
        self._map = IdMap.over(numbers[rows:].view(-1, 2))
        self.unknown = 0

    def find(self, ids: Tensor) -> Tensor:
        """Return (N,) int64 rows of (N,) int64 ids; R, which is a row of zeros, of unknown ones."""
        rows = self._map.find(ids)
        is_unknown = rows < 0
        self.unknown += int(is_unknown.sum())
        return rows.masked_fill_(is_unknown, len(self.keys))

    def known(self) -> int:
        """Return the number of ids that have a row."""
        return int((self.keys != NO_KEY).sum())

    def fill(self, keys: Tensor) -> bool:
        """Take (R,) keys in place of all; returns False if two rows have the same one."""
        self.keys.copy_(keys)
        self._map.clear()
        (rows,) = (keys != NO_KEY).nonzero(as_tuple=True)
        self._map.put(keys[rows], rows)
        return torch.equal(self._map.find(keys[rows]), rows)

    def write(self, rows: Tensor, keys: Tensor) -> None:
        """Give some different rows to other ids, or to none."""
        old = self.keys[rows]
        self._map.drop(old[old != NO_KEY])
        self.keys[rows] = keys
        known = keys != NO_KEY
        self._map.put(keys[known], rows[known])
