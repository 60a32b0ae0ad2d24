"""Base classes of the ways in which rows come home.

A `Way` belongs to a plan: it says which collections it takes, how their ids are addressed, and what
memory or connections it needs. For a set of collections that share one exchange of ids it makes a
`Leg`, which runs in every step: look up, join, and in the backward pass the reverse.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from rayrec.comm.exchange import Exchange
from rayrec.distributed.kernels.group_lookup import GroupLookup
from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.kernels.table_space import TableSpace
from rayrec.distributed.kernels.workers import Workers
from rayrec.distributed.program.compile import Addressing
from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.distributed.program.groups import CollectionSpec, GroupKey, LookupGroup
from rayrec.distributed.program.slots import Sizes, SlotTable
from rayrec.distributed.steps.peers import look_up_with_peers
from rayrec.distributed.steps.route import RoutedIds, SendPlan
from rayrec.distributed.steps.unpack import Arrived
from rayrec.dynamic.clock import Dynamic, IdClock, Instant
from rayrec.layout import BaseEmbeddingConfig, ShardingPlan
from rayrec.observe.timer import StepTimer
from rayrec.optim import SparseOptimizer
from rayrec.shards.named_memory import MemoryPart
from rayrec.shards.touched import TouchClock


@dataclass(frozen=True)
class World:
    """Model, ranks and options for which a way is opened.

    Attributes:
        specs: all collections of the model.
        optimizers: optimizer of every table.
        exchange: connects the ranks.
        device: device of this rank's shards.
        workers: threads that share the work of CPU kernels.
        has_replicas: other sharding groups hold the same shards and make the same updates.
        clock: clock of the stamps of touched rows; None keeps none.
        id_clocks: clock of the ids of every collection that has dynamic tables, by its number.
    """

    specs: tuple[CollectionSpec, ...]
    optimizers: Mapping[str, SparseOptimizer]
    exchange: Exchange
    device: torch.device
    workers: Workers
    options: EngineOptions
    has_replicas: bool = False
    clock: TouchClock | None = None
    id_clocks: Mapping[int, IdClock] = field(default_factory=dict)
    _parts: Iterator[int] = field(default_factory=count)

    def with_rows(self, rows: Mapping[str, int]) -> World:
        """Return the world with other numbers of rows of some dynamic tables; ids grow on."""
        specs = tuple(
            replace(
                spec,
                tables=tuple(
                    table.with_rows(rows[table.name]) if table.name in rows else table
                    for table in spec.tables
                ),
            )
            for spec in self.specs
        )
        return replace(self, specs=specs)

    def instants(self) -> dict[str, Instant]:
        """Return the instant of every dynamic table, by which its ids grow old."""
        return {
            table.name: clock.now if table.dynamic.uses_time else Instant(clock.now.step)
            for number, clock in self.id_clocks.items()
            for table in self.specs[number].tables
            if table.dynamic is not None
        }

    @property
    def tables(self) -> tuple[BaseEmbeddingConfig, ...]:
        """All tables of the model, in its order."""
        return tuple(table for spec in self.specs for table in spec.tables)

    def dynamic(self, group: LookupGroup) -> Dynamic | None:
        """Return the dynamic tables of a group; None for other groups."""
        if not group.key.dynamic:
            return None
        number = group.key.collection
        by_name = {table.name: table for table in self.specs[number].tables}
        tables = tuple(by_name[shard.table] for shard in group.shards)
        return Dynamic(tables, self.options.seed, self.id_clocks[number])

    def part(self) -> MemoryPart | None:
        """Return memory for one more kernel or space; ranks with one plan get the same names."""
        memory = self.options.memory
        return None if memory is None else memory.part(f"rows{next(self._parts)}")


@dataclass(frozen=True)
class Step:
    """One step of some collections, as every leg sees it.

    Attributes:
        routed: the ids that this rank looks up, and the sizes of all messages.
        send: the plan by which the batch was sent.
        bags: feature -> bags, where keys have different numbers of bags; else empty.
        weights: the weights of the KJT, where the model learns them; else None.
        exchange: connects the ranks.
        lookups: the kernels of this rank.
        peers: the ranks of other sharding groups that make the same updates, each with the
            gradients of all; None where there are none.
        ahead: the ids were routed beside an earlier step, so no rank has waited for the others.
        anchor: an empty tensor that keeps a rank without rows in the graph, since every rank must
            enter the collectives of the backward pass.
        timer: counts where time goes, or None.
        rows: collection -> per use, the rows of this rank's ids, where tables are dynamic and read
            in place.
    """

    routed: RoutedIds
    send: SendPlan
    bags: Mapping[str, int]
    weights: Tensor | None
    exchange: Exchange
    lookups: Mapping[GroupKey, GroupLookup]
    peers: Exchange | None
    ahead: bool
    anchor: Tensor
    timer: StepTimer | None
    rows: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)

    def look_up(self, key: GroupKey, ids: GroupIds) -> Tensor:
        """Run a kernel on the ids that its group was sent."""
        if self.peers is None or not torch.is_grad_enabled():
            return self.lookups[key](ids)
        return look_up_with_peers(self.lookups[key], ids, self.peers)


class Way(Addressing):
    """Way in which the rows of some collections travel under one plan."""

    @abstractmethod
    def takes(self, collection: int) -> bool:
        """Return True if the rows of a collection travel this way; all ranks answer alike."""

    @abstractmethod
    def leg(self, slots: SlotTable, rank: int, collections: Sequence[int]) -> Leg:
        """Make the leg that runs in every step, for some collections of a slot table."""

    def space_of(self, collection: int) -> TableSpace | None:
        """Return the memory that holds the rows of a collection, where ranks share one."""
        return None


class Leg(ABC):
    """One way for some collections on one rank.

    Attributes:
        collections: by index, ascending.
    """

    collections: tuple[int, ...]

    @abstractmethod
    def unpack(
        self, got: Sequence[Sizes], arrived: Sequence[Arrived]
    ) -> Mapping[GroupKey, GroupIds]:
        """Sort the ids that arrived from every rank, for the kernels of this rank."""

    @abstractmethod
    def run(self, step: Step) -> tuple[Tensor, ...]:
        """Look up and join: return the outputs of the collections, in the graph.

        Returns:
            Per collection, in order: of a pooled one (B, sum of widths), or per use (bags, width)
            where keys have different numbers of bags; of a sequence per use (ids, width). float32.
        """

    @abstractmethod
    def join(self, step: Step, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Return the outputs, given the tensors that they depend on, and what `reverse` needs."""

    @abstractmethod
    def reverse(self, step: Step, grads: Sequence[Tensor], kept: Any) -> Sequence[Tensor | None]:
        """Return the gradients of the inputs of `join`, given those of its outputs."""


class Joined(torch.autograd.Function):
    """A leg in the graph: its forward pass is `Leg.join`, its backward pass `Leg.reverse`."""

    @staticmethod
    def forward(ctx: Any, leg: Leg, step: Step, anchor: Tensor, *inputs: Tensor) -> Any:
        """Join what the leg's kernels found."""
        outputs, kept = leg.join(step, inputs)
        ctx.leg, ctx.step, ctx.kept = leg, step, kept
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Send the gradients back."""
        back = ctx.leg.reverse(ctx.step, grads, ctx.kept)
        return None, None, grads[0].new_empty(0), *back


# Opens a way for a plan; it takes over from the way under the plan before, if there was one. Every
# rank calls it with the same plan. It returns None where this world cannot go that way.
Open = Callable[[World, ShardingPlan, Way | None], Way | None]
