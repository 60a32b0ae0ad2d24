"""Rows of sequences, one per id: they return slot by slot in the order in which ids were sent.

At home they are put at the positions of their ids, and column blocks are put side by side. A
replicated table's rows are taken from this rank's own look-up; its gradient goes to every replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.program.groups import GroupKey, LookupGroup, Slot, Use
from rayrec.distributed.program.slots import Sizes, SlotTable
from rayrec.distributed.steps.unpack import Arrived, sequence_ids
from rayrec.distributed.ways.message_part import MessagePart, Rows, stack
from rayrec.distributed.ways.way import Step

# Carriers of sequences; see `Address.carrier`.
SEQUENCE = "sequence"
REPLICAS = "sequence/replicas"  # tables that every rank has


class _Came(NamedTuple):
    """The rows of one slot that came home, (ids, width)."""

    slot: Slot
    owner: int
    rows: Tensor


class Sequences(MessagePart):
    """The sequences of some collections; see the module."""

    def __init__(self, slots: SlotTable, rank: int, collections: Sequence[int]) -> None:
        self.collections = tuple(collections)
        self._slots, self._rank = slots, rank
        self._sharded = [
            of_rank.carried_by([SEQUENCE], self.collections) for of_rank in slots.ranks
        ]
        self._replicas = [
            of_rank.carried_by([REPLICAS], self.collections) for of_rank in slots.ranks
        ]
        self.groups = (*self._sharded[rank], *self._replicas[rank])

    def unpack(self, got: Sequence[Sizes], arrived: Sequence[Arrived]) -> dict[GroupKey, GroupIds]:
        """Sort the ids of each group, every id a bag of its own."""
        return {group.key: sequence_ids(group, arrived) for group in self.groups}

    # forward

    def rows_out(self, owner: int, sizes: Sizes) -> int:
        """Return the number of values of an owner's sharded rows, one row per id."""
        return _values(self._sharded[owner], sizes)

    def pack(self, rows: Rows, got: Sequence[Sizes]) -> list[list[Tensor]]:
        """Cut the rows of each group by home rank."""
        messages: list[list[Tensor]] = [[] for _ in got]
        for group in self._sharded[self._rank]:
            # (ids of all home ranks, width), home rank by home rank
            parts = rows[group.key].split([_ids(group, sizes) for sizes in got])
            for message, part in zip(messages, parts, strict=True):
                message.append(part.reshape(-1))
        return messages

    def join(
        self, step: Step, received: Sequence[Tensor], rows: Rows
    ) -> tuple[dict[int, list[Tensor]], None]:
        """Scatter the rows to the places where their ids stood, use by use."""
        came: dict[tuple[int, int], list[_Came]] = {}

        def sort(owner: int, groups: Sequence[LookupGroup], sizes: Sizes, values: Tensor) -> None:
            for slot, part in _by_slot(groups, sizes, values):
                use = slot.use.collection, slot.use.index
                came.setdefault(use, []).append(_Came(slot, owner, part))

        for owner, (sizes, values) in enumerate(zip(step.routed.sent, received, strict=True)):
            sort(owner, self._sharded[owner], sizes, values)
        rank, own = self._rank, step.routed.sent[self._rank]
        for group in self._replicas[rank]:
            before = sum(_ids(group, sizes) for sizes in step.routed.got[:rank])
            mine = rows[group.key][before : before + _ids(group, own)]
            sort(rank, [group], own, mine.reshape(-1))
        outputs = {}
        for collection in self.collections:
            outputs[collection] = [
                self._join(step, use, came[collection, use.index])
                for use in self._slots.uses[collection]
            ]
        return outputs, None

    def _join(self, step: Step, use: Use, came: Sequence[_Came]) -> Tensor:
        """Return (ids of its feature, width) of one use."""
        key, bounds = step.send.keys.index(use.feature), step.routed.source.kjt_offsets
        output = None
        for slot, owner, rows in came:
            home = _home_of(step, owner, slot)
            # An uncut use has one owner, which returns the rows in the order of the ids.
            if home is None and slot.width == use.width:
                # the exchange only lends what it brings
                return rows if owner == self._rank else rows.clone()
            if output is None:
                output = rows.new_empty(bounds[key + 1] - bounds[key], use.width)
            columns = output[:, slot.shard.cols.start : slot.shard.cols.stop]
            if home is None:
                columns.copy_(rows)
            else:
                columns[home - bounds[key]] = rows
        assert output is not None, "a use has slots"
        return output

    # backward

    def grads_out(self, owner: int, sizes: Sizes) -> tuple[int, int]:
        """Count the values of rows that one rank has, and of rows that all ranks have."""
        return _values(self._sharded[owner], sizes), _values(self._replicas[owner], sizes)

    def lone_matrix(self, got: Sequence[Sizes]) -> tuple[list[int], int] | None:
        """Return the size of the gradients if there is only one group."""
        if len(self.groups) != 1:
            return None
        (group,) = self.groups
        return [_ids(group, sizes) for sizes in got], group.key.width

    def pack_back(
        self,
        step: Step,
        grads: Mapping[int, Sequence[Tensor]],
        buffers: Sequence[Tensor],
        scale: float,
        kept: None,
    ) -> None:
        """Write the gradients slot by slot, in the order in which the ids were sent."""
        bounds, keys = step.routed.source.kjt_offsets, step.send.keys
        for owner, (sizes, buffer) in enumerate(zip(step.routed.sent, buffers, strict=True)):
            groups = (*self._sharded[owner], *self._replicas[owner])
            for slot, into in _by_slot(groups, sizes, buffer):
                of_use = grads[slot.use.collection][slot.use.index]
                grad = of_use[:, slot.shard.cols.start : slot.shard.cols.stop]
                home = _home_of(step, owner, slot)
                if home is not None:
                    grad = grad[home - bounds[keys.index(slot.use.feature)]]
                torch.mul(grad, scale, out=into)

    def split(
        self, messages: Sequence[Tensor], got: Sequence[Sizes], scale: float, into: Tensor | None
    ) -> dict[GroupKey, Tensor]:
        """Stack the gradients of each group, home rank by home rank."""
        # [home rank][group]
        cut = [
            message.split([_values([group], sizes) for group in self.groups])
            for message, sizes in zip(messages, got, strict=True)
        ]
        return {
            group.key: stack([of_rank[i] for of_rank in cut], group.key.width, scale, into)
            for i, group in enumerate(self.groups)
        }


def _ids(group: LookupGroup, sizes: Sizes) -> int:
    """Return the ids of one message that a group looks up."""
    return sum(sizes.ids[slot.piece] for slot in group.slots)


def _by_slot(
    groups: Sequence[LookupGroup], sizes: Sizes, values: Tensor
) -> Iterator[tuple[Slot, Tensor]]:
    """Yield each slot of some groups with its part of a flat message, (ids of its piece, width)."""
    slots = [slot for group in groups for slot in group.slots]
    parts = values.split([sizes.ids[slot.piece] * slot.width for slot in slots])
    return ((slot, part.view(-1, slot.width)) for slot, part in zip(slots, parts, strict=True))


def _values(groups: Sequence[LookupGroup], sizes: Sizes) -> int:
    """Return the values of all rows of one message."""
    return sum(_ids(group, sizes) * group.key.width for group in groups)


def _home_of(step: Step, owner: int, slot: Slot) -> Tensor | None:
    """Return the positions in the KJT of the ids that were sent for a slot.

    None stands for all ids of the feature, in order.
    """
    part, ids = step.routed.source.place_of(step.send.messages[owner].rows[slot.piece])
    return None if part.origin is None else part.origin[ids]
