"""A lookup group's kernel, pooled or sequence.

A sequence is pooled with unit lengths: all shards of a group have one width, so they are merged
into one table, every id is a bag of its own, and the rows come out in the order in which the ids
arrived, ready to be sent back. FBGEMM's unpooled CPU backward is about 20 times slower on the same
ids, and the merged table takes the kernel's fast path also where features share tables.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from rayrec.checkpoint import ShardState
from rayrec.comm.pages import make_huge, private_memory
from rayrec.distributed.kernels.dynamic_ids import DynamicIds
from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.kernels.lookup import FusedLookup, make_lookup
from rayrec.distributed.kernels.table_space import TableSpace
from rayrec.distributed.kernels.workers import Workers
from rayrec.distributed.program.groups import LookupGroup, Slot
from rayrec.dynamic.clock import Dynamic
from rayrec.errors import ConfigError
from rayrec.layout import Shard
from rayrec.layout.tables import refuse_dynamic
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
        ids: ids of the rows, where the tables are dynamic; else None.
        stamps: time of the last update of each row, or None.
        undo: the rows as they were at a sync point, or None.
        base_rate: what a schedule multiplies to make the learning rate; None without one.
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
        if dynamic is not None and device.type != "cpu" and group.key.storage.kind != "device":
            why = f"has storage {group.key.storage.label!r}, where its first values would be lost"
            refuse_dynamic(dynamic.tables, f"{why}; keep its rows in the GPU's memory")
        self.group, self.space = group, space
        self.base_rate: float | None = None
        self.ids: DynamicIds | None = None
        self._bases = group.bases or tuple(
            offsets_of(len(shard.rows) for shard in group.shards)[:-1]
        )
        if group.key.sequence:
            if space is None:
                group = _merged(group, sum(len(shard.rows) for shard in group.shards))
            else:
                group = _merged(group, space.as_table(group.key.width).shape[0])
                space = space.as_one(group.shards[0])
        allocate = private_memory if memory is None else memory.next
        self.kernel = make_lookup(group, device, workers, space, allocate)
        if dynamic is not None:
            parts = dynamic, self.group, self._bases, self._own_states()
            self.ids = DynamicIds(*parts, allocate)
        self.undo: UndoLog | None = None
        if memory is not None and clock is not None:
            states = self.shard_states()
            for state in states:
                for tensor in state.tensors().values():
                    make_huge(tensor)
            self.undo = UndoLog(states, memory)
        self.stamps: RowStamps | None = None
        if clock is not None:
            self.stamps = _stamps(self.group, self._bases, clock, device, self.undo)
        if self.ids is not None and self.stamps is not None:
            self.ids.stamp_by(self.stamps)

    def __call__(self, routed: GroupIds) -> Tensor:
        """Pooled: (bags of all ranks, sum of slot widths); sequence: (ids of all ranks, width).
        float32; its backward updates the rows.
        """
        if self.ids is not None:
            _, routed = self.ids.find(routed)
        rows = self.kernel(routed)
        if self.ids is not None and rows.requires_grad:
            self.ids.wait_for_gradient(rows)
        if self.stamps is not None and rows.requires_grad:
            stamps = self.stamps
            # The kernel updates its rows right after this, in the same backward pass.
            rows.register_hook(lambda _: stamps.touch(routed.ids, routed.offsets))
        return rows

    def update_in_place(self, grad: Tensor, routed: GroupIds) -> None:
        """Update rows that every rank reads in place; `grad` is that of the collection's output,
        (rows of all ranks, D).
        """
        assert not isinstance(self.kernel, FusedLookup), "a GPU's rows are read by no other rank"
        if self.group.gradient.gathered:
            grad = torch.cat(
                [grad[:, slot.column : slot.column + slot.width] for slot in self.group.slots], 1
            )
        if self.stamps is not None:
            self.stamps.touch(routed.ids, routed.offsets)
        self.kernel.update_in_place(grad, routed)

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupLookup:
        memo[id(self)] = twin = object.__new__(GroupLookup)
        twin.__dict__.update(copy.deepcopy(self.__dict__ | {"ids": None}, memo))
        if self.ids is not None:
            twin.ids = self.ids.copy(twin._own_states(), memo)
            if twin.stamps is not None:
                twin.ids.stamp_by(twin.stamps)
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

    @property
    def learning_rate(self) -> float:
        """The learning rate of the updates to come."""
        return self.kernel.learning_rate

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the updates to come."""
        self.kernel.set_learning_rate(lr)

    def shard_states(self) -> list[ShardState]:
        """Return live views of the rows, their ids and their optimizer state of every shard."""
        states = self._own_states()
        if self.ids is None:
            return states
        return [
            ShardState(state.shard, state.weight, state.optimizer, ids.tensors())
            for state, ids in zip(states, self.ids.of_shards, strict=True)
        ]

    def _own_states(self) -> list[ShardState]:
        """Return the rows and optimizer state of every shard."""
        states = self.kernel.shard_states()
        if not self.group.key.sequence:
            return states
        (whole,) = states
        found = []
        for shard, base in zip(self.group.shards, self._bases, strict=True):
            rows = slice(base, base + len(shard.rows))
            optimizer = {name: state[rows] for name, state in whole.optimizer.items()}
            found.append(ShardState(shard, whole.weight[rows], optimizer))
        return found


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
