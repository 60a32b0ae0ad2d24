"""`IdMap`: 64-bit ids to places, by FBGEMM's hash map on the CPU.

The map is a tensor of (key, place) pairs. A key once put in stays until the map is built anew,
which happens when seven tenths of its slots are taken: in a full table FBGEMM would search for
ever. The key -1 marks a slot as empty, so -1 is no id. A thread that works in the map lets others
run.
"""

# N ids

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from rayrec.comm.pages import private_memory
from rayrec.sparse.ops import offsets_of

ABSENT = -1
_DROPPED = -2  # FBGEMM passes over a place of -1, so a dropped key keeps its slot with this one
_FULLEST = 0.7


def slots_of(most: int) -> int:
    """Return the slots of a map of at most so many ids, a power of two."""
    return 1 << max(4, (4 * most - 1).bit_length())


class IdMap:
    """A map of at most so many ids.

    Args:
        most: ids that it holds at most at a time.
    """

    def __init__(self, most: int) -> None:
        self._hold(_empty(slots_of(most)), 0)

    @classmethod
    def over(cls, table: Tensor) -> IdMap:
        """Return the map that lies in a (slots, 2) int64 tensor, in memory of somebody else."""
        found = cls.__new__(cls)
        found._hold(table, None)
        return found

    def _hold(self, table: Tensor, used: int | None) -> None:
        self._table, self._bounds = table, torch.tensor([0, table.shape[0]])
        self._taken = used  # slots that have a key; None before they were counted

    def clear(self) -> None:
        """Take all ids out."""
        self._table.fill_(-1)
        self._taken = 0

    def find(self, ids: Tensor) -> Tensor:
        """Return (N,) int64 places of (N,) int64 ids, `ABSENT` where there is none."""
        offsets = torch.tensor([0, ids.numel()])
        places = torch.ops.fbgemm.pruned_hashmap_lookup(ids, offsets, self._table, self._bounds)
        return places.clamp_(min=ABSENT)

    def put(self, ids: Tensor, places: Tensor) -> None:
        """Give (N,) ids their (N,) places; an id that has one loses it."""
        if not ids.numel():
            return
        used = int((self._table[:, 0] != -1).sum()) if self._taken is None else self._taken
        self._taken = used + ids.numel()
        if self._taken > _FULLEST * self._table.shape[0]:
            self._taken = self._rebuild() + ids.numel()
        self._insert(ids, places)

    def drop(self, ids: Tensor) -> None:
        """Take their places from (N,) ids that have one."""
        if ids.numel():
            self._insert(ids, torch.full_like(ids, _DROPPED))

    def _insert(self, ids: Tensor, places: Tensor) -> None:
        offsets = torch.tensor([0, ids.numel()])
        torch.ops.fbgemm.pruned_hashmap_insert(ids, places, offsets, self._table, self._bounds)

    def _rebuild(self) -> int:
        """Leave the slots of dropped ids free; returns the slots that are taken."""
        kept = self._table[self._table[:, 1] >= 0].clone()
        self._table.fill_(-1)
        if kept.shape[0]:
            self._insert(kept[:, 0].contiguous(), kept[:, 1].contiguous())
        return kept.shape[0]


class IdMaps:
    """Maps that lie side by side, so that one call finds the ids of all.

    Args:
        most: ids that each map holds at most at a time.
    Attributes:
        maps: the maps.
    """

    def __init__(self, most: Sequence[int]) -> None:
        bounds = offsets_of(slots_of(one) for one in most)
        self._table, self._bounds = _empty(bounds[-1]), torch.tensor(bounds)
        self.maps = [IdMap.over(self._table[start:stop]) for start, stop in pairwise(bounds)]

    def find(self, ids: Tensor, bounds: Sequence[int]) -> tuple[Tensor, bool]:
        """Return (N,) places of (N,) ids, each in its map, `ABSENT` where there is none; and True
        if all have one.

        Args:
            bounds: where the ids of each map begin, and N.
        """
        found = torch.ops.fbgemm.pruned_hashmap_lookup(
            ids, torch.tensor(bounds), self._table, self._bounds
        )
        # a pass over the places that writes none is the quicker one
        if not found.numel() or int(found.min()) > ABSENT:
            return found, True
        return found.clamp_(min=ABSENT), False


def _empty(slots: int) -> Tensor:
    # an id may be anywhere: with small pages the search for its page takes a third of the time
    return private_memory(16 * slots).view(torch.int64).view(slots, 2).fill_(-1)
