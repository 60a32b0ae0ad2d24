"""What counts as touched holds every row that training changed, and is what was looked up."""

from __future__ import annotations

import copy

import pytest
import torch

from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.layout import Replicated, ShardingPlan, TablePlacement, row_wise, takes_two_hops
from tests.draws import STEPS, draw
from tests.simulation import SimulatedWorld, batches_of, sharded_world, targets_of, train_step
from tests.worlds import World


def rows_looked_up(world: World, batches) -> dict[str, set[int]]:
    """Per table, the rows that some rank's batch reads, step by step together."""
    read: dict[str, set[int]] = {table.name: set() for table in world.tables}
    for kjt in batches:
        for table in world.tables:
            for feature in table.feature_names:
                read[table.name] |= set(kjt[feature].values().tolist())
    return read


def run(world: World, share: bool, steps: int = STEPS):
    """Per rank and step: what was touched, and the tensors before and after."""
    batches = batches_of(world, steps)
    targets = targets_of(world, batches)

    def rank_main(exchange):
        options = EngineOptions(share_tables=share, track_rows=True)
        modules, engine = sharded_world(world, exchange, options, "cpu")
        seen = []
        for step in range(steps):
            before = [copy.deepcopy(state.tensors()) for state in engine.shard_states()]
            mark = engine.touched.mark()
            train_step(modules, batches[step][exchange.rank], targets[step][exchange.rank])
            after = [copy.deepcopy(state.tensors()) for state in engine.shard_states()]
            seen.append((engine.touched.since(mark), before, after))
        shards = [state.shard for state in engine.shard_states()]
        return shards, seen, engine.touched.since(0)

    torch.manual_seed(world.seed)
    return batches, SimulatedWorld(world.world_size).run(rank_main)


@pytest.mark.seeds(range(120))
def test_touched_rows_are_those_looked_up_and_hold_all_that_changed(seed: int) -> None:
    drawn = draw(seed)
    world = drawn.world
    world.optimizer = drawn.optimizers  # type: ignore[assignment]  # one per table
    batches, ranks = run(world, share=seed % 2 == 0)
    looked_up = [rows_looked_up(world, of_step) for of_step in batches]
    for shards, seen, ever in ranks:
        all_steps: dict = {shard: set() for shard in shards}
        for step, (touched, before, after) in enumerate(seen):
            assert list(touched) == shards
            for i, shard in enumerate(shards):
                rows = touched[shard].tolist()
                mine = looked_up[step][shard.table] & set(shard.rows)
                assert rows == sorted(mine), f"{shard} in step {step}"
                for name, tensor in after[i].items():
                    changed = (tensor != before[i][name]).view(len(shard.rows), -1).any(1)
                    numbers = changed.nonzero().view(-1) + shard.rows.start
                    assert set(numbers.tolist()) <= mine, f"{name} of {shard} in step {step}"
                all_steps[shard] |= mine
        assert {shard: set(rows.tolist()) for shard, rows in ever.items()} == all_steps


def test_rows_that_are_only_read_are_not_touched() -> None:
    """Evaluation looks rows up without a backward pass."""
    world = draw(3).world
    batches = batches_of(world, 1)

    def rank_main(exchange):
        options = EngineOptions(share_tables=False, track_rows=True)
        modules, engine = sharded_world(world, exchange, options, "cpu")
        with torch.no_grad():
            for module in modules:
                module(batches[0][exchange.rank])
        return sum(rows.numel() for rows in engine.touched.since(0).values())

    assert set(SimulatedWorld(world.world_size).run(rank_main)) == {0}


def test_every_row_counts_as_touched_after_a_reshard() -> None:
    world = draw(5).world
    placements = {}
    for table in world.tables:
        placements[table.name] = TablePlacement(row_wise(table, range(world.world_size)))
    other = ShardingPlan(world_size=world.world_size, tables=placements, hosts=world.hosts)

    def rank_main(exchange):
        options = EngineOptions(share_tables=False, track_rows=True)
        _, engine = sharded_world(world, exchange, options, "cpu")
        mark = engine.touched.mark()
        engine.reshard(other)
        return {shard: rows.tolist() for shard, rows in engine.touched.since(mark).items()}

    for rank, touched in enumerate(SimulatedWorld(world.world_size).run(rank_main)):
        assert touched == {shard: list(shard.rows) for shard in other.shards(rank)}


def test_nothing_is_kept_unless_it_is_asked_for() -> None:
    world = draw(3).world

    def rank_main(exchange):
        _, engine = sharded_world(world, exchange, device="cpu")
        return engine.touched, [lookup.stamps for lookup in engine.lookups.values()]

    for touched, stamps in SimulatedWorld(world.world_size).run(rank_main):
        assert touched is None and set(stamps) <= {None}


def test_the_draws_hold_the_ways_that_matter() -> None:
    """Replicated tables, two hops, sequences and rows in place all come among the first seeds."""
    times = {"replicated": 0, "two hops": 0, "sequence": 0, "pooled": 0, "in place": 0}
    for seed in range(24):
        world = draw(seed).world
        for collection, tables in enumerate(world.collections):
            sequence = world.is_sequence(collection)
            times["sequence" if sequence else "pooled"] += 1
            for table in tables:
                layout = world.plan.tables[table.name].layout
                times["replicated"] += isinstance(layout, Replicated)
                times["two hops"] += not sequence and takes_two_hops(layout, world.hosts)
                times["in place"] += seed % 2 == 0 and not takes_two_hops(layout, world.hosts)
    assert min(times.values()) >= 5, times
