"""Tables in memory that all ranks share are read in place; only gradients travel, once.

Every rank looks up its own batch in all tables of a collection by one kernel, whoever owns them,
straight into the output. In the backward pass it writes the gradient of that output, scaled, into
memory that all ranks read. After one wait every owner updates its rows from there, with the ids
that it was sent in the input exchange. So all plans cost the same at home, and a bag's sum is that
of the unsharded table, whatever cuts its rows. A step waits twice: for ids, when all have updated
the rows of the step before, and for gradients, when all have read those of this one.

This way is for CPU ranks of one host; see `EngineOptions.share_tables`.
"""

# B rows of the home batch, D columns of a collection

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rayrec.comm.codec import Codecs
from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.kernels.table_space import TableSpace
from rayrec.distributed.program.compile import Address, group_of, uses_of
from rayrec.distributed.program.groups import (
    CollectionSpec,
    GradientColumns,
    GroupKey,
    LookupGroup,
    Slot,
    Use,
)
from rayrec.distributed.program.slots import Sizes, SlotTable, by_collection
from rayrec.distributed.steps.unpack import Arrived, pooled_ids
from rayrec.distributed.ways.home import Home, HomeLookup, HomeSequence, Wanted, fill
from rayrec.distributed.ways.in_place_groups import (
    SharedGradients,
    ascending_chains,
    columns_of,
    sequence_ids_in_place,
)
from rayrec.distributed.ways.in_place_rows import OwnedRows
from rayrec.distributed.ways.way import Joined, Leg, Step, Way, World
from rayrec.layout import Layout, ShardingPlan, TableLayout, takes_two_hops
from rayrec.observe.timer import span

CARRIER = "in_place"


def can_read_in_place(spec: CollectionSpec, plan: ShardingPlan, world: World) -> bool:
    """Return whether ranks that share memory read the tables of a collection where they lie.

    Their rows must have one type, since they lie in one memory; no gradient of a sequence may be
    clipped; no table of a pooled collection may take two hops, which only several hosts do; and
    ids of dynamic tables may have no weights, whose gradients would need the rows of unknown ids.
    """
    if len({table.data_type for table in spec.tables}) > 1:
        return False
    if spec.weighted and any(table.dynamic is not None for table in spec.tables):
        return False
    if spec.sequence:
        return all(world.optimizers[table.name].max_gradient is None for table in spec.tables)
    layouts = (plan.tables[table.name].layout for table in spec.tables)
    return not any(takes_two_hops(layout, plan.hosts) for layout in layouts)


