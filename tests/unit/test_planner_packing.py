"""The search's parts: bytes of every rank's own batch count, and put and take are exact."""

from __future__ import annotations

import random

import pytest

from rayrec.errors import PlanError
from rayrec.layout import KINDS, EmbeddingBagConfig, Topology
from rayrec.planner import EmbeddingShardingPlanner, ParameterConstraints
from rayrec.planner.candidates import enumerate_candidates, find_sites
from rayrec.planner.costs import CostModel
from rayrec.planner.greedy import _least_harm, place_all
from rayrec.planner.options import Item, Option
from rayrec.planner.packing import Choice, Packing
from rayrec.planner.pricing import price_options
from rayrec.planner.work import table_work


def priced(
    topology: Topology, rows: int, dim: int = 64, pooling_factor: float = 5.0
) -> tuple[Option, ...]:
    table = EmbeddingBagConfig(rows, dim, "t", feature_names=["f"])
    work = table_work(
        table, ParameterConstraints(pooling_factor=pooling_factor), 512, topology.world_size
    )
    return price_options(
        work, enumerate_candidates(table, find_sites(topology), KINDS), CostModel(topology)
    )


def test_a_rank_without_tables_still_needs_room_for_its_batch() -> None:
    table = EmbeddingBagConfig(10, 64, "t", feature_names=["f"])
    roomy = Topology(hosts=((0, 1),), memory_bytes=(10**9, 10**6))
    # rows and gradients of 512 bags of 64 floats are 262 kB
    tight = Topology(hosts=((0, 1),), memory_bytes=(10**9, 10**5))
    plan = EmbeddingShardingPlanner(roomy, 512, kinds=["table_wise"]).plan([table])
    assert (
        plan.estimates is not None
        and 2 * 512 * 64 * 4 <= plan.estimates.ranks[1].memory_bytes <= 10**6
    )
    with pytest.raises(PlanError, match=r"the tightest rank 100 kB for buffers"):
        EmbeddingShardingPlanner(tight, 512, kinds=["table_wise"]).plan([table])


@pytest.mark.seeds(range(20))
def test_taking_out_what_was_put_in_leaves_nothing(seed: int) -> None:
    rng = random.Random(seed)
    topology = Topology(hosts=((0,), (1, 2, 3)), memory_bytes=(10**10,) * 4)
    items = [Item.from_options((i,), priced(topology, rng.randrange(1, 10**5))) for i in range(6)]
    packing = Packing(topology, items, topology.memory_bytes)
    for item in range(6):
        choice = _least_harm(packing, item)
        assert choice is not None
        packing.put(item, choice)
    for item in rng.sample(range(6), 6):
        packing.take(item)
    assert (
        packing.used == [0] * 4
        and packing.home_bytes == 0
        and not packing.choices
        and not any(packing.on_rank)
    )
    assert [*packing.loads, packing.home_s] == pytest.approx([0.0] * 5, abs=1e-12)


@pytest.mark.seeds(range(20))
def test_ranks_come_by_load_and_what_may_not_be_held_finds_no_place(seed: int) -> None:
    rng = random.Random(seed)
    topology = Topology(hosts=(tuple(range(12)),), memory_bytes=(10**10,) * 12)
    items = [Item.from_options((i,), priced(topology, rng.randrange(1, 10**5))) for i in range(8)]
    packing, held = Packing(topology, items, topology.memory_bytes), 0
    for _ in range(40):
        item = rng.randrange(8)
        if item in packing.choices:
            packing.take(item)
        option = rng.choice(items[item].options)
        top = rng.uniform(0.5, 3.0) * option.peak_s
        found = packing.find(item, option, top)
        held += packing.may_hold(option, top)
        assert found is None or packing.may_hold(option, top)
        packing.put(item, Choice(option, tuple(sorted(rng.sample(range(12), option.num_ranks)))))
        if rng.random() < 0.7:
            assert packing.order() == sorted(range(12), key=packing.loads.__getitem__)
    assert 0 < held < 40


def test_a_rank_that_was_filled_since_has_no_room_for_larger_buffers() -> None:
    topology = Topology(hosts=((0, 1), (2, 3)), memory_bytes=(10**10,) * 4)
    items = [Item.from_options((i,), priced(topology, 1000)) for i in range(2)]
    whole = items[0].options[0]
    split = next(o for o in items[1].options if o.num_ranks == 2)
    assert whole.num_ranks == 1 and split.home_bytes > items[1].options[0].home_bytes
    for spare, has_room in ((0, False), (split.home_bytes, True)):
        packing = Packing(topology, items, topology.memory_bytes)
        packing.limits[0] = packing.reserve + whole.num_bytes[0] + spare
        assert packing.find(1, split) is not None
        packing.put(0, Choice(whole, (0,)))
        assert (packing.find(1, split) is not None) == has_room


def test_an_option_takes_the_least_loaded_ranks_that_have_room() -> None:
    topology = Topology(hosts=((0, 1, 2),), memory_bytes=(10**9, 2 * 10**6, 10**9))
    (whole,) = [option for option in priced(topology, 100_000) if option.num_ranks == 1]
    packing = Packing(topology, [Item((0,), (whole,))] * 3, topology.memory_bytes)
    packing.put(0, Choice(whole, (0,)))
    choice = packing.find(1, whole)  # rank 1 is idle but has no room, rank 0 is busy
    assert choice is not None and choice.ranks == (2,)
    assert packing.find(1, whole, ceiling=whole.peak_s * 0.9) is None
    packing.put(1, choice)
    assert packing.find(2, whole) in (Choice(whole, (0,)), Choice(whole, (2,)))  # both are as busy


@pytest.mark.parametrize("hosts", [((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0,), (1, 2, 3))])
def test_an_option_that_was_left_out_is_beaten_wherever_it_goes(
    hosts: tuple[tuple[int, ...], ...],
) -> None:
    """A packing of one item is no slower for the options that were dropped."""
    topology = Topology(hosts=hosts, memory_bytes=(10**10,) * 4)
    for rows in (10, 10**4, 10**6):
        options = priced(topology, rows)
        item = Item.from_options((0,), options)
        packings = [
            Packing(topology, [each], topology.memory_bytes) for each in (item, Item((0,), options))
        ]
        kept, every = (_least_harm(packing, 0) for packing in packings)
        assert kept is not None and every is not None and len(item.options) <= len(options)
        assert packings[0].lifted(kept) == packings[1].lifted(every)


def test_a_table_that_fills_a_rank_leaves_room_for_the_buffers_of_those_that_follow() -> None:
    """Every rank holds buffers of all tables, so the large one must be split although it alone
    would fit a rank.
    """
    topology = Topology.local(4, memory_bytes=30_000_000)
    items = [
        Item.from_options((i,), priced(topology, rows, pooling_factor=5.0))
        for i, rows in enumerate([90_000, *[10] * 20])
    ]
    packing = Packing(topology, items, topology.memory_bytes)
    alone = Packing(topology, items[:1], topology.memory_bytes)
    whole = next(option for option in items[0].options if option.num_ranks == 1)
    assert alone.find(0, whole) is not None and packing.find(0, whole) is None
    assert (
        place_all(packing, range(21), 1.0) is None
        and min(packing.free_bytes()) >= 0
        and packing.reserve == 0
    )
