"""The sharded embeddings of one model on one rank: route, lookup and combine behind all of its collections.

All collections share one input and one output exchange per step. A model calls them one after the other, so the engine learns from the
calls which collections are given the same KJT object: the first of them to be called in a later step runs the exchange for all, and
the others find their result in the inbox. Every rank runs the same model code, so every rank learns the same. A collection that stops
claiming its share goes back to exchanges of its own.

Slot tables, send plans and combine plans are compiled once per set of collections and key list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rayrec.checkpoint import ShardState
from rayrec.comm.exchange import Exchange
from rayrec.distributed.combine import Combine, CombinePlan, plan_combine
from rayrec.distributed.lookup import FusedLookup
from rayrec.distributed.route import SendPlan, plan_send, route
from rayrec.distributed.slots import GroupKey, SlotTable, compile_slots
from rayrec.layout import BaseEmbeddingConfig, ShardingPlan
from rayrec.optim import SparseOptimizer
from rayrec.sparse import KeyedJaggedTensor, check_ids


@dataclass(frozen=True)
class CollectionSpec:
    """What the engine must know of one collection."""

    name: str
    tables: tuple[BaseEmbeddingConfig, ...]
    weighted: bool


@dataclass(frozen=True)
class _Compiled:
    slots: SlotTable
    combine: CombinePlan
    sends: dict[tuple[str, ...], SendPlan] = field(default_factory=dict)


class ShardedEmbeddings:
    """Every shard of this rank and the three steps around them.

    Args:
        collections: the model's collections in module order, the same on every rank.
        plan: covers every table of theirs.
        exchange: a group of ranks that nobody else uses.
        optimizer: applied to every table in the backward pass.
        device: where this rank's shards live.
        check_ids: check every id against its tables before it is sent; costs one pass over the ids.
    Raises:
        PlanError: the plan does not fit the tables or the number of ranks.
    """

    def __init__(
        self,
        collections: Sequence[CollectionSpec],
        plan: ShardingPlan,
        exchange: Exchange,
        optimizer: SparseOptimizer,
        device: torch.device,
        check_ids: bool = True,
    ) -> None:
        self.collections, self.plan, self.exchange, self.device, self.check_ids = tuple(collections), plan, exchange, device, check_ids
        plan.check([table for c in collections for table in c.tables], exchange.world_size)
        self._compiled: dict[frozenset[int], _Compiled] = {}
        self.lookups: dict[GroupKey, FusedLookup] = {}
        for index in range(len(collections)):
            for group in self._compile(frozenset([index])).slots.ranks[exchange.rank].groups:
                self.lookups[group.key] = FusedLookup(group, optimizer, device)
        self._anchor = torch.zeros(0, device=device, requires_grad=True)
        self._partners: dict[int, frozenset[int]] = {i: frozenset([i]) for i in range(len(collections))}
        self._seen: KeyedJaggedTensor | None = None
        self._callers: set[int] = set()
        self._inbox: dict[int, Tensor] = {}

    def shard_states(self) -> list[ShardState]:
        """Live rows and optimizer state of every shard of this rank."""
        return [state for lookup in self.lookups.values() for state in lookup.shard_states()]

    def set_learning_rate(self, lr: float) -> None:
        """Learning rate of all updates to come."""
        for lookup in self.lookups.values():
            lookup.set_learning_rate(lr)

    def forward(self, collection: int, kjt: KeyedJaggedTensor) -> Tensor:
        """Pooled sums of one collection, (B, sum of widths) float32, differentiable.

        Raises:
            InputError: a feature is missing, an id is out of range, weights are missing, or the batch varies by feature.
            CommError: a peer is gone.
        """
        if kjt is self._seen and collection in self._inbox:
            self._callers.add(collection)
            return self._inbox.pop(collection)
        self._learn(collection, kjt)
        together = self._partners[collection] - self._callers | {collection}
        self._callers.add(collection)
        outputs = self._run(together, kjt)
        self._inbox = dict(zip(sorted(together), outputs, strict=True))
        return self._inbox.pop(collection)

    def _learn(self, collection: int, kjt: KeyedJaggedTensor) -> None:
        for unclaimed in self._inbox:  # a result that nobody fetched: that collection no longer shares this KJT
            former = self._partners[unclaimed]
            for member in former:
                self._partners[member] = former - {unclaimed} if member != unclaimed else frozenset([unclaimed])
        self._inbox = {}
        if kjt is not self._seen:
            self._seen, self._callers = kjt, set()
        elif collection not in self._callers:  # a second collection on the same object: share from the next step on
            joined = self._partners[collection].union(*(self._partners[c] for c in self._callers))
            for member in joined:
                self._partners[member] = joined

    def _run(self, collections: frozenset[int], kjt: KeyedJaggedTensor) -> tuple[Tensor, ...]:
        compiled = self._compile(collections)
        keys = tuple(kjt.keys())
        if keys not in compiled.sends:
            compiled.sends[keys] = plan_send(compiled.slots, keys, self.device)
        if self.check_ids:
            check_ids(kjt, compiled.slots.limits, source=f"rank {self.exchange.rank}")
        routed = route(kjt, compiled.slots, compiled.sends[keys], self.exchange).wait()
        groups = compiled.slots.ranks[self.exchange.rank].groups
        rows = [self.lookups[group.key](routed.groups[group.key]) for group in groups]
        return Combine.apply(compiled.combine, self.exchange, routed.batch_sizes, self._anchor, *rows)

    def _compile(self, collections: frozenset[int]) -> _Compiled:
        if collections not in self._compiled:
            tables = {c: self.collections[c].tables for c in collections}
            weighted = {c: self.collections[c].weighted for c in collections}
            slots = compile_slots(self.plan, tables, weighted, self.exchange.world_size)
            self._compiled[collections] = _Compiled(slots, plan_combine(slots, self.exchange.rank))
        return self._compiled[collections]
