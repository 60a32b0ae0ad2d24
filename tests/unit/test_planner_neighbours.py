"""Tables that follow each other lie on one rank where that costs nothing that counts."""

from __future__ import annotations

import itertools
import random

import pytest

from rayrec.layout import EmbeddingBagConfig, Topology
from rayrec.planner import EmbeddingShardingPlanner
from rayrec.planner.greedy import packed
from rayrec.planner.neighbours import seat_neighbours
from rayrec.planner.options import Item
from rayrec.planner.packing import Choice


def runs_of(ranks: list[tuple[int, ...]]) -> int:
    return 1 + sum(a != b for a, b in itertools.pairwise(ranks))


def by_work(items: list[Item], world: int) -> list[Choice]:
    """Every item whole on the rank with least work so far, most work first."""
    loads, found = [0.0] * world, {}
    for i in sorted(range(len(items)), key=lambda i: -items[i].options[0].work_s):
        rank = loads.index(min(loads))
        loads[rank] += items[i].options[0].work_s
        found[i] = Choice(items[i].options[0], (rank,))
    return [found[i] for i in range(len(items))]


@pytest.mark.seeds(range(20))
def test_seats_are_in_order_and_no_rank_gets_slower_or_too_full(seed: int) -> None:
    rng = random.Random(seed)
    world, count = rng.choice([2, 4, 8]), rng.randint(20, 60)
    tables = [
        EmbeddingBagConfig(
            rng.choice([100, 10_000, 1_000_000]), 64, name=f"t{i}", feature_names=[f"f{i}"]
        )
        for i in range(count)
    ]
    rows = sum(t.num_embeddings for t in tables)
    memory = int(rows * 64 * 4 / world * rng.choice([1.3, 3, 30])) + (900 << 20)
    topology = Topology.local(world, memory_bytes=memory)
    request = EmbeddingShardingPlanner(topology, 1024, kinds=["table_wise"]).request(tables)
    items = request.items()
    before = by_work(items, world)
    packing = packed(topology, items, topology.memory_bytes, dict(enumerate(before)))
    after = seat_neighbours(packing)

    def totals(choices):
        seconds, num_bytes = [0.0] * world, [sum(c.option.home_bytes for c in choices)] * world
        for choice in choices:
            seconds[choice.ranks[0]] += choice.option.seconds[world][0]
            num_bytes[choice.ranks[0]] += choice.option.num_bytes[0]
        return seconds, num_bytes

    assert [c.option for c in after] == [c.option for c in before]
    (old_s, old_bytes), (new_s, new_bytes) = totals(before), totals(after)
    assert max(new_s) <= max(old_s) * 1.0100001 and max(new_bytes) <= max(memory, *old_bytes)
    assert runs_of([c.ranks for c in after]) <= runs_of([c.ranks for c in before])
    assert after == seat_neighbours(packing)
    strict = seat_neighbours(packing, more=1.0)
    assert max(totals(strict)[0]) <= max(old_s) * (1 + 1e-12)


def test_equal_tables_lie_side_by_side() -> None:
    tables = [
        EmbeddingBagConfig(1000, 64, name=f"t{i}", feature_names=[f"f{i}"]) for i in range(24)
    ]
    plan = EmbeddingShardingPlanner(
        Topology.local(4, memory_bytes=8 << 30), 256, kinds=["table_wise"]
    ).plan(tables)
    assert [plan.tables[t.name].layout.owners[0][0] for t in tables] == sorted([0, 1, 2, 3] * 6)
