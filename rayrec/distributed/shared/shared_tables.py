"""Which collections are read in place, and where their tables lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rayrec.comm.exchange import Exchange
from rayrec.distributed.kernels.group_lookup import GroupLookup
from rayrec.distributed.kernels.table_space import TableSpace
from rayrec.distributed.kernels.workers import Workers
from rayrec.distributed.program.compile import uses_of
from rayrec.distributed.program.groups import CollectionSpec, GroupKey, LookupGroup
from rayrec.distributed.program.slots import SlotTable
from rayrec.distributed.shared.home_lookup import Home, HomeLookup, HomeSequence
from rayrec.distributed.shared.in_place import InPlaceStep, SharedGradients
from rayrec.distributed.steps.route import RoutedIds
from rayrec.layout import ShardingPlan, takes_two_hops
from rayrec.observe.timer import StepTimer
from rayrec.optim import SparseOptimizer


def can_read_in_place(
    spec: CollectionSpec, plan: ShardingPlan, optimizers: Mapping[str, SparseOptimizer]
) -> bool:
    """Whether ranks that share memory read the tables of a collection where they lie.

    Their rows have one type, no sequence's gradient is clipped, and the plan is for one host.
    """
    if len({table.data_type for table in spec.tables}) > 1:
        return False
    if spec.sequence:
        return all(optimizers[table.name].max_gradient is None for table in spec.tables)
    return not any(
        takes_two_hops(plan.tables[table.name].layout, plan.hosts) for table in spec.tables
    )


@dataclass(frozen=True)
class SharedTables:
    """The collections that are read in place under one plan.

    Attributes:
        spaces: collection -> where its tables lie.
        homes: collection -> how this rank reads them.
    """

    spaces: dict[int, TableSpace] = field(default_factory=dict)
    homes: dict[int, Home] = field(default_factory=dict)
    gradients: SharedGradients = field(default_factory=SharedGradients)

    def laid_out(
        self,
        specs: Sequence[CollectionSpec],
        plan: ShardingPlan,
        optimizers: Mapping[str, SparseOptimizer],
        exchange: Exchange,
        workers: Workers,
    ) -> SharedTables:
        """The same for another plan, with new memory for collections whose layouts change; all
        ranks call it together.
        """
        spaces: dict[int, TableSpace] = {}
        homes: dict[int, Home] = {}
        for c, spec in enumerate(specs):
            if not can_read_in_place(spec, plan, optimizers):
                continue
            layouts = {table.name: plan.tables[table.name].layout for table in spec.tables}
            space = self.spaces.get(c)
            if space is None or space.layouts != layouts:
                space = TableSpace.of(spec.tables, layouts, exchange)
            if space is not None:
                home = HomeSequence if spec.sequence else HomeLookup
                spaces[c], homes[c] = (
                    space,
                    home(spec, uses_of(c, spec.tables), space, exchange.rank, workers),
                )
        return SharedTables(spaces, homes, self.gradients)

    def space_of(self, group: LookupGroup) -> TableSpace | None:
        """Where the rows of a group lie, if it is read in place."""
        return self.spaces[group.key.collection] if group.key.in_place else None

    def step(
        self,
        slots: SlotTable,
        lookups: Mapping[GroupKey, GroupLookup],
        keys: tuple[str, ...],
        routed: RoutedIds,
        bags: Mapping[str, int],
        exchange: Exchange,
        timer: StepTimer | None,
    ) -> InPlaceStep:
        """A step whose ids have been routed: all ranks have updated the rows of the one before, and
        read its gradients.
        """
        self.gradients.free = True
        homes = {c: self.homes[c] for c in slots.collections if c in slots.in_place}
        updates = [lookups[group.key] for group in slots.ranks[exchange.rank].in_place]
        return InPlaceStep(
            slots, homes, updates, keys, routed, bags, exchange, self.gradients, timer
        )
