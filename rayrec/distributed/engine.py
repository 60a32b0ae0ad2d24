"""The sharded embeddings of one model on one rank: the engine behind all of its collections.

A step of a collection reads from top to bottom in `_run`: route the ids to the owners of their
rows; then each way looks up and joins. The backward pass runs each way in reverse
(`rayrec.distributed.ways`).

All collections that are given one KJT share its exchange of ids, and the exchange of rows where
they travel the same way. `prefetch` starts the exchange of ids of a KJT in a thread, over
connections of its own; the forward pass that is given this very KJT uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rayrec.comm.exchange import Exchange
from rayrec.distributed.deployed import Deployed, Program, deploy
from rayrec.distributed.kernels.group_lookup import GroupLookup
from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.kernels.workers import Workers
from rayrec.distributed.program.groups import CollectionSpec, GroupKey
from rayrec.distributed.program.options import EngineOptions
from rayrec.distributed.program.slots import by_collection
from rayrec.distributed.reshard import Moving, move_tables
from rayrec.distributed.steps.dedup import distinct_ids
from rayrec.distributed.steps.peers import look_up_with_peers
from rayrec.distributed.steps.ride import Outputs, Ride, Sharing
from rayrec.distributed.steps.route import RoutedIds, route
from rayrec.distributed.steps.routes_ahead import RoutesAhead
from rayrec.distributed.ways import Step, World
from rayrec.errors import ConfigError
from rayrec.layout import ShardingPlan
from rayrec.observe.timer import StepTimer, span
from rayrec.optim import SparseOptimizer
from rayrec.shards.state import ShardState
from rayrec.shards.touched import RowStamps, TouchClock, TouchedRows
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
        touched: which rows training has touched, where options.track_rows asks for it, else None.
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
        self.exchange, self.peers, self.device = exchange, peers, device
        self.options = options or EngineOptions()
        world = World(
            specs=tuple(collections),
            optimizers=dict(optimizers),
            exchange=exchange,
            device=device,
            workers=Workers.of(device),
            options=self.options,
            has_replicas=peers is not None,
            clock=TouchClock() if self.options.track_rows else None,
        )
        self._deployed = deploy(world, plan)
        self.touched = None if world.clock is None else TouchedRows(world.clock, self._stamps)
        # needs a gradient, so that a rank without rows runs the backward pass as well
        self._anchor = torch.zeros(0, device=device, requires_grad=True)
        self._sharing = Sharing([spec.features for spec in world.specs])
        self._ahead = None if prefetch_exchange is None else RoutesAhead(prefetch_exchange, device)
        self._lr: float | None = None
        self.timer: StepTimer | None = None

    @property
    def deployed(self) -> Deployed:
        """Everything that follows from the plan."""
        return self._deployed

    @property
    def plan(self) -> ShardingPlan:
        """The plan at work."""
        return self._deployed.plan

    @property
    def collections(self) -> tuple[CollectionSpec, ...]:
        """The model's collections, in module order."""
        return self._deployed.world.specs

    @property
    def optimizers(self) -> Mapping[str, SparseOptimizer]:
        """The update of every table."""
        return self._deployed.world.optimizers

    @property
    def lookups(self) -> Mapping[GroupKey, GroupLookup]:
        """The kernels of this rank, which own its rows."""
        return self._deployed.lookups

    @property
    def shares_tables(self) -> bool:
        """Whether ranks read the rows of any collection in place."""
        return self._deployed.shares_tables

    def shard_states(self) -> list[ShardState]:
        """Return live rows and optimizer state of every shard of this rank."""
        return self._deployed.shard_states()

    def _stamps(self) -> list[RowStamps]:
        stamps = (lookup.stamps for lookup in self.lookups.values())
        return [one for one in stamps if one is not None]

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the updates to come."""
        self._lr = lr
        for lookup in self.lookups.values():
            lookup.set_learning_rate(lr)

    def reshard(self, plan: ShardingPlan) -> int:
        """Go over to another plan between two steps; every rank must call it.

        Args:
            plan: for the same tables and ranks.
        Returns:
            Float32 values that this rank sent: rectangles that stay on their rank are copied in
            place.
        Raises:
            PlanError: the plan does not fit the tables or the number of ranks.
            CommError: a peer is gone; the old shards are then still whole.
        """
        if self._ahead is not None:
            # ids were routed for the old plan: every rank has done so, and routes again
            self._ahead.wait()
            self._ahead.forget()
        # a rank may have had no shard until now
        box = torch.tensor([self.iteration], device=self.device)
        boxes = self.exchange.all_gather(box, [1] * self.exchange.world_size).wait()
        iteration = max(int(box) for box in boxes)
        old = self._deployed
        new = deploy(old.world, plan, old)
        moving = []
        for table in (table for spec in self.collections for table in spec.tables):
            optimizer = self.optimizers[table.name]
            moving.append(Moving.between(table.name, old.plan, plan, optimizer))
        states = old.shard_states(), new.shard_states()
        sent = move_tables(moving, *states, self.exchange, self.device)
        for lookup in new.lookups.values():
            lookup.iteration = iteration
            if self._lr is not None:
                lookup.set_learning_rate(self._lr)
        self._deployed = new
        if self.touched is not None:
            # rows have moved to other shards, whose stamps say nothing of them
            self.touched.touch_all()
        self._sharing.clear()
        return sent

    @property
    def iteration(self) -> int:
        """Updates so far, where an optimizer corrects its bias by it."""
        return max((lookup.iteration for lookup in self.lookups.values()), default=0)

    @iteration.setter
    def iteration(self, value: int) -> None:
        for lookup in self.lookups.values():
            lookup.iteration = value

    def forward(self, collection: int, kjt: KeyedJaggedTensor) -> Outputs:
        """Return the output of one collection, differentiable.

        Returns:
            Pooled: one (B, sum of widths) float32 of sums, or per use (bags, width) when keys have
            different numbers of bags. Sequence: per use (ids, width).
        Raises:
            InputError: a feature is missing, an id is out of range, or weights are missing.
            CommError: a peer is gone.
        """
        ride = Ride.on(kjt, self)
        output = self._sharing.take(collection, ride)
        if output is None:
            together = self._sharing.together(collection, tuple(kjt.keys()), ride)
            results = self._run(together, kjt, ride)
            output = results.pop(collection)
            ride.waiting = results
        return output

    def forward_distinct(self, collection: int, kjt: KeyedJaggedTensor) -> Outputs:
        """Return the output of a sequence collection, with every id sent once per feature.

        Returns:
            Per use (ids of its feature, width) float32, as `forward` returns it.
        Raises:
            InputError, CommError: as in `forward`.
        """
        slots = self._deployed.program(frozenset([collection])).slots
        ride = Ride.on(kjt, self)
        if ride.distinct is None:
            if self.options.check_ids:
                check_ids(kjt, slots.limits, source=f"rank {self.exchange.rank}")
            ride.distinct = distinct_ids(kjt)
        rows, places = self.forward(collection, ride.distinct.kjt), ride.distinct.places
        uses = slots.uses[collection]
        return tuple(
            r.index_select(0, places[use.feature]) for r, use in zip(rows, uses, strict=True)
        )

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
        program = self._deployed.program(together)
        ride = Ride.on(kjt, self)
        if ride.started is not None and ride.started.expected:
            return True
        ride.started = self._ahead.start(
            kjt, together, lambda exchange: self._route(program, kjt, exchange, False)
        )
        return True

    def forget_prefetched(self) -> None:
        """Expect no forward pass of what was prefetched; exchanges under way end by themselves."""
        if self._ahead is not None:
            self._ahead.forget()

    def close(self, wait: bool = True) -> None:
        """End the thread that prefetches, once; from now on `prefetch` raises.

        Args:
            wait: for exchanges under way, since other ranks take part in them. After a failure pass
                False: they end, with an error, once connections are cut.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close(wait)
        self._sharing.clear()

    def _run(
        self, collections: frozenset[int], kjt: KeyedJaggedTensor, ride: Ride
    ) -> dict[int, Outputs]:
        """Run one step of some collections: route the ids; then each way looks up and joins."""
        program = self._deployed.program(collections)
        weights = kjt.weights_or_none() if program.slots.weighted else None
        if weights is not None and not (weights.requires_grad and torch.is_grad_enabled()):
            weights = None  # they are only read, and have travelled with the ids
        ahead = None
        if self._ahead is not None and ride.started is not None:
            with span(self.timer, "input"):
                ahead = self._ahead.take(ride.started, collections, self.timer)
            ride.started = None  # a KJT that is kept must not keep what was routed
        routed = ahead or self._route(program, kjt, self.exchange, weights is not None)
        bags: dict[str, int] = {}
        if kjt.variable_stride_per_key():
            bags = dict(zip(kjt.keys(), kjt.stride_per_key(), strict=True))
        step = Step(
            routed=routed,
            send=program.send_plan(kjt),
            bags=bags,
            weights=weights,
            exchange=self.watched(self.exchange),
            lookups=self._deployed.lookups,
            look_up=self._look_up,
            ahead=ahead is not None,
            replicas=1 if self.peers is None else self.peers.world_size,
            anchor=self._anchor,
            timer=self.timer,
        )
        outputs: dict[int, Outputs] = {}
        # Legs have the same order on all ranks, since each may enter collectives.
        for leg in program.legs:
            counts = program.slots.outputs(leg.collections, bool(bags))
            outputs |= by_collection(leg.run(step), counts)
        return outputs

    def _route(
        self, program: Program, kjt: KeyedJaggedTensor, exchange: Exchange, track: bool
    ) -> RoutedIds:
        with span(self.timer, "input", ahead=exchange is not self.exchange):
            checked = None
            if self.options.check_ids:
                source = f"rank {self.exchange.rank}"
                # On a GPU the ids are only read now; `route` judges them where it waits anyway.
                checked = start_check_ids(kjt, program.slots.limits, source)
            send, watched = program.send_plan(kjt), self.watched(exchange)
            return route(kjt, program.slots, send, watched, program.unpack, track, checked)

    def watched(self, exchange: Exchange) -> Exchange:
        """Return the same exchange, whose waits are counted while there is a timer."""
        return exchange if self.timer is None else self.timer.watch(exchange)

    def _look_up(self, key: GroupKey, ids: GroupIds) -> Tensor:
        if self.peers is None or not torch.is_grad_enabled():
            return self.lookups[key](ids)
        return look_up_with_peers(self.lookups[key], ids, self.peers)
