"""One step of some collections: route the ids to the owners of their rows; then each way looks up
and joins. The backward pass runs each way in reverse (`rayrec.distributed.ways`).
"""

from __future__ import annotations

import torch

from rayrec.comm.exchange import Exchange
from rayrec.distributed.deployed import Deployed, Program
from rayrec.distributed.program.slots import SlotTable, by_collection
from rayrec.distributed.steps.route import RoutedIds, route
from rayrec.distributed.steps.shared_exchange import Outputs
from rayrec.distributed.ways import Step
from rayrec.dynamic.clock import NO_TIME
from rayrec.errors import InputError
from rayrec.observe.timer import StepTimer, span
from rayrec.sparse import KeyedJaggedTensor, start_check_ids


class StepRunner:
    """Runs steps on one rank, under the plan that each is given.

    Args:
        exchange: a group of ranks that nobody else uses.
        peers: see `ShardedEmbeddings`.
        device: device of this rank's shards.
        check_ids: check the ids of every step.
    Attributes:
        timer: set one to learn where the time of the steps to come goes; see `timing`.
    """

    def __init__(
        self, exchange: Exchange, peers: Exchange | None, device: torch.device, check_ids: bool
    ) -> None:
        self.exchange, self._peers, self._check_ids = exchange, peers, check_ids
        # needs a gradient, so that a rank without rows runs the backward pass as well
        self._anchor = torch.zeros(0, device=device, requires_grad=True)
        self.timer: StepTimer | None = None

    def run(
        self,
        deployed: Deployed,
        collections: frozenset[int],
        kjt: KeyedJaggedTensor,
        ahead: RoutedIds | None,
        trains: bool,
    ) -> dict[int, Outputs]:
        """Return the outputs of some collections, differentiable.

        Args:
            ahead: the ids of `kjt` for these collections, where they have been routed already.
            trains: dynamic tables may give rows to ids and take them back.
        Raises:
            InputError: they ask for the time of the data, and ids have come without one.
        """
        program = deployed.program(collections)
        if trains:
            self._check_time(program.slots, kjt)
        weights = kjt.weights_or_none() if program.slots.weighted else None
        if weights is not None and not (weights.requires_grad and torch.is_grad_enabled()):
            weights = None  # they are only read, and have travelled with the ids
        routed = ahead or self.route(program, kjt, self.exchange, weights is not None)
        time = self._time_of_all(routed.time) if trains and program.slots.uses_time else NO_TIME
        for number, clock in deployed.world.id_clocks.items():
            if number in collections:
                clock.begin(trains, time)
        bags: dict[str, int] = {}
        if kjt.variable_stride_per_key():
            bags = dict(zip(kjt.keys(), kjt.stride_per_key(), strict=True))
        step = Step(
            routed=routed,
            send=program.send_plan(kjt),
            bags=bags,
            weights=weights,
            exchange=self.watched(self.exchange),
            lookups=deployed.lookups,
            peers=self._peers,
            ahead=ahead is not None,
            anchor=self._anchor,
            timer=self.timer,
        )
        outputs: dict[int, Outputs] = {}
        # Legs have the same order on all ranks, since each may enter collectives.
        for leg in program.legs:
            counts = program.slots.outputs(leg.collections, bool(bags))
            outputs |= by_collection(leg.run(step), counts)
        return outputs

    def route(
        self, program: Program, kjt: KeyedJaggedTensor, exchange: Exchange, track: bool = False
    ) -> RoutedIds:
        """Send the ids of a KJT to the owners of their rows.

        Args:
            exchange: exchange of the steps, or another one whose route runs ahead of its step.
            track: keep where each id came from, for the gradients of its weights.
        """
        with span(self.timer, "input", ahead=exchange is not self.exchange):
            checked = None
            if self._check_ids:
                source = f"rank {self.exchange.rank}"
                # On a GPU the ids are only read now; `route` judges them where it waits anyway.
                checked = start_check_ids(kjt, program.slots.limits, source)
            send, watched = program.send_plan(kjt), self.watched(exchange)
            return route(kjt, program.slots, send, watched, program.unpack, track, checked)

    def _time_of_all(self, time: int) -> int:
        """Return the largest time of all sharding groups that make the same updates."""
        if self._peers is None:
            return time
        mine = torch.tensor([time], device=self._anchor.device)
        times = self._peers.all_gather(mine, [1] * self._peers.world_size).wait()
        return max(int(one) for one in times)

    def _check_time(self, slots: SlotTable, kjt: KeyedJaggedTensor) -> None:
        if slots.uses_time and kjt.time is None and kjt.values().numel():
            tables = (table for spec in slots.collections.values() for table in spec.tables)
            name = next(t.name for t in tables if t.dynamic is not None and t.dynamic.uses_time)
            raise InputError(
                f"rank {self.exchange.rank}: ids of table {name!r} come and go by the time of the "
                "data, and the batch has none. Name the column of `time` in the schema, or give "
                "KeyedJaggedTensor its `time` in seconds."
            )

    def watched(self, exchange: Exchange) -> Exchange:
        """Return the same exchange, whose waits are counted while there is a timer."""
        return exchange if self.timer is None else self.timer.watch(exchange)
