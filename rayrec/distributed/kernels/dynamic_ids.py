"""`DynamicIds`: the rows of the ids of one kernel, whose tables are dynamic.

The owner of a shard is given all ids of a step, from all ranks. Here they become rows, between
their arrival and the look-up.
"""

# N ids

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import accumulate, pairwise
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from rayrec.comm.pages import Allocate
from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.program.groups import LookupGroup
from rayrec.dynamic.clock import Dynamic
from rayrec.dynamic.rows import DynamicRows, rows_of
from rayrec.errors import ConfigError
from rayrec.shards.state import ShardState
from rayrec.shards.touched import RowStamps


class DynamicIds:
    """The ids of all shards of one kernel.

    Args:
        dynamic: tables of the shards.
        group: the shards and their slots.
        bases: of a sequence group, the row of its memory where each shard begins.
        states: rows and optimizer state of the shards.
        allocate: gives memory for what is known of every row.
    Attributes:
        of_shards: the ids of each shard.
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
        self.of_shards = [
            DynamicRows(table, dynamic.seed, state.shard, rows_of(state), allocate)
            for table, state in zip(dynamic.tables, states, strict=True)
        ]

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
        pairs = zip(self.of_shards, states, strict=True)
        twin.of_shards = [ids.copy(rows_of(state)) for ids, state in pairs]
        return twin

    def stamp_by(self, stamps: RowStamps) -> None:
        """Have rows stamped that get other ids."""
        for number, ids in enumerate(self.of_shards):
            ids.call_before(partial(stamps.touch_rows, number))

    def with_rows(self, routed: GroupIds) -> GroupIds:
        """Return the rows of ids; ids without one are left out of their bags.

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
        rows = torch.empty_like(routed.ids)
        of_shards = zip(self.of_shards, self._spans(routed), self._bases, strict=True)
        for ids, spans, base in of_shards:
            only = None if routed.read_only is None else _joined(routed.read_only, spans)
            found = self._rows_of(ids, _joined(routed.ids, spans), only)
            if base:
                found[found >= 0] += base
            for span, part in zip(spans, found.split([_size(s) for s in spans]), strict=True):
                rows[span] = part
        known = rows >= 0
        if bool(known.all()):
            return GroupIds(rows, routed.offsets, routed.weights)
        before = torch.zeros(rows.numel() + 1, dtype=torch.int64)
        torch.cumsum(known, 0, out=before[1:])
        weights = None if routed.weights is None else routed.weights[known]
        return GroupIds(rows[known], before[routed.offsets], weights)

    def wait_for_gradient(self, rows: Tensor) -> None:
        """Remember that a backward pass may come, for as long as something holds its graph."""

        def arrived(grad: Tensor) -> None:
            self._pending = _never

        rows.register_hook(arrived)
        self._pending = ref(arrived)

    def _rows_of(self, ids: DynamicRows, of_step: Tensor, read_only: Tensor | None) -> Tensor:
        """Return the rows of all ids of a step in one shard, or -1."""
        clock = self._clock
        if clock.trains:
            return ids.admit(of_step, clock.now, read_only)
        return ids.find(of_step, clock.now)

    def _spans(self, routed: GroupIds) -> list[list[slice]]:
        """Return per shard where the ids of its slots lie."""
        group = self._group
        if group.key.sequence:
            bounds = list(accumulate(routed.parts, initial=0))
            lanes: Sequence[int | None] = group.slot_shards * (
                len(routed.parts) // len(group.slots)
            )
        else:
            lanes = group.lanes
            bags = (routed.offsets.numel() - 1) // len(lanes)
            bounds = routed.offsets[::bags].tolist() if bags else [0] * (len(lanes) + 1)
        spans: list[list[slice]] = [[] for _ in self.of_shards]
        for shard, (start, stop) in zip(lanes, pairwise(bounds), strict=True):
            if shard is not None:
                spans[shard].append(slice(start, stop))
        return spans


def _never() -> None:
    """Stand for the backward pass of no look-up."""


def _size(span: slice) -> int:
    return int(span.stop - span.start)


def _joined(whole: Tensor, spans: Sequence[slice]) -> Tensor:
    if len(spans) == 1:
        return whole[spans[0]]
    return torch.cat([whole[span] for span in spans])
