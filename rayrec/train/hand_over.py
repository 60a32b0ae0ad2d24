"""Tables that go from one world of ranks to the next in the memory of their processes.

A run that changes the number of its ranks on purpose stops at the end of a window. Every rank keeps
what it holds (`keep`). Then those ranks and the new ones meet once, and pass on what changes its
place (`HandOverTask`); who leaves the run is free after that. The next world makes its model under
its own plan, and fills it from what each of its ranks keeps (`take`). No storage is involved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rayrec.comm import plain
from rayrec.comm.choose import exchange_for, host_identity
from rayrec.comm.exchange import LocalExchange
from rayrec.distributed.passing import columns_of, pass_on
from rayrec.errors import CommError
from rayrec.layout import ShardingPlan
from rayrec.machine.available import available_bytes
from rayrec.shards.state import ShardState
from rayrec.train.run_state import LiveRun
from rayrec.train.seat import RankContext
from rayrec.train.window import gather_objects

# factor for the memory of allocations and dense layers beside the tables
_MARGIN = 1.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """State of a rank that outlives its world: table shards, dense part and position.

    Attributes:
        rank: index among the ranks that hold every table together.
        world_rank, world_size: index of the rank in the old world, and size of that world.
        plan: sharding plan of the old world, for the rows that its tables have grown to.
        states: rows and optimizer state of this rank, on the CPU.
        state: `RunState` of the run, in bytes.
    """

    rank: int
    world_rank: int
    world_size: int
    plan: ShardingPlan
    states: Sequence[ShardState]
    state: bytes


_held: Held | None = None


def keep(held: Held | None) -> None:
    """Keep a state in this process for the next world; None drops what is kept."""
    global _held
    _held = held


def take() -> Held:
    """Return the kept state, and stop keeping it.

    Raises:
        CommError: it keeps nothing.
    """
    held = _held
    keep(None)
    if held is None:
        raise CommError("this process keeps no tables of the ranks before")
    return held


def hold(live: LiveRun) -> None:
    """Keep what this rank holds for the next world; all ranks call it together."""
    # replicas have drifted apart, and each new rank takes a row from one of them
    live.model.sync()
    held = Held(
        rank=live.rank % live.writers,
        world_rank=live.rank,
        world_size=live.world_size,
        plan=live.model.plan,
        states=_on_cpu(live.model.shard_states()),
        state=live.state().to_bytes(),
    )
    keep(held)


def _on_cpu(states: Sequence[ShardState]) -> list[ShardState]:
    """Copy shard states to the CPU, since the next model needs the memory of a GPU."""
    copies = []
    for state in states:
        optimizer = {name: tensor.detach().cpu() for name, tensor in state.optimizer.items()}
        copies.append(ShardState(state.shard, state.weight.detach().cpu(), optimizer, state.ids))
    return copies


def may_keep(wanted: int | None, states: Sequence[ShardState], group_size: int | None) -> bool:
    """Return True if the tables are kept for the next world; False if the run must save instead.

    All ranks call it together at the end of their task.

    Args:
        wanted: number of ranks that this rank was asked to go on with; 0 without a request, None
            where a transfer is not possible.
        states: shard states of this rank.
        group_size: ranks that hold every table together; None where all do.
    Returns:
        the same on every rank: False where no rank was asked, or where a host has no memory for the
        old tables, what comes from other ranks and the new tables side by side.
    """
    size = sum(t.numel() * t.element_size() for s in states for t in s.tensors().values())
    told = gather_objects((wanted, host_identity(), size, available_bytes()))
    asked = [wanted for wanted, *_ in told]
    ranks = max(asked) if None not in asked else 0
    if not ranks:
        return False
    copies = len(told) // (group_size or len(told))
    each = sum(size for _, _, size, _ in told) / copies / (group_size or ranks)
    for host in {host for _, host, *_ in told}:
        here = [available for _, its_host, _, available in told if its_host == host]
        # all new ranks may come to one host
        most = len(here) + max(0, ranks - len(told))
        if 2 * most * each * _MARGIN > min(here):
            return False
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class HandOverTask:
    """Transfer of tables between two worlds; the first `ranks` ranks are the new world.

    Attributes:
        plan: sharding plan of the new world.
        ranks: number of ranks of the new world.
        group_size: number of its ranks that hold every table together; None for all.
    """

    plan: ShardingPlan
    ranks: int
    group_size: int | None = None

    def run(self, context: RankContext) -> int:
        """Send the rows that change their rank, and return the bytes that this rank sent.

        Raises:
            CommError: a rank of the world before is not here, or is gone.
        """
        context.phase("passing tables on")
        held, rank, is_alone = _held, context.seat.rank, context.seat.world_size == 1
        places = gather_objects(None if held is None else (held.world_rank, held.world_size))
        there = [place for place in places if place is not None]
        if not there or sorted(place for place, _ in there) != list(range(there[0][1])):
            raise CommError(f"only {len(there)} ranks still keep tables of the world before")
        first = next(rank for rank, place in enumerate(places) if place is not None)
        common: Held = plain.broadcast(held and replace(held, states=()), first)
        group = self.group_size or self.ranks
        states = [] if held is None else held.states
        pieces, sent = pass_on(
            common.plan,
            # the driver plans for the rows that tables begin with
            self.plan.with_rows(common.plan.rows),
            gather_objects(None if held is None else held.rank),
            [taker % group if taker < self.ranks else None for taker in range(len(places))],
            states,
            LocalExchange() if is_alone else exchange_for(None, torch.device("cpu")),
            columns_of(states, gather_objects),
        )
        keep(replace(common, states=pieces) if rank < self.ranks else None)
        return sent
