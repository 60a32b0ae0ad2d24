"""Exact worlds of dynamic tables on real processes, over gloo and in place; and with ids that are
sent ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rayrec.comm.choose import Transport, exchange_for
from rayrec.distributed import DistributedModelParallel
from tests.ranks import RankPool
from tests.sim.dynamic_worlds import CPU, SEED, kjt_of, straight
from tests.sim.exact_worlds import check_twins, exact_world
from tests.sim.known_ids import Known, check_same_bits, known_ids
from tests.worlds import output_of


def part(rank: int, world_size: int, seed: int, in_place: bool) -> Known:
    """What this rank knows in the end."""
    transport = Transport.SHARED_MEMORY if in_place else Transport.PROCESS_GROUP

    def run_here(_: int, rank_main: Callable[[Any, torch.device], Any]) -> list[Any]:
        return [rank_main(exchange_for(None, CPU, transport), CPU)]

    return replace(exact_world(seed, world_size), in_place=in_place).known(run_here)


def together(parts: list[Known]) -> Known:
    """What all ranks know, of whom each may know the values of some columns."""
    known: Known = {}
    for one in parts:
        for table, rows in one.items():
            for key, told in rows.items():
                known.setdefault(table, {}).setdefault(key, {}).update(told)
    return known


@pytest.mark.seeds(range(20))
def test_real_ranks_know_what_one_rank_knows_bit_for_bit(ranks: RankPool, seed: int) -> None:
    size = 2 + seed % 3
    world = exact_world(seed, size)
    wanted = world.known_to_one()
    for in_place in (False, True):
        known = together(ranks.run(size, part, seed, in_place))
        check_same_bits(known, {table: rows for table, rows in wanted.items() if rows})
    check_twins(world, wanted)


def trained(
    rank: int, world_size: int, seed: int, ahead: bool
) -> tuple[list[torch.Tensor], Known, list[bool]]:
    """Outputs of this rank, what it knows in the end, and which batches were sent ahead."""
    world = exact_world(seed, world_size)
    model = DistributedModelParallel(
        world.model.collection("meta"),
        plan=world.model.plan,
        sparse_optimizer=world.model.optimizer,
        seed=SEED,
        prefetch=ahead,
    )
    batches = [
        kjt_of(step[rank], times[rank], world.model.weighted)
        for step, times in zip(world.steps, world.times, strict=True)
    ]
    outputs, started = [], []
    for number, batch in enumerate(batches):
        output = output_of(model, batch)
        if ahead and number + 1 < len(batches):
            # before this step has admitted ids of its own, or taken rows back
            started.append(model.prefetch(batches[number + 1]))
        (world_size * straight(output)).backward()
        outputs.append(output.detach().clone())
    model.close()
    return outputs, known_ids(model.shard_states()), started


@pytest.mark.seeds(range(10))
def test_ids_that_are_sent_ahead_wait_for_the_step_before(ranks: RankPool, seed: int) -> None:
    wanted, found = (ranks.run(2, trained, seed, ahead) for ahead in (False, True))
    for (outputs, known, _), (ahead, known_ahead, started) in zip(wanted, found, strict=True):
        assert all(map(torch.equal, outputs, ahead))
        assert started and all(started)
        check_same_bits(known_ahead, known)
