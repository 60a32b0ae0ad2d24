"""`DynamicIds`: the rows of the ids of one kernel, whose tables are dynamic.

The owner of a shard is given all ids of a step, from all ranks. Here they become rows, between
their arrival and the look-up.
"""

# N ids

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from rayrec.comm.pages import Allocate
from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.program.groups import LookupGroup
from rayrec.dynamic.clock import Dynamic
from rayrec.dynamic.fused_rows import FusedRows
from rayrec.dynamic.id_map import ABSENT
from rayrec.dynamic.rows import DynamicRows, rows_of
from rayrec.errors import ConfigError
from rayrec.shards.state import ShardState
from rayrec.shards.touched import RowStamps
from rayrec.sparse.ops import complete_cumsum, offsets_of


class DynamicIds:
    """The ids of all shards of one kernel.

    Args:
        dynamic: tables of the shards.
        group: the shards and their slots.
        bases: of a sequence group, the row of its memory where each shard begins.
        states: rows and optimizer state of the shards.
        allocate: gives memory for what is known of every row.
    """

    def __init__(
        self,
        dynamic: Dynamic,
        group: LookupGroup,
        bases: Sequence[int],
        states: Sequence[ShardState],
        allocate: Allocate,
    ) -> None:
        self._group, self._clock = group, dynamic.clock
        # pooled rows are local to their shards
        self._bases = tuple(bases) if group.key.sequence else (0,) * len(states)
        # the hook of the last look-up that trains, while its backward pass may come
        self._pending: Callable[[], object] = _never
        shards, begins = [state.shard for state in states], [rows_of(state) for state in states]
        self._rows = FusedRows(dynamic.tables, dynamic.seed, shards, begins, allocate)

    def copy(self, states: Sequence[ShardState], memo: dict[int, Any]) -> DynamicIds:
        """Return the ids of a copy of the kernel.

        Args:
            states: rows and optimizer state of the copy.
            memo: of `copy.deepcopy`, which copies the model; it has one clock, too.
        """
        twin = DynamicIds.__new__(DynamicIds)
        twin._group, twin._clock = self._group, deepcopy(self._clock, memo)
        twin._bases, twin._pending = self._bases, _never
        # ids know the rows into which they write first values
        twin._rows = self._rows.copy([rows_of(state) for state in states])
        return twin

    @property
    def of_shards(self) -> list[DynamicRows]:
        """The ids of each shard."""
        return self._rows.of_shards

    def stamp_by(self, stamps: RowStamps) -> None:
        """Have rows stamped that get other ids."""
        for number, ids in enumerate(self.of_shards):
            ids.call_before(partial(stamps.touch_rows, number))

    def find(self, routed: GroupIds) -> tuple[Tensor, GroupIds]:
        """Give the ids of a step their rows.

        Returns:
            (N,) rows within their shards, shard by shard, -1 for ids without one; and what a kernel
            reads, where these ids are left out of their bags.
        Raises:
            ConfigError: rows of an earlier step still wait for their gradient.
        """
        if self._clock.trains and self._pending() is not None:
            raise ConfigError(
                f"table {self.of_shards[0].table.name!r} is dynamic, and was looked up again "
                "before the backward pass of its last look-up, whose rows may be another id's by "
                "then. Run backward or drop the output first; look-ups under torch.no_grad() or "
                "after eval() are free."
            )
        if not self._group.key.sequence:
            # bags lie slot by slot, and slots shard by shard
            rows = self._find(routed.ids, self._bounds(routed.parts), routed.lags)
            return rows, without_absent(GroupIds(rows, routed.offsets, routed.weights))
        of_shards = self._places(routed)
        places = [at for of_shard in of_shards for at in of_shard]
        sizes = [size_of(at) for at in places]
        starts = offsets_of(sizes)
        bounds = [starts[i] for i in offsets_of(len(of_shard) for of_shard in of_shards)]
        lags = None if routed.lags is None else _joined(routed.lags, places)
        rows = self._find(_joined(routed.ids, places), bounds, lags)
        ids = _put(self._in_memory(rows, bounds), places, sizes)
        return rows, without_absent(GroupIds(ids, routed.offsets, routed.weights))

    def _in_memory(self, rows: Tensor, bounds: Sequence[int]) -> Tensor:
        """Return rows of the memory of all shards for (N,) rows, shard by shard."""
        if not any(self._bases):
            return rows
        shifted = rows.clone()
        for base, (start, stop) in zip(self._bases, pairwise(bounds), strict=True):
            shifted[start:stop] += base
        return shifted if _is_complete(rows) else shifted.where(rows != ABSENT, ABSENT)

    def wait_for_gradient(self, rows: Tensor) -> None:
        """Remember that a backward pass may come, for as long as something holds its graph."""

        def arrived(grad: Tensor) -> None:
            self._pending = _never

        rows.register_hook(arrived)
        self._pending = ref(arrived)

    def _find(self, ids: Tensor, bounds: Sequence[int], lags: Tensor | None) -> Tensor:
        """Return the rows of all ids of a step, shard by shard, or -1."""
        clock = self._clock
        if clock.trains:
            return self._rows.admit(ids, bounds, clock.now, lags)
        return self._rows.find(ids, bounds, clock.now)

    def _bounds(self, sizes: Sequence[int]) -> list[int]:
        """Return where the pooled ids of each shard begin, and N."""
        starts, slots = offsets_of(sizes), self._group.slot_shards
        sources = len(sizes) // len(slots)
        firsts = [slots.index(shard) * sources for shard in range(len(self.of_shards))]
        return [*(starts[first] for first in firsts), starts[-1]]

    def _places(self, routed: GroupIds) -> Sequence[Sequence[slice | Tensor]]:
        """Return per shard where its ids of sequences are."""
        group = self._group
        if routed.places:
            of_shards: list[list[slice | Tensor]] = [[] for _ in self.of_shards]
            for number, of_slot in zip(group.slot_shards, routed.places, strict=True):
                of_shards[number] += of_slot
            return of_shards
        lanes = group.slot_shards * (len(routed.parts) // len(group.slots))
        places: list[list[slice]] = [[] for _ in self.of_shards]
        for shard, (start, stop) in zip(lanes, pairwise(offsets_of(routed.parts)), strict=True):
            places[shard].append(slice(start, stop))
        return places


def without_absent(routed: GroupIds) -> GroupIds:
    """Return the same bags without the rows that are `ABSENT`."""
    if _is_complete(routed.ids):
        return routed
    known = routed.ids != ABSENT
    before = complete_cumsum(known.long())
    weights = None if routed.weights is None else routed.weights[known]
    return GroupIds(routed.ids[known], before[routed.offsets], weights)


def _never() -> None:
    """Stand for the backward pass of no look-up."""


def _is_complete(rows: Tensor) -> bool:
    """Return True if no row is `ABSENT`."""
    return not rows.numel() or int(rows.min()) != ABSENT


def _joined(whole: Tensor, places: Sequence[slice | Tensor]) -> Tensor:
    return torch.cat([whole[at] for at in places])


def _put(joined: Tensor, places: Sequence[slice | Tensor], sizes: Sequence[int]) -> Tensor:
    """Return what `_joined` joined."""
    parts = joined.split(list(sizes))
    starts = [at.start for at in places if isinstance(at, slice)]
    if len(starts) == len(places):
        order = sorted(range(len(starts)), key=starts.__getitem__)
        return torch.cat([parts[i] for i in order])
    whole = torch.empty_like(joined)
    for at, part in zip(places, parts, strict=True):
        whole[at] = part
    return whole


def size_of(at: slice | Tensor) -> int:
    """Return the number of ids at a place."""
    return at.numel() if isinstance(at, Tensor) else int(at.stop - at.start)
