"""The search's parts: bytes of every rank's own batch count, exactness of put and take, and needless splits are undone."""

from __future__ import annotations

import random

import pytest

from rayrec.errors import PlanError
from rayrec.layout import KINDS, EmbeddingBagConfig, Topology
from rayrec.planner import EmbeddingShardingPlanner, ParameterConstraints
from rayrec.planner.candidates import enumerate_candidates
from rayrec.planner.costs import CostModel
from rayrec.planner.options import Option, price_options
from rayrec.planner.packing import Choice, Packing, _tidy
from rayrec.planner.work import table_work


def priced(topology: Topology, rows: int, dim: int = 64, pooling_factor: float = 5.0) -> tuple[Option, ...]:
    table = EmbeddingBagConfig(rows, dim, "t", feature_names=["f"])
    work = table_work(table, ParameterConstraints(pooling_factor=pooling_factor), 512, topology.world_size)
    return price_options(work, enumerate_candidates(table, topology, KINDS), CostModel(topology))


def test_a_rank_without_tables_still_needs_room_for_its_batch() -> None:
    table = EmbeddingBagConfig(10, 64, "t", feature_names=["f"])
    roomy = Topology(hosts=((0, 1),), memory_bytes=(10**9, 10**6))
    tight = Topology(hosts=((0, 1),), memory_bytes=(10**9, 10**5))  # rows and gradients of 512 bags of 64 floats are 262 kB
    plan = EmbeddingShardingPlanner(roomy, 512, kinds=["table_wise"]).plan([table])
    assert plan.estimates is not None and 2 * 512 * 64 * 4 <= plan.estimates.ranks[1].memory_bytes <= 10**6
    with pytest.raises(PlanError, match=r"the tightest rank 100 kB for buffers"):
        EmbeddingShardingPlanner(tight, 512, kinds=["table_wise"]).plan([table])


@pytest.mark.parametrize("seed", range(20))
def test_taking_out_what_was_put_in_leaves_nothing(seed: int) -> None:
    rng = random.Random(seed)
    topology = Topology(hosts=((0,), (1, 2, 3)), memory_bytes=(10**10,) * 4)
    packing = Packing(topology)
    for table in range(6):
        choice = packing.best(priced(topology, rng.randrange(1, 10**5)), rng.choice([1, 8, 64]), 1e-3)
        assert choice is not None
        packing.put(table, choice)
    for table in rng.sample(range(6), 6):
        packing.take(table)
    assert packing.used == [0] * 4 and packing.home_bytes == 0 and not packing.choices
    assert packing.loads == pytest.approx([0.0] * 4, abs=1e-12)


def test_needless_splits_are_undone_and_the_slowest_rank_gets_no_slower() -> None:
    topology = Topology.local(4, memory_bytes=10**10)
    giant, small = priced(topology, 10**6, pooling_factor=100.0), priced(topology, 1000, pooling_factor=1.0)
    packing = Packing(topology)
    whole = next(option for option in giant if option.candidate.kind == "table_wise")
    split = next(option for option in small if option.candidate.kind == "row_wise" and option.candidate.num_ranks == 4)
    packing.put(0, Choice(whole, (0,)))
    for table in (1, 2, 3):
        packing.put(table, Choice(split, (0, 1, 2, 3)))
    before, work = max(packing.loads), sum(packing.loads)
    _tidy(packing, [giant, small, small, small], [0, 1, 2, 3])
    assert max(packing.loads) <= before and sum(packing.loads) < work
    assert all(packing.choices[table].option.candidate.kind == "table_wise" for table in (1, 2, 3))


def test_a_candidate_takes_the_least_loaded_ranks_that_have_room() -> None:
    topology = Topology(hosts=((0, 1, 2),), memory_bytes=(10**9, 10**6, 10**9))
    options = [option for option in priced(topology, 100_000) if option.candidate.num_ranks == 1]
    packing = Packing(topology)
    packing.put(0, Choice(options[0], (0,)))
    choice = packing.best(options, 4, 1.0)  # rank 1 is idle but has no room, rank 0 is busy
    assert choice is not None and choice.ranks == (2,)
