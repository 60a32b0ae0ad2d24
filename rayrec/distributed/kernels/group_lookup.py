"""A lookup group's kernel, pooled or sequence.

A sequence is pooled with unit lengths: all shards of a group have one width, so they are merged
into one table, every id is a bag of its own, and the rows come out in the order in which the ids
arrived, ready to be sent back. FBGEMM's unpooled CPU backward is about 20 times slower on the same
ids, and the merged table takes the kernel's fast path also where features share tables.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from rayrec.checkpoint import ShardState
from rayrec.comm.pages import make_huge, private_memory
from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.kernels.lookup import FusedLookup, make_lookup
from rayrec.distributed.kernels.table_space import TableSpace
from rayrec.distributed.kernels.workers import Workers
from rayrec.distributed.program.groups import LookupGroup, Slot
from rayrec.dynamic.clock import Dynamic, IdClock
from rayrec.dynamic.rows import DynamicRows, rows_of
from rayrec.errors import ConfigError
from rayrec.layout import Shard
from rayrec.optim import SparseOptimizer
from rayrec.shards.named_memory import MemoryPart
from rayrec.shards.touched import RowStamps, TouchClock
from rayrec.shards.undo_log import UndoLog
from rayrec.sparse.ops import offsets_of


class GroupLookup:
    """The shards of one `LookupGroup` of this rank.

    Args:
        group: slots and shards to look up; its key names optimizer, storage and element type.
        device: device of the rows and of the kernel.
        workers: threads that share the work on CPU; the calling thread alone when None.
        space: shared memory of the rows of a group that is read in place.
        clock: clock of the stamps of touched rows; None keeps none.
        memory: memory on the CPU of the rows, their state and the log of undo, besides those of
            `space`; None takes memory of this process, and nothing can be undone.
        dynamic: the tables of the group's shards, where they are dynamic; else None.
    Attributes:
        group, space: the arguments of these names.
        ids: ids of the rows of every shard, where the tables are dynamic; else nothing.
        stamps: time of the last update of each row, or None.
        undo: the rows as they were at a sync point, or None.
    """

    def __init__(
        self,
        group: LookupGroup,
        device: torch.device,
        workers: Workers | None = None,
        space: TableSpace | None = None,
        clock: TouchClock | None = None,
        memory: MemoryPart | None = None,
        dynamic: Dynamic | None = None,
    ) -> None:
        self.group, self.space = group, space
        self.ids: list[DynamicRows] = []
        self._id_clock = IdClock()
        # the hook of the last look-up that trains, while its backward pass may come
        self._pending: Callable[[], object] = _never
        self._bases = group.bases or tuple(
            offsets_of(len(shard.rows) for shard in group.shards)[:-1]
        )
        whole = group
        if group.key.sequence:
            rows = (
                sum(len(shard.rows) for shard in group.shards)
                if space is None
                else space.as_table(group.key.width).shape[0]
            )
            group = _merged(group, rows)
            space = None if space is None else space.as_one(group.shards[0])
        allocate = private_memory if memory is None else memory.next
        self.kernel = make_lookup(group, group.key.optimizer, device, workers, space, allocate)
        if dynamic is not None:
            placed = zip(dynamic.tables, self.kernel.shard_states(), strict=True)
            self.ids = [
                DynamicRows(table, dynamic.seed, shard, rows_of(state), allocate)
                for shard, (table, state) in zip(self.group.shards, placed, strict=True)
            ]
            self._id_clock = dynamic.clock
        self.undo: UndoLog | None = None
        if memory is not None and clock is not None:
            states = self.shard_states()
            for state in states:
                for tensor in state.tensors().values():
                    make_huge(tensor)
            self.undo = UndoLog(states, memory)
        self.stamps = (
            None if clock is None else _stamps(whole, self._bases, clock, device, self.undo)
        )
        self._stamp_changes()

    def _stamp_changes(self) -> None:
        """Have rows stamped that get other ids."""
        if self.stamps is not None:
            for number, ids in enumerate(self.ids):
                ids.call_before(partial(self.stamps.touch_rows, number))

    def __call__(self, routed: GroupIds) -> Tensor:
        """Pooled: (bags of all ranks, sum of slot widths); sequence: (ids of all ranks, width).
        float32; its backward updates the rows.
        """
        if self.ids:
            routed = self._with_rows(routed)
        rows = self.kernel(routed)
        if self.ids and rows.requires_grad:
            self._wait_for_backward(rows)
        if self.stamps is not None and rows.requires_grad:
            stamps = self.stamps
            # The kernel updates its rows right after this, in the same backward pass.
            rows.register_hook(lambda _: stamps.touch(routed.ids, routed.offsets))
        return rows

    def _with_rows(self, routed: GroupIds) -> GroupIds:
        """Return the rows of ids; ids without one are left out of their bags.

        Raises:
            ConfigError: rows of an earlier step still wait for their gradient.
        """
        if self._id_clock.trains and self._pending() is not None:
            raise ConfigError(
                f"table {self.ids[0].table.name!r} is dynamic, and was looked up again before the "
                "backward pass of its last look-up, whose rows may be another id's by then. Run "
                "backward or drop the output first; look-ups under torch.no_grad() or after eval() "
                "are free."
            )
        if len(self.ids) == 1:
            rows = self._rows_of(self.ids[0], routed.ids, routed.read_only)
        else:
            rows = torch.empty_like(routed.ids)
            for ids, own in zip(self.ids, self._spans(routed.offsets), strict=True):
                only = None if routed.read_only is None else _joined(routed.read_only, own)
                found = self._rows_of(ids, _joined(routed.ids, own), only)
                for span, part in zip(
                    own, found.split([s.stop - s.start for s in own]), strict=True
                ):
                    rows[span] = part
        known = rows >= 0
        if bool(known.all()):
            return GroupIds(rows, routed.offsets, routed.weights)
        before = torch.zeros(rows.numel() + 1, dtype=torch.int64)
        torch.cumsum(known, 0, out=before[1:])
        weights = None if routed.weights is None else routed.weights[known]
        return GroupIds(rows[known], before[routed.offsets], weights)

    def _rows_of(self, ids: DynamicRows, of_step: Tensor, read_only: Tensor | None) -> Tensor:
        """Return the rows of all ids of a step in one shard, or -1."""
        clock = self._id_clock
        if clock.trains:
            return ids.admit(of_step, clock.steps, read_only)
        return ids.find(of_step, clock.steps)

    def _spans(self, offsets: Tensor) -> list[list[slice]]:
        """Return per shard where the ids of its slots lie."""
        lanes = self.group.lanes
        bags = (offsets.numel() - 1) // len(lanes)
        bounds = offsets[::bags].tolist() if bags else [0] * (len(lanes) + 1)
        spans: list[list[slice]] = [[] for _ in self.ids]
        for shard, (start, stop) in zip(lanes, pairwise(bounds), strict=True):
            if shard is not None:
                spans[shard].append(slice(start, stop))
        return spans

    def _wait_for_backward(self, rows: Tensor) -> None:
        """Remember that a backward pass may come, for as long as something holds its graph."""

        def arrived(grad: Tensor) -> None:
            self._pending = _never

        rows.register_hook(arrived)
        self._pending = ref(arrived)

    def update_in_place(self, grad: Tensor, routed: GroupIds) -> None:
        """Update rows that every rank reads in place; `grad` is that of the collection's output,
        (rows of all ranks, D).
        """
        assert not isinstance(self.kernel, FusedLookup), "a GPU's rows are read by no other rank"
        if self.group.gradient is not None and self.group.gradient.gathered:
            grad = torch.cat(
                [grad[:, slot.column : slot.column + slot.width] for slot in self.group.slots], 1
            )
        if self.stamps is not None:
            self.stamps.touch(routed.ids, routed.offsets)
        self.kernel.update_in_place(grad, routed)

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupLookup:
        memo[id(self)] = twin = object.__new__(GroupLookup)
        own = self.__dict__ | {"ids": [], "_pending": _never}
        twin.__dict__.update(copy.deepcopy(own, memo))
        if self.ids:
            # ids know the rows into which they write first values
            states = twin.kernel.shard_states()
            twin.ids = [
                ids.copy(rows_of(state)) for ids, state in zip(self.ids, states, strict=True)
            ]
        twin._stamp_changes()
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        # a pickle would tear apart tensors that share memory: what a lookup reads and what its
        # update writes
        raise ConfigError(
            "a lookup kernel cannot be pickled, and neither can a sharded model or its fused "
            "optimizer. "
            "Save their state_dict(), or a checkpoint (rayrec.checkpoint.save_checkpoint); "
            "copy.deepcopy works."
        )

    @property
    def optimizer(self) -> SparseOptimizer:
        """The update that the backward pass applies."""
        return self.group.key.optimizer

    @property
    def iteration(self) -> int:
        """Updates so far, where the optimizer corrects its bias by it."""
        return self.kernel.iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        self.kernel.iteration = value

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the updates to come."""
        self.kernel.set_learning_rate(lr)

    def shard_states(self) -> list[ShardState]:
        """Return live views of the rows and optimizer state of every shard."""
        states = self.kernel.shard_states()
        if self.ids:
            return [
                ShardState(shard, state.weight, state.optimizer, ids.tensors())
                for shard, state, ids in zip(self.group.shards, states, self.ids, strict=True)
            ]
        if not self.group.key.sequence:
            return states
        (whole,) = states
        found = []
        for shard, base in zip(self.group.shards, self._bases, strict=True):
            rows = slice(base, base + len(shard.rows))
            found.append(
                ShardState(
                    shard,
                    whole.weight[rows],
                    {name: state[rows] for name, state in whole.optimizer.items()},
                )
            )
        return found


