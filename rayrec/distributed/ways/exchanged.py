"""Rows travel: every owner sends every rank the rows that it asked for, in one message.

This way takes every collection, and says what each kind of table puts into the message. How a
message is packed, sent and joined is in `rayrec.distributed.ways.message_leg`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from rayrec.comm.codec import Codecs
from rayrec.distributed.program.compile import Address, group_of
from rayrec.distributed.program.groups import CollectionSpec, GroupKey, LookupGroup, Slot
from rayrec.distributed.program.slots import SlotTable
from rayrec.distributed.ways import matrices, sequences
from rayrec.distributed.ways.message_leg import MessageLeg
from rayrec.distributed.ways.pooled import Pooled
from rayrec.distributed.ways.sequences import Sequences
from rayrec.distributed.ways.two_hop import TwoHop
from rayrec.distributed.ways.way import Leg, Way, World
from rayrec.layout import Layout, Replicated, ShardingPlan, takes_two_hops
from rayrec.layout.kinds import COMPACT_COLUMNS


class Exchanged(Way):
    """The messages between all ranks under one plan.

    Args:
        hops: the exchanges of the two hops, where any table of the plan takes them.
    """

    def __init__(
        self, plan: ShardingPlan, device: torch.device, codecs: Codecs, hops: TwoHop | None
    ) -> None:
        self._plan, self._device, self._codecs, self.hops = plan, device, codecs, hops

    @staticmethod
    def open(world: World, plan: ShardingPlan, before: Way | None) -> Exchanged:
        """Open the exchanges inside and between hosts, if the plan needs them."""
        hops = before.hops if isinstance(before, Exchanged) else None
        if hops is not None and hops.hosts != plan.hosts:
            hops = None
        layouts = (placement.layout for placement in plan.tables.values())
        if hops is None and any(takes_two_hops(layout, plan.hosts) for layout in layouts):
            hops = TwoHop.open(world.exchange, plan.hosts, world.options.codecs)
        return Exchanged(plan, world.device, world.options.codecs, hops)

    def takes(self, collection: int) -> bool:
        """Return True: every collection can be exchanged."""
        return True

    def address(self, spec: CollectionSpec, layout: Layout, granule: int) -> Address:
        """Cut ids by row blocks, and name the part of the messages that carries the rows."""
        if isinstance(layout, Replicated):
            return Address(sequences.REPLICAS if spec.sequence else matrices.REPLICAS, None)
        cuts = layout.row_cuts if layout.num_row_blocks > 1 else None
        if spec.sequence:
            return Address(sequences.SEQUENCE, cuts)
        if takes_two_hops(layout, self._plan.hosts):
            return Address(matrices.HOPS, cuts)
        # narrow blocks are not worth an index each
        if cuts is not None and granule >= COMPACT_COLUMNS:
            return Address(matrices.BLOCKS, cuts, leaves_out=True)
        return Address(matrices.POOLED, cuts)

    def arrange(self, key: GroupKey, slots: Sequence[Slot]) -> Iterable[LookupGroup]:
        """Make one group; for hops its order leaves blocks out, in which a host's ranks differ."""
        return [group_of(key, slots, by_block=key.carrier != matrices.HOPS)]

    def leg(self, slots: SlotTable, rank: int, collections: Sequence[int]) -> Leg:
        """Make the messages of a step, with a pooled part, a part of sequences, or both."""
        is_sequence = [c for c in collections if slots.collections[c].sequence]
        is_pooled = [c for c in collections if c not in is_sequence]
        pooled = sequence = None
        if is_pooled:
            pooled = Pooled(slots, rank, self._device, is_pooled, self.hops)
        if is_sequence:
            sequence = Sequences(slots, rank, is_sequence)
        return MessageLeg(slots, rank, collections, pooled, sequence, self._codecs)
