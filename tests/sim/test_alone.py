"""A rank alone: where one kernel makes a collection's output, nothing is put together behind it."""

from __future__ import annotations

import pytest

from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.distributed.program.groups import GroupKey
from rayrec.distributed.ways.message_leg import MessageLeg
from rayrec.layout import ShardingPlan, TablePlacement, data_parallel, table_wise
from tests.simulation import STEPS, batches_of, check_equals_unsharded, check_same, run_sharded
from tests.simulation import targets_of as targets
from tests.worlds import World, random_world

SEEDS = range(60)
EXCHANGED = EngineOptions(share_tables=False)


def alone(seed: int) -> World:
    """A world of one rank: whole tables, replicas, or the cuts that the seed draws."""
    varying = seed % 5 == 0
    world = random_world(seed, hosts=[[0]], sequences=seed % 4 == 0, varying=varying)
    if seed % 3:
        tables = {
            table.name: TablePlacement(
                data_parallel(table, range(1)) if seed % 7 == 0 else table_wise(table, 0)
            )
            for table in world.tables
        }
        world.plan = ShardingPlan(world_size=1, tables=tables, hosts=world.hosts)
    return world


@pytest.mark.seeds(SEEDS)
def test_it_trains_as_the_unsharded_tables(seed: int) -> None:
    check_equals_unsharded(alone(seed), meta=seed % 2 == 0, options=EXCHANGED)


@pytest.mark.seeds(SEEDS)
def test_it_trains_bit_for_bit_as_where_rows_are_joined(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = alone(seed)
    batches = batches_of(world, STEPS)
    found = run_sharded(world, batches, targets(world, batches), meta=True, options=EXCHANGED)
    monkeypatch.setattr(MessageLeg, "_as_looked_up", None)
    wanted = run_sharded(world, batches, targets(world, batches), meta=True, options=EXCHANGED)
    check_same(found, wanted)


def test_outputs_of_kernels_are_taken_as_they_are_in_many_worlds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the others could hold because the case never came."""
    real, taken = MessageLeg._as_looked_up.fget, list[tuple[GroupKey, ...] | None]()

    def see(leg: MessageLeg) -> tuple[GroupKey, ...] | None:
        taken.append(real(leg))
        return taken[-1]

    monkeypatch.setattr(MessageLeg, "_as_looked_up", property(see))
    for seed in range(20):
        world = alone(seed)
        batches = batches_of(world, STEPS)
        run_sharded(world, batches, targets(world, batches), meta=True, options=EXCHANGED)
    as_they_are = [keys for keys in taken if keys is not None]
    assert len(as_they_are) > 8
    assert any(len(keys) > 1 for keys in as_they_are)  # of several collections
    assert any(keys is None for keys in taken)
