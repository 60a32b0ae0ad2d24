"""Everything that follows from a plan on one rank: ways, kernels, and programs of collections."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rayrec.distributed import ways
from rayrec.distributed.kernels.group_lookup import GroupLookup
from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.program.compile import compile_slots
from rayrec.distributed.program.groups import GroupKey
from rayrec.distributed.program.slots import Sizes, SlotTable
from rayrec.distributed.steps.route import SendPlan, plan_send
from rayrec.distributed.steps.unpack import Arrived
from rayrec.distributed.ways.way import Leg, Way, World
from rayrec.dynamic.rows import DynamicRows
from rayrec.layout import Shard, ShardingPlan
from rayrec.shards.state import ShardState
from rayrec.sparse import KeyedJaggedTensor


@dataclass(frozen=True)
class Program:
    """Step of some collections that share one exchange of ids, compiled for one rank.

    Attributes:
        slots: slots that every rank looks up.
        legs: one leg for each way in which the rows come home.
    """

    slots: SlotTable
    legs: tuple[Leg, ...]
    device: torch.device
    _sends: dict[tuple[str, ...], SendPlan] = field(default_factory=dict)

    def send_plan(self, kjt: KeyedJaggedTensor) -> SendPlan:
        """Return how a KJT with these keys is sent; worked out once per key list."""
        keys = tuple(kjt.keys())
        if keys not in self._sends:
            self._sends[keys] = plan_send(self.slots, keys, self.device)
        return self._sends[keys]

    def unpack(
        self, got: Sequence[Sizes], arrived: Sequence[Arrived]
    ) -> Mapping[GroupKey, GroupIds]:
        """Sort the ids that arrived, for every kernel of this rank."""
        ids: dict[GroupKey, GroupIds] = {}
        for leg in self.legs:
            ids.update(leg.unpack(got, arrived))
        return ids


@dataclass(frozen=True)
class Deployed:
    """A plan at work on one rank; `deploy` makes it, and `reshard` swaps it for another.

    Attributes:
        opened: one way per entry of the registry; None where this world cannot go that way.
        way_of: the way of each collection.
        lookups: the kernels of this rank, which own its rows.
    """

    world: World
    plan: ShardingPlan
    opened: tuple[Way | None, ...]
    way_of: tuple[Way, ...]
    lookups: dict[GroupKey, GroupLookup] = field(default_factory=dict)
    _programs: dict[frozenset[int], Program] = field(default_factory=dict)

    def program(self, collections: frozenset[int]) -> Program:
        """Return the program of some collections; compiled once."""
        if collections not in self._programs:
            self._programs[collections] = self._compile(collections)
        return self._programs[collections]

    def _compile(self, collections: frozenset[int]) -> Program:
        world, rank = self.world, self.world.exchange.rank
        here = {c: self.way_of[c] for c in sorted(collections)}
        specs = {c: world.specs[c] for c in here}
        ranks = world.exchange.world_size
        slots = compile_slots(self.plan, specs, world.optimizers, ranks, here)
        legs = []
        # The order of the registry: every rank enters the collectives of its legs in this order.
        for way in self.opened:
            of_way = [c for c, its_way in here.items() if its_way is way]
            if way is not None and of_way:
                legs.append(way.leg(slots, rank, of_way))
        return Program(slots, tuple(legs), world.device)

    def shard_states(self) -> list[ShardState]:
        """Return live rows and optimizer state of every shard of this rank."""
        return [state for lookup in self.lookups.values() for state in lookup.shard_states()]

    def dynamic_rows(self) -> dict[Shard, DynamicRows]:
        """Return the ids of this rank's shards of dynamic tables."""
        kernels = (lookup.ids for lookup in self.lookups.values())
        return {one.shard: one for ids in kernels if ids is not None for one in ids.of_shards}

    @property
    def iteration(self) -> int:
        """Updates so far, where an optimizer corrects its bias by it."""
        return max((lookup.iteration for lookup in self.lookups.values()), default=0)

    @property
    def shares_tables(self) -> bool:
        """True if ranks read the rows of any collection in place."""
        return any(way.space_of(c) is not None for c, way in enumerate(self.way_of))


def deploy(world: World, plan: ShardingPlan, before: Deployed | None = None) -> Deployed:
    """Put a plan to work; all ranks call it together, since ways may need shared memory.

    Args:
        before: the plan until now. What stays as and where it was is taken over: memory, kernels
            with their rows, connections.
    Raises:
        PlanError: the plan does not fit the tables or the number of ranks.
    """
    plan.check([table for c in world.specs for table in c.tables], world.exchange.world_size)
    former: Iterable[Way | None] = [None] * len(ways.WAYS) if before is None else before.opened
    opened = tuple(
        open_way(world, plan, way) for open_way, way in zip(ways.WAYS, former, strict=True)
    )
    ready = [way for way in opened if way is not None]
    way_of = tuple(next(way for way in ready if way.takes(c)) for c in range(len(world.specs)))
    deployed = Deployed(world, plan, opened, way_of)
    rank = world.exchange.rank
    kernels = {} if before is None else before.lookups
    for c in range(len(world.specs)):
        space = way_of[c].space_of(c)
        # Keys do not depend on which collections share a program, so one at a time finds all.
        for group in deployed.program(frozenset([c])).slots.ranks[rank].groups:
            kept = kernels.get(group.key)
            # A kernel keeps its rows only if it serves the same shards in the same memory.
            if kept is None or kept.group != group or kept.space is not space:
                parts = world.workers, space, world.clock, world.part()
                kept = GroupLookup(group, world.device, *parts, world.dynamic(group))
            deployed.lookups[group.key] = kept
    return deployed
