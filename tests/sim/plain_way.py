"""A small way, as an example: pooled rows in a plain exchange of their own, without codecs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.program.compile import Address
from rayrec.distributed.program.groups import CollectionSpec, GroupKey
from rayrec.distributed.program.slots import Sizes, SlotTable
from rayrec.distributed.steps.unpack import Arrived
from rayrec.distributed.ways.matrices import POOLED
from rayrec.distributed.ways.pooled import Pooled
from rayrec.distributed.ways.way import Joined, Leg, Step, Way, World
from rayrec.layout import Layout, ShardingPlan, TableLayout


class Plain(Way):
    """Takes pooled collections whose tables are not cut by rows."""

    def __init__(self, world: World, plan: ShardingPlan, before: Way | None) -> None:
        self._specs, self._plan = world.specs, plan

    def takes(self, collection: int) -> bool:
        spec = self._specs[collection]
        layouts = [self._plan.tables[table.name].layout for table in spec.tables]
        uncut = (isinstance(one, TableLayout) and one.num_row_blocks == 1 for one in layouts)
        return not spec.sequence and all(uncut)

    def address(self, spec: CollectionSpec, layout: Layout, granule: int) -> Address:
        return Address(POOLED, cuts=None)

    def leg(self, slots: SlotTable, rank: int, collections: Sequence[int]) -> Leg:
        return PlainLeg(Pooled(slots, rank, torch.device("cpu"), collections, None), rank)


class PlainLeg(Leg):
    def __init__(self, part: Pooled, rank: int) -> None:
        self.collections, self._part, self._rank = part.collections, part, rank

    def unpack(
        self, got: Sequence[Sizes], arrived: Sequence[Arrived]
    ) -> Mapping[GroupKey, GroupIds]:
        return self._part.unpack(got, arrived)

    def run(self, step: Step) -> tuple[Tensor, ...]:
        keys = [group.key for group in self._part.groups]
        rows = [step.look_up(key, step.routed.groups[key]) for key in keys]
        return Joined.apply(self, step, step.anchor, *rows)

    def join(self, step: Step, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        rows = {group.key: r for group, r in zip(self._part.groups, inputs, strict=True)}
        messages = self._part.pack(rows, step.routed.got)
        flat = torch.cat([torch.cat(parts) for parts in messages if parts] or [torch.empty(0)])
        owned, home = self._counts(step)
        came = step.exchange.all_to_all(flat, owned, home).wait().split(home)
        outputs, kept = self._part.join(step, came, rows)
        return [output for c in self.collections for output in outputs[c]], kept

    def reverse(self, step: Step, grads: Sequence[Tensor], kept: Any) -> list[Tensor]:
        owned, home = self._counts(step)
        flat = grads[0].new_empty(sum(home))
        by_collection = {c: [grad] for c, grad in zip(self.collections, grads, strict=True)}
        self._part.pack_back(step, by_collection, flat.split(home), 1 / len(home), kept)
        came = step.exchange.all_to_all(flat, home, owned).wait().split(owned)
        back = self._part.split(came, step.routed.got, 1.0, None)
        return [back[group.key] for group in self._part.groups]

    def _counts(self, step: Step) -> tuple[list[int], list[int]]:
        """Return the values that this rank owns for each rank, and that come home from each."""
        owned = [self._part.rows_out(self._rank, sizes) for sizes in step.routed.got]
        home = [self._part.rows_out(owner, sizes) for owner, sizes in enumerate(step.routed.sent)]
        return owned, home
