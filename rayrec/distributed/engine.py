"""The sharded embeddings of one model on one rank: route, lookup and combine behind all of its
collections.

All collections share one input and one output exchange per step: the first to be called with a KJT
runs them for all, and the others find their result in the `Inbox`.

`prefetch` starts the input exchange of a KJT in a thread, over connections of its own; the forward
that is given this very KJT uses it. Slot tables, send plans and combine plans are compiled once per
set of collections and key list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rayrec.checkpoint import ShardState
from rayrec.comm.codec import Codecs
from rayrec.comm.exchange import Exchange
from rayrec.distributed.engine_options import EngineOptions
from rayrec.distributed.kernels.group_lookup import GroupLookup
from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.kernels.workers import Workers
from rayrec.distributed.program.compile import compile_slots
from rayrec.distributed.program.groups import CollectionSpec, GroupKey
from rayrec.distributed.program.slots import by_collection
from rayrec.distributed.reshard import Moving, move_tables
from rayrec.distributed.shared.in_place import ReadInPlace
from rayrec.distributed.shared.shared_tables import SharedTables
from rayrec.distributed.steps.compiled import Compiled
from rayrec.distributed.steps.dedup import Distinct, distinct_ids
from rayrec.distributed.steps.exchange_step import Combine, RouteWeights, Step
from rayrec.distributed.steps.inbox import Inbox
from rayrec.distributed.steps.peers import look_up_with_peers
from rayrec.distributed.steps.route import RoutedIds, route
from rayrec.distributed.steps.routes_ahead import RoutesAhead
from rayrec.distributed.steps.two_hop import Hops
from rayrec.errors import ConfigError
from rayrec.layout import ShardingPlan
from rayrec.observe.timer import StepTimer, span
from rayrec.optim import SparseOptimizer
from rayrec.sparse import KeyedJaggedTensor, check_ids, start_check_ids


class ShardedEmbeddings:
    """Every shard of this rank and the three steps around them.

    Args:
        collections: the model's collections in module order, the same on every rank.
        plan: covers every table of theirs.
        exchange: a group of ranks that nobody else uses.
        optimizers: of every table, applied in the backward pass.
        device: where this rank's shards live.
        options: see `EngineOptions`.
        prefetch_exchange: the same ranks over other connections; without it `prefetch` raises.
        peers: the ranks of other sharding groups that hold the same shards, when all are to make
            the same updates; see `peers`.
    Attributes:
        timer: set one to learn where the time of the steps to come goes; see `timing`.
    Raises:
        PlanError: the plan does not fit the tables or the number of ranks.
    """

    def __init__(
        self,
        collections: Sequence[CollectionSpec],
        plan: ShardingPlan,
        exchange: Exchange,
        optimizers: Mapping[str, SparseOptimizer],
        device: torch.device,
        options: EngineOptions | None = None,
        prefetch_exchange: Exchange | None = None,
        peers: Exchange | None = None,
    ) -> None:
        self.collections, self.plan, self.exchange, self.device = (
            tuple(collections),
            plan,
            exchange,
            device,
        )
        self.peers = peers
        self.optimizers, self.options = dict(optimizers), options or EngineOptions()
        plan.check([table for c in collections for table in c.tables], exchange.world_size)
        self._compiled: dict[frozenset[int], Compiled] = {}
        self._hops = Hops.for_plan(self.exchange, plan)
        self._workers = Workers.of(device)
        self._shared = self._lay_out(plan, SharedTables())
        self.lookups = self._make_lookups(
            [self._compile(frozenset([i])) for i in range(len(collections))], self._shared, {}
        )
        self._anchor = torch.zeros(0, device=device, requires_grad=True)
        self._inbox = Inbox(len(collections))
        self._ahead = None if prefetch_exchange is None else RoutesAhead(prefetch_exchange, device)
        self._distinct: tuple[KeyedJaggedTensor, Distinct] | None = None
        self._lr: float | None = None
        self.timer: StepTimer | None = None

    @property
    def shares_tables(self) -> bool:
        """Whether ranks read the rows of any collection in place."""
        return bool(self._shared.spaces)

    def shard_states(self) -> list[ShardState]:
        """Live rows and optimizer state of every shard of this rank."""
        return [state for lookup in self.lookups.values() for state in lookup.shard_states()]

    def set_learning_rate(self, lr: float) -> None:
        """Learning rate of all updates to come."""
        self._lr = lr
        for lookup in self.lookups.values():
            lookup.set_learning_rate(lr)

    def reshard(self, plan: ShardingPlan) -> int:
        """Go over to another plan for the same tables and ranks, between two steps; every rank must
        call it.

        Returns:
            Float32 values that this rank sent: rectangles that stay on their rank are copied in
            place.
        Raises:
            PlanError: the plan does not fit the tables or the number of ranks.
            CommError: a peer is gone; the old shards are then still whole.
        """
        tables = [table for c in self.collections for table in c.tables]
        plan.check(tables, self.exchange.world_size)
        if self._ahead is not None:
            self._ahead.wait()  # made for the old plan: every rank has it, and routes again
            self._ahead.forget()
        # a rank may have had no shard until now
        box = torch.tensor([self.iteration], device=self.device)
        iteration = max(
            int(one) for one in self.exchange.all_gather(box, [1] * self.exchange.world_size).wait()
        )
        old_plan, old = self.plan, self.shard_states()
        shared = self._lay_out(plan, self._shared)
        compiled = {
            frozenset([i]): self._compile_for(plan, frozenset([i]), shared)
            for i in range(len(self.collections))
        }
        lookups = self._make_lookups(compiled.values(), shared, self.lookups)
        new = [state for lookup in lookups.values() for state in lookup.shard_states()]
        moving = [
            Moving.between(table.name, old_plan, plan, self.optimizers[table.name])
            for table in tables
        ]
        sent = move_tables(moving, old, new, self.exchange, self.device)
        for lookup in lookups.values():
            lookup.iteration = iteration
            if self._lr is not None:
                lookup.set_learning_rate(self._lr)
        if plan.hosts != old_plan.hosts or self._hops is None:
            self._hops = Hops.for_plan(self.exchange, plan)
        self.plan, self.lookups, self._compiled, self._shared = plan, lookups, compiled, shared
        self._inbox.clear()
        return sent

    @property
    def iteration(self) -> int:
        """Updates so far, where an optimizer corrects its bias by it."""
        return max((lookup.iteration for lookup in self.lookups.values()), default=0)

    @iteration.setter
    def iteration(self, value: int) -> None:
        for lookup in self.lookups.values():
            lookup.iteration = value

    def forward(self, collection: int, kjt: KeyedJaggedTensor) -> tuple[Tensor, ...]:
        """The output of one collection, differentiable.

        Returns:
            Pooled: one (B, sum of widths) float32 of sums, or per use (bags, width) when keys have
            different numbers of bags. Sequence: per use (ids, width).
        Raises:
            InputError: a feature is missing, an id is out of range, or weights are missing.
            CommError: a peer is gone.
        """
        found = self._inbox.take(collection, kjt)
        if found is None:
            results = self._run(self._inbox.together(collection, kjt), kjt)
            found = results.pop(collection)
            self._inbox.put(results)
        return found

    def forward_distinct(self, collection: int, kjt: KeyedJaggedTensor) -> tuple[Tensor, ...]:
        """The output of a sequence collection as `forward` gives it, with every id sent once per
        feature.
        """
        # collections that share a KJT share its distinct ids
        if self._distinct is None or self._distinct[0] is not kjt:
            if self.options.check_ids:
                check_ids(
                    kjt,
                    self._compile(frozenset([collection])).slots.limits,
                    source=f"rank {self.exchange.rank}",
                )
            self._distinct = (kjt, distinct_ids(kjt))
        distinct = self._distinct[1]
        rows = self.forward(collection, distinct.kjt)
        uses = self._compile(frozenset([collection])).slots.uses[collection]
        return tuple(
            r.index_select(0, distinct.places[use.feature])
            for r, use in zip(rows, uses, strict=True)
        )

    def prefetch(self, kjt: KeyedJaggedTensor) -> bool:
        """Start the input exchange of a KJT that a later forward will be given; every rank calls it
        in the same order.

        Returns:
            Whether it was started: the engine must have seen a forward with the same keys before,
            and sends distinct ids in their step.
        Raises:
            ConfigError: the engine has no connections for it.
        """
        if self._ahead is None:
            raise ConfigError(
                "prefetch needs an exchange of its own: build the model with "
                "DistributedModelParallel(prefetch=True), and do not close it."
            )
        together = self._inbox.first_call(kjt)
        if (
            together is None
            or self.options.dedup_sequences
            or (kjt.weights_or_none() is not None and kjt.weights().requires_grad)
        ):
            return False
        self._ahead.start(
            kjt, together, lambda exchange: self._route(together, kjt, exchange, False)
        )
        return True

    def forget_prefetched(self) -> None:
        """Expect no forward of what was prefetched until now; exchanges under way end by
        themselves.
        """
        if self._ahead is not None:
            self._ahead.forget()

    def close(self, wait: bool = True) -> None:
        """End the thread that prefetches and forget what it routed; from now on `prefetch` raises.
        A second call does nothing.

        Args:
            wait: for exchanges under way, since other ranks take part in them. After a failure pass
                False: they end, with an error, once connections are cut.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close(wait)
        self._inbox.clear()
        self._distinct = None

    def _route(
        self, collections: frozenset[int], kjt: KeyedJaggedTensor, exchange: Exchange, track: bool
    ) -> RoutedIds:
        compiled = self._compile(collections)
        with span(self.timer, "input", ahead=exchange is not self.exchange):
            checked = None
            if self.options.check_ids:
                source = f"rank {self.exchange.rank}"
                checked = start_check_ids(kjt, compiled.slots.limits, source)
            send, watched = compiled.send_plan(kjt), self.watched(exchange)
            return route(kjt, compiled.slots, send, watched, track, checked)

    def watched(self, exchange: Exchange) -> Exchange:
        """The same exchange, whose waits are counted while there is a timer."""
        return exchange if self.timer is None else self.timer.watch(exchange)

    def _run(
        self, collections: frozenset[int], kjt: KeyedJaggedTensor
    ) -> dict[int, tuple[Tensor, ...]]:
        compiled = self._compile(collections)
        weights = kjt.weights_or_none() if compiled.slots.weighted else None
        learned = weights is not None and weights.requires_grad and torch.is_grad_enabled()
        with span(self.timer, "input"):
            ahead = (
                self._ahead.take(kjt, collections, self.timer) if self._ahead is not None else None
            )
        routed = ahead or self._route(collections, kjt, self.exchange, learned)
        bags = (
            dict(zip(kjt.keys(), kjt.stride_per_key(), strict=True))
            if kjt.variable_stride_per_key()
            else {}
        )
        exchange, found = self.watched(self.exchange), {}
        if compiled.slots.in_place:
            if ahead is not None:
                with span(self.timer, "input"):
                    # all have updated the rows of the step before; else they have said so by
                    # sending ids
                    exchange.meet()
            near = self._shared.step(
                compiled.slots, self.lookups, tuple(kjt.keys()), routed, bags, exchange, self.timer
            )
            found = by_collection(
                ReadInPlace.apply(near, self._anchor, weights if learned else None), near.counts
            )
        if not compiled.slots.exchanged:
            return found
        with span(self.timer, "output"):
            places = compiled.compact_plan(kjt).places(routed)
        hops = self._hops if compiled.slots.two_hop else None
        peers = 1 if self.peers is None else self.peers.world_size
        step = Step(
            compiled.combine,
            compiled.send_plan(kjt),
            routed,
            exchange,
            self.options.codecs,
            bags,
            hops,
            peers,
            places,
        )
        groups, anchor = dict(routed.groups), self._anchor
        if learned:
            assert weights is not None
            anchor, *of_groups = RouteWeights.apply(step, weights)
            weighted = [g.key for g in step.mine.exchanged if g.key.weighted]
            groups.update(
                {
                    key: replace(groups[key], weights=w)
                    for key, w in zip(weighted, of_groups, strict=True)
                }
            )
        with span(self.timer, "lookup"):
            rows = [self._look_up(group.key, groups[group.key]) for group in step.mine.exchanged]
        with span(self.timer, "output"):
            joined = Combine.apply(step, anchor, *rows)
        if self.timer is not None:
            for part, made in (("gradient", joined[:1]), ("update", rows)):
                for tensor in made:
                    self.timer.follow(part, tensor)
        return found | by_collection(
            joined, compiled.slots.outputs(compiled.slots.exchanged, bool(bags))
        )

    def _make_lookups(
        self,
        compiled: Iterable[Compiled],
        shared: SharedTables,
        before: Mapping[GroupKey, GroupLookup],
    ) -> dict[GroupKey, GroupLookup]:
        """Of all groups of this rank; those that stay what and where they were are kept."""
        found = {}
        for group in (g for c in compiled for g in c.slots.ranks[self.exchange.rank].groups):
            kept, space = before.get(group.key), shared.space_of(group)
            if kept is None or kept.group != group or space is not kept.space:
                kept = GroupLookup(group, self.device, self._workers, space)
            found[group.key] = kept
        return found

    def _look_up(self, key: GroupKey, ids: GroupIds) -> Tensor:
        if self.peers is None or not torch.is_grad_enabled():
            return self.lookups[key](ids)
        return look_up_with_peers(self.lookups[key], ids, self.peers)

    def _compile(self, collections: frozenset[int]) -> Compiled:
        if collections not in self._compiled:
            self._compiled[collections] = self._compile_for(self.plan, collections, self._shared)
        return self._compiled[collections]

    def _compile_for(
        self, plan: ShardingPlan, collections: frozenset[int], shared: SharedTables
    ) -> Compiled:
        specs = {c: self.collections[c] for c in collections}
        in_place = {c: shared.spaces[c].starts for c in shared.spaces.keys() & collections}
        slots = compile_slots(plan, specs, self.optimizers, self.exchange.world_size, in_place)
        return Compiled.of(slots, self.exchange.rank, self.device)

    def _lay_out(self, plan: ShardingPlan, before: SharedTables) -> SharedTables:
        if (
            not self.options.share_tables
            or self.device.type != "cpu"
            or self.peers is not None
            or self.options.codecs != Codecs()
        ):
            return SharedTables()
        return before.laid_out(
            self.collections, plan, self.optimizers, self.exchange, self._workers
        )