def _never() -> None:
    """Stand for the backward pass of no look-up."""


def _merged(group: LookupGroup, rows: int) -> LookupGroup:
    # All slots become one, over one shard with the rows of all: ids are rows of it already.
    name = "+".join(dict.fromkeys(shard.table for shard in group.shards))
    shard = Shard(name, range(rows), range(group.key.width), group.shards[0].rank)
    first = group.slots[0]
    slots = (Slot(first.use, shard, 0, first.piece),)
    return LookupGroup(group.key, (shard,), slots, gradient=group.gradient)


def _stamps(
    group: LookupGroup,
    bases: tuple[int, ...],
    clock: TouchClock,
    device: torch.device,
    undo: UndoLog | None,
) -> RowStamps:
    rows = sum(len(shard.rows) for shard in group.shards)
    if device.type == "cpu":
        # stamps are read at random places as rows are: small pages would cost most of the time
        stamps = private_memory(4 * rows).view(torch.int32)
    else:
        stamps = torch.zeros(rows, dtype=torch.int32, device=device)
    if group.key.sequence:
        return RowStamps(group.shards, clock, stamps, bases=bases, undo=undo)
    return RowStamps(group.shards, clock, stamps, group.lanes, undo=undo)


def _joined(whole: Tensor, spans: Sequence[slice]) -> Tensor:
    if len(spans) == 1:
        return whole[spans[0]]
    return torch.cat([whole[span] for span in spans])
