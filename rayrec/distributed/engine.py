"""The sharded embeddings of one model on one rank: the engine behind all of its collections.

It holds the plan at work and says when things happen: a step of a collection, the exchange of ids
ahead of it, the change to another plan. What a step does is in `rayrec.distributed.step_runner`.

All collections that are given one KJT share its exchange of ids, and the exchange of rows where
they travel the same way. `prefetch` starts the exchange of ids of a KJT in a thread, over
connections of its own; the forward pass that is given this very KJT uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from rayrec.comm.exchange import Exchange
from rayrec.distributed.deployed import Deployed, deploy
from rayrec.distributed.kernels.group_lookup import GroupLookup
from rayrec.distributed.kernels.workers import Workers
from rayrec.distributed.program.engine_options import EngineOptions, check_dynamic
from rayrec.distributed.program.groups import CollectionSpec, GroupKey
from rayrec.distributed.reshard import redeploy, rows_to_grow
from rayrec.distributed.step_runner import StepRunner
from rayrec.distributed.steps.dedup import distinct_ids
from rayrec.distributed.steps.routes_ahead import RoutesAhead
from rayrec.distributed.steps.shared_exchange import Mode, Outputs, SharedExchange, Sharing
from rayrec.distributed.ways import World
from rayrec.dynamic.clock import NO_TIME, IdClock, Instant
from rayrec.errors import ConfigError
from rayrec.layout import ShardingPlan
from rayrec.observe.timer import span
from rayrec.optim import SparseOptimizer
from rayrec.shards.state import ShardState
from rayrec.shards.touched import RowStamps, TouchClock, TouchedRows
from rayrec.shards.undo import RankUndo
from rayrec.sparse import KeyedJaggedTensor, check_ids


class ShardedEmbeddings:
    """Every shard of this rank and the three steps around them.

    Args:
        collections: the model's collections in module order, the same on every rank.
        plan: covers every table of theirs.
        exchange: a group of ranks that nobody else uses.
        optimizers: optimizer of every table, applied in the backward pass.
        device: device of this rank's shards.
        options: see `EngineOptions`.
        prefetch_exchange: the same ranks over other connections; `prefetch` raises when None.
        peers: the ranks of other sharding groups that hold the same shards, when all are to make
            the same updates; see `peers`.
    Attributes:
        touched: rows that training has touched, where options.track_rows asks for it or rows can
            be undone, else None.
        undo: sets sync points and goes back to them, where options.memory is given, else None.
        deployed: everything that follows from the plan.
        runner: runs the steps; its timer, if one is set, learns where their time goes.
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
        options: EngineOptions,
        prefetch_exchange: Exchange | None,
        peers: Exchange | None,
    ) -> None:
        self.exchange, self.device, self.options = exchange, device, options
        check_dynamic(collections, self.options)
        memory = self.options.memory
        world = World(
            specs=tuple(collections),
            optimizers=dict(optimizers),
            exchange=exchange,
            device=device,
            workers=Workers(torch.get_num_threads() if device.type == "cpu" else 1),
            options=self.options,
            has_replicas=peers is not None,
            clock=TouchClock() if self.options.track_rows or memory is not None else None,
            id_clocks={
                number: IdClock(timed=spec.uses_time)
                for number, spec in enumerate(collections)
                if any(table.dynamic is not None for table in spec.tables)
            },
        )
        self.deployed: Deployed = deploy(world, plan)
        self.touched = None if world.clock is None else TouchedRows(world.clock, self._stamps)
        self.undo: RankUndo | None = None
        if memory is not None and world.clock is not None:
            self.undo = RankUndo(memory, world.clock, lambda: self.lookups.values())
        self.runner = StepRunner(exchange, peers, device, self.options.check_ids)
        self._sharing = Sharing([spec.features for spec in world.specs])
        self._in_sequences = frozenset().union(*(s.features for s in world.specs if s.sequence))
        self._ahead = None if prefetch_exchange is None else RoutesAhead(prefetch_exchange, device)

    @property
    def plan(self) -> ShardingPlan:
        """The plan at work."""
        return self.deployed.plan

    @property
    def optimizers(self) -> Mapping[str, SparseOptimizer]:
        """The update of every table."""
        return self.deployed.world.optimizers

    @property
    def lookups(self) -> Mapping[GroupKey, GroupLookup]:
        """The kernels of this rank, which own its rows."""
        return self.deployed.lookups

    def shard_states(self) -> list[ShardState]:
        """Return live rows and optimizer state of every shard of this rank."""
        return self.deployed.shard_states()

    def _stamps(self) -> list[RowStamps]:
        stamps = (lookup.stamps for lookup in self.lookups.values())
        return [one for one in stamps if one is not None]

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the updates to come."""
        for lookup in self.lookups.values():
            lookup.set_learning_rate(lr)
            lookup.base_rate = None  # no schedule's, and the base of the next one

    def grow(self, names: Iterable[str] | None = None) -> dict[str, int]:
        """Double the rows of dynamic tables that are filled so far; see `EngineFront.grow`."""
        grown = rows_to_grow(self.deployed, names)
        if grown:
            self.reshard(self.plan.with_rows(grown), grown)
        return grown

    def reshard(self, plan: ShardingPlan, rows: Mapping[str, int] | None = None) -> int:
        """Go over to another plan between two steps; every rank must call it.

        Args:
            plan: a plan for the same tables and ranks.
            rows: other numbers of rows of dynamic tables, by which the plan is `with_rows`.
        Returns:
            Bytes that this rank sent: rectangles that stay on their rank are copied in place.
        Raises:
            PlanError: the plan does not fit the tables or the number of ranks.
            CommError: a peer is gone; the old shards are then still whole.
        """
        if self._ahead is not None:
            # ids were routed for the old plan: every rank has done so, and routes again
            self._ahead.wait()
            self._ahead.forget()
        if self.undo is not None:
            self.undo.end()
        self.deployed, sent = redeploy(self.deployed, plan, rows or {})
        if self.touched is not None:
            # rows have moved to other shards, whose stamps say nothing of them
            self.touched.touch_all()
        self._sharing.clear()
        return sent

    @property
    def iteration(self) -> int:
        """Updates so far, where an optimizer corrects its bias by it."""
        return self.deployed.iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        for lookup in self.lookups.values():
            lookup.iteration = value

    @property
    def id_clocks(self) -> dict[str, Instant]:
        """The instant of every dynamic table, by which its ids grow old."""
        return self.deployed.world.instants()

    @id_clocks.setter
    def id_clocks(self, instants: Mapping[str, Instant]) -> None:
        world = self.deployed.world
        for number, clock in world.id_clocks.items():
            names = [table.name for table in world.specs[number].tables]
            clock.go_to([instants[name] for name in names if name in instants])
        # rows of a table that was not dynamic, or without times, were in use; nobody knows when
        now = self.id_clocks
        for ids in self.deployed.dynamic_rows().values():
            name = ids.table.name
            if name not in instants:
                ids.see_all(now[name])
            elif instants[name].time == NO_TIME:
                ids.time_all(now[name])

    def forward(self, collection: int, kjt: KeyedJaggedTensor, training: bool = True) -> Outputs:
        """Return the output of one collection, differentiable.

        Args:
            training: dynamic tables may admit ids, where gradients are wanted, too.
        Returns:
            Pooled: one (B, sum of widths) float32 of sums, or per use (bags, width) when keys have
            different numbers of bags. Sequence: per use (ids, width).
        Raises:
            InputError: a feature is missing, an id is out of range, or weights are missing.
            CommError: a peer is gone.
        """
        shared, mode = SharedExchange.on(kjt, self), Mode.of(training)
        output = self._sharing.take(collection, shared, mode)
        if output is None:
            together = self._sharing.together(collection, tuple(kjt.keys()), shared, mode)
            results = self._run(together, kjt, shared, mode.trains)
            output = results.pop(collection)
            shared.waiting = results
        self._sharing.until_backward(output[0], shared)
        return output

    def forward_distinct(
        self, collection: int, kjt: KeyedJaggedTensor, training: bool = True
    ) -> Outputs:
        """Return the output of a sequence collection, with every id sent once per feature.

        Returns:
            Per use (ids of its feature, width) float32, as `forward` returns it.
        Raises:
            InputError, CommError: as in `forward`.
        """
        program = self.deployed.program(frozenset([collection]))
        slots, shared = program.slots, SharedExchange.on(kjt, self)
        if shared.distinct is None:
            if self.options.check_ids:
                check_ids(kjt, slots.limits, source=f"rank {self.exchange.rank}")
            program.send_plan(kjt)  # names a feature that is missing, beside all keys
            shared.distinct = distinct_ids(kjt, self._in_sequences)
        rows = self.forward(collection, shared.distinct.kjt, training)
        places, uses = shared.distinct.places, slots.uses[collection]
        pairs = zip(rows, uses, strict=True)
        return tuple(r.index_select(0, places[use.feature]) for r, use in pairs)

    def prefetch(self, kjt: KeyedJaggedTensor) -> bool:
        """Start the exchange of ids of a KJT that a later forward pass will be given.

        Every rank calls it in the same order.

        Returns:
            Whether it was started. The engine must have seen a forward pass with the same keys
            before; and distinct ids, and ids whose weights are learned, are sent in their step.
        Raises:
            ConfigError: the engine has no connections for it.
        """
        if self._ahead is None:
            raise ConfigError(
                "prefetch needs an exchange of its own: build the model with "
                "DistributedModelParallel(prefetch=True), and do not close it."
            )
        # The thread must route for the very collections that the forward pass will ask for.
        together = self._sharing.first_call(tuple(kjt.keys()))
        learned = kjt.weights_or_none() is not None and kjt.weights().requires_grad
        if together is None or self.options.dedup_sequences or learned:
            return False
        program = self.deployed.program(together)
        shared = SharedExchange.on(kjt, self)
        if shared.started is not None and shared.started.expected:
            return True
        shared.started = self._ahead.start(
            kjt, together, lambda exchange: self.runner.route(program, kjt, exchange)
        )
        return True

    def forget_prefetched(self) -> None:
        """Expect no forward pass of what was prefetched; exchanges under way end by themselves."""
        if self._ahead is not None:
            self._ahead.forget()

    def close(self, wait: bool = True) -> None:
        """End the thread that prefetches, once; from now on `prefetch` raises.

        Args:
            wait: wait for exchanges under way, in which other ranks take part. After a failure pass
                False: they end, with an error, once connections are cut.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close(wait)
        self._sharing.clear()

    def _run(
        self,
        collections: frozenset[int],
        kjt: KeyedJaggedTensor,
        shared: SharedExchange,
        trains: bool,
    ) -> dict[int, Outputs]:
        """Run one step of some collections, with the ids that were routed ahead if there are."""
        ahead = None
        if self._ahead is not None and shared.started is not None:
            timer = self.runner.timer
            with span(timer, "input"):
                ahead = self._ahead.take(shared.started, collections, timer)
            shared.started = None  # a KJT that is kept must not keep what was routed
        return self.runner.run(self.deployed, collections, kjt, ahead, trains)