class InPlace(Way):
    """The collections that are read in place under one plan.

    Args:
        spaces: collection -> where its tables lie.
        homes: collection -> how this rank reads them.
    """

    def __init__(
        self, spaces: dict[int, TableSpace], homes: dict[int, Home], gradients: SharedGradients
    ) -> None:
        self._spaces, self._homes, self._gradients = spaces, homes, gradients

    @staticmethod
    def open(world: World, plan: ShardingPlan, before: Way | None) -> InPlace | None:
        """Lay tables out in shared memory; collections whose layouts stay keep their memory."""
        coded = world.options.codecs != Codecs()
        # A codec speaks of rows on the wire, which these rows never cross.
        if not world.options.share_tables or world.device.type != "cpu" or coded:
            return None
        # Replicas swap ids and gradients around a kernel's own passes, which this way leaves out.
        if world.has_replicas:
            return None
        before = before if isinstance(before, InPlace) else None
        spaces: dict[int, TableSpace] = {}
        homes: dict[int, Home] = {}
        for c, spec in enumerate(world.specs):
            if not can_read_in_place(spec, plan, world):
                continue
            layouts = {table.name: plan.tables[table.name].layout for table in spec.tables}
            space = None if before is None else before._spaces.get(c)
            if space is None or space.layouts != layouts:
                space = TableSpace.of(spec.tables, layouts, world.exchange, world.part())
            if space is not None:
                kind = HomeSequence if spec.sequence else HomeLookup
                uses = uses_of(c, spec.tables)
                spaces[c] = space
                homes[c] = kind(spec, uses, space, world.exchange.rank, world.workers)
        gradients = SharedGradients() if before is None else before._gradients
        return InPlace(spaces, homes, gradients)

    def takes(self, collection: int) -> bool:
        """Return True if the rows of a collection lie in memory that all ranks share."""
        return collection in self._spaces

    def space_of(self, collection: int) -> TableSpace | None:
        """Return the shared memory of a collection's rows."""
        return self._spaces[collection]

    def address(self, spec: CollectionSpec, layout: Layout, granule: int) -> Address:
        """Cut pooled ids by row blocks. Owners of sequences pick their ids and know their homes."""
        if isinstance(layout, TableLayout) and layout.num_row_blocks > 1 and not spec.sequence:
            return Address(CARRIER, layout.row_cuts)
        return Address(CARRIER, None)

    def header(self, spec: CollectionSpec, uses: Sequence[Use]) -> tuple[str | None, ...]:
        """Ask for the rows of the gradients that a rank will hand over."""
        return tuple(use.feature for use in uses) if spec.sequence else (None,)

    def arrange(self, key: GroupKey, slots: Sequence[Slot]) -> Iterable[LookupGroup]:
        """Make groups whose kernels read gradients in place, where their slots' columns ascend."""
        if key.sequence:
            return self._arrange_sequence(key, slots)
        gathered, chains = ascending_chains(key, slots)
        groups = [
            group_of(replace(key, part=i), chain, by_block=False, gradient=columns_of(chain))
            for i, chain in enumerate(chains)
        ]
        if gathered:
            gradient = GradientColumns(gathered=True)
            last = replace(key, part=len(chains))
            groups.append(group_of(last, gathered, by_block=False, gradient=gradient))
        return groups

    def _arrange_sequence(self, key: GroupKey, slots: Sequence[Slot]) -> list[LookupGroup]:
        """Make one group per column block, whose ids are rows of the whole memory."""
        space = self._spaces[key.collection]
        blocks: dict[int, list[Slot]] = {}
        for slot in slots:
            blocks.setdefault(slot.shard.cols.start, []).append(slot)
        groups = []
        for first, of_block in blocks.items():
            bases = {slot.shard: space.starts[slot.shard] // key.width for slot in of_block}
            gradient, part = GradientColumns(first), replace(key, part=first)
            groups.append(group_of(part, of_block, False, bases, gradient))
        return groups

    def leg(self, slots: SlotTable, rank: int, collections: Sequence[int]) -> Leg:
        """Make the leg that reads the tables in place."""
        homes = {c: self._homes[c] for c in collections}
        groups = [one.carried_by([CARRIER], collections) for one in slots.ranks]
        layouts = {c: self._spaces[c].layouts for c in collections}
        owned = OwnedRows(slots, rank, groups, layouts)
        return _InPlaceLeg(slots, rank, homes, self._gradients, owned)


class _InPlaceLeg(Leg):
    """One step of the collections that are read in place."""

    def __init__(
        self,
        slots: SlotTable,
        rank: int,
        homes: Mapping[int, Home],
        gradients: SharedGradients,
        owned: OwnedRows,
    ) -> None:
        self.collections = tuple(homes)
        self._slots, self._homes, self._gradients, self._owned = slots, homes, gradients, owned
        self._pieces = slots.ranks[rank].pieces
        self._groups = slots.ranks[rank].carried_by([CARRIER], self.collections)

    def unpack(
        self, got: Sequence[Sizes], arrived: Sequence[Arrived]
    ) -> Mapping[GroupKey, GroupIds]:
        """Sort ids into as many bags as the rows of gradients that every rank will hand over."""
        ids = {}
        for group in self._groups:
            # Bags are as many as the rows of the gradients that every rank will hand over.
            extents = self._slots.extents[group.key.collection]
            if group.key.sequence:
                counts = [s.extents[extents] for s in got]
                ids[group.key] = sequence_ids_in_place(group, self._pieces, counts, arrived)
            else:
                rows = [sizes.extents[extents.start] for sizes in got]
                ids[group.key] = pooled_ids(group, rows, arrived)
        return ids

    def run(self, step: Step) -> tuple[Tensor, ...]:
        """Look up and join, once all ranks have updated the rows of the step before."""
        if step.ahead:
            with span(step.timer, "input"):
                # All have updated the rows of the step before. Where ids were routed in this step,
                # the ranks have said so by sending them.
                step.exchange.meet()
        self._gradients.free = True
        if self._owned.collections:
            with span(step.timer, "input"):
                groups, rows = self._owned.find(step)
            step = replace(step, routed=replace(step.routed, groups=groups), rows=rows)
        weights = () if step.weights is None else (step.weights,)
        outputs: tuple[Tensor, ...] = Joined.apply(self, step, step.anchor, *weights)
        if self._owned.collections and outputs[0].requires_grad:
            for group in self._groups:
                ids = step.lookups[group.key].ids
                if ids is not None:
                    ids.wait_for_gradient(outputs[0])
        return outputs

    def join(self, step: Step, inputs: Sequence[Tensor]) -> tuple[list[Tensor], dict[int, Wanted]]:
        """Look up this rank's batch in place; `inputs` are the weights, if they are learned."""
        outputs: list[Tensor] = []
        wanted = {}
        for collection, home in self._homes.items():
            with span(step.timer, "input"):
                wanted[collection] = home.wanted(
                    step.routed.source, step.send.keys, step.rows.get(collection, ())
                )
            with span(step.timer, "lookup"):
                outputs += home.look_up(wanted[collection], step.bags)
        return outputs, wanted

    def reverse(
        self, step: Step, grads: Sequence[Tensor], kept: dict[int, Wanted]
    ) -> list[Tensor | None]:
        """Hand over the gradients of this rank's outputs, and update its rows."""
        mine = by_collection(grads, self._slots.outputs(self.collections, bool(step.bags)))
        of_weights: list[Tensor | None] = []
        with span(step.timer, "gradient"):
            if step.weights is not None:  # before any row changes
                total = torch.zeros_like(step.weights)
                for c, home in self._homes.items():
                    if isinstance(home, HomeLookup) and home.weighted:
                        source, keys = step.routed.source, step.send.keys
                        home.grad_of_weights(mine[c], kept[c], source, keys, total)
                of_weights.append(total)
            whole = self._hand_over(step, mine)
        with span(step.timer, "update"):
            for group in self._groups:
                key = group.key
                step.lookups[key].update_in_place(whole[key.collection], step.routed.groups[key])
        # Other ranks may still read what this rank has handed over.
        self._gradients.free = False
        return of_weights

    def _hand_over(self, step: Step, mine: Mapping[int, Sequence[Tensor]]) -> dict[int, Tensor]:
        """Return per collection the gradients of all ranks, divided by their number.

        The ranks wait for each other here, once in the backward pass.
        """
        exchange, most_bags = step.exchange, step.routed.source.most_bags
        rows, shapes = {}, []
        for c, home in self._homes.items():
            extents = self._slots.extents[c]
            rows[c] = [sum(sizes.extents[extents]) for sizes in step.routed.got]
            shapes.append((sum(rows[c]), home.width))
        if exchange.world_size == 1:
            alone = {}
            for (c, home), shape in zip(self._homes.items(), shapes, strict=True):
                alone[c] = _alone(home, mine[c], shape, most_bags)
            return alone
        # No forward pass came between, in which ranks would have met after the last backward.
        if not self._gradients.free:
            exchange.meet()
        whole = dict(zip(self._homes, self._gradients.matrices(shapes, exchange), strict=True))
        for c, home in self._homes.items():
            first = sum(rows[c][: exchange.rank])
            own = whole[c][first : first + rows[c][exchange.rank]]
            fill(own, home.joined(mine[c], most_bags), 1.0 / exchange.world_size)
        exchange.meet()
        return whole


def _alone(home: Home, grads: Sequence[Tensor], shape: tuple[int, int], most_bags: int) -> Tensor:
    if len(grads) == 1 and grads[0].shape == shape:
        return grads[0].contiguous()
    whole = grads[0].new_empty(shape)
    fill(whole, home.joined(grads, most_bags), 1.0)
    return whole
