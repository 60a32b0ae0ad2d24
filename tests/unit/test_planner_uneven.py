"""Uneven cuts: they level ranks, obey what even cuts obey, and make a plan where only unequal
memory is left.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from rayrec.layout import (
    DynamicConfig,
    EmbeddingBagConfig,
    Layout,
    TableLayout,
    TablePlacement,
    Topology,
)
from rayrec.layout.geometry import weighted_cuts
from rayrec.planner import EmbeddingShardingPlanner, ParameterConstraints, manual_plan
from rayrec.planner.costs import CostModel
from rayrec.planner.estimate import estimate_ranks
from rayrec.planner.request import PlanRequest
from rayrec.planner.search import pack
from rayrec.planner.uneven import Recutter


def problem(seed: int) -> PlanRequest:
    """A large table that is cut by rows or columns beside tables that stay whole, so that even cuts
    leave ranks uneven.
    """
    rng = random.Random(seed)
    world = rng.choice([2, 3, 4])
    kinds = rng.choice([["row_wise"], ["column_wise"], None])
    tables = [
        EmbeddingBagConfig(
            rng.randrange(10**5, 10**6),
            61 if seed % 4 == 3 else 64,
            "large",
            feature_names=["large"],
        )
    ]
    tables += [
        EmbeddingBagConfig(rng.randrange(10, 10**4), 32, f"t{i}", feature_names=[f"t{i}"])
        for i in range(world - 1)
    ]
    limits = {
        "large": ParameterConstraints(
            kinds=kinds, pooling_factor=rng.uniform(20, 60), min_partition=rng.choice([None, 8])
        )
    }
    limits |= {
        f"t{i}": ParameterConstraints(kinds=["table_wise"], pooling_factor=rng.uniform(1, 10))
        for i in range(world - 1)
    }
    return EmbeddingShardingPlanner(
        Topology.local(world, memory_bytes=1 << 36), 1024, limits
    ).request(tables)


def packed(request: PlanRequest, recutter: Recutter | None) -> tuple[dict[str, Layout], float]:
    """Layouts by table, and the seconds of the slowest rank."""
    choices = pack(request.items(), request.topology, recutter)
    pairs = zip(request.tables, choices, strict=True)
    layouts = {table.name: choice.layouts[0] for table, choice in pairs}
    placed = {name: TablePlacement(layout) for name, layout in layouts.items()}
    return layouts, max(rank.total_s for rank in estimate_ranks(request, placed))


@pytest.mark.seeds(range(40))
def test_uneven_cuts_never_make_the_slowest_rank_slower(seed: int) -> None:
    request = problem(seed)
    works = request.works()
    recutter = Recutter(
        works,
        CostModel(request.topology),
        [request.constraints[t.name].min_partition for t in request.tables],
    )
    found = []
    for each in (None, recutter):
        layouts, seconds = packed(request, each)
        found.append(seconds)
        large = layouts["large"]
        assert isinstance(large, TableLayout) and large.shape == (
            request.tables[0].num_embeddings,
            request.tables[0].embedding_dim,
        )
        if large.num_col_blocks > 1:
            assert min(b - a for a, b in pairwise(large.col_cuts)) >= (
                request.constraints["large"].min_partition or 4
            )
    assert found[1] <= found[0] * (1 + 1e-9)


def test_some_plans_are_a_good_deal_faster() -> None:
    gains = []
    for seed in range(40):
        # where rows travel, a rank's share of them counts most
        request = replace(problem(seed), share_tables=False)
        works = request.works()
        recutter = Recutter(works, CostModel(request.topology), [None] * len(works))
        gains.append(packed(request, None)[1] / packed(request, recutter)[1])
    assert max(gains) > 1.1 and sum(gain > 1.02 for gain in gains) >= 10, gains


def test_rows_follow_the_memory_of_unequal_ranks() -> None:
    """16 MB of rows on 14 and 8 MB: halves do not fit, shares by memory do."""
    table = EmbeddingBagConfig(250_000, 16, "t", feature_names=["t"])
    topology = Topology(hosts=((0, 1),), memory_bytes=(14_000_000, 8_000_000))
    plan = EmbeddingShardingPlanner(topology, 64, kinds=["row_wise"]).plan([table])
    layout = plan.tables["t"].layout
    assert isinstance(layout, TableLayout) and plan.estimates is not None
    first, second = (b - a for a, b in pairwise(layout.row_cuts))
    assert first > 1.4 * second
    assert all(
        rank.memory_bytes <= limit
        for rank, limit in zip(plan.estimates.ranks, topology.memory_bytes, strict=True)
    )


@pytest.mark.seeds(range(20))
def test_dynamic_tables_are_cut_between_blocks_for_ranks_of_unequal_memory(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(2, 4)
    hosts = rng.choice([(tuple(range(ranks)),), tuple((rank,) for rank in range(ranks))])
    memory = tuple(rng.randint(1, 3) * 100_000_000 + rank for rank in range(ranks))
    topology = Topology(hosts=hosts, memory_bytes=memory)
    tables = []
    for number in range(4):
        blocks = rng.choice([1, 2, 8])
        rule = DynamicConfig(blocks=blocks)
        rows = blocks * rng.randint(100, 9000)
        name = f"t{number}"
        tables.append(EmbeddingBagConfig(rows, 16, name, feature_names=[name], dynamic=rule))
    for plan in (
        manual_plan(tables, "row_wise", topology),
        EmbeddingShardingPlanner(topology, 64, kinds=["row_wise", "table_wise"]).plan(tables),
    ):
        plan.check(tables, ranks)


@pytest.mark.seeds(range(50))
def test_weighted_cuts_tile_and_follow_the_weights(seed: int) -> None:
    rng = random.Random(seed)
    weights = [rng.choice([0, 1, 5, 100]) + rng.random() for _ in range(rng.randrange(1, 9))]
    multiple = rng.choice([1, 1, 7])
    size = rng.randrange(len(weights), 1000) * multiple
    sizes = [b - a for a, b in pairwise(weighted_cuts(size, weights, multiple))]
    assert len(sizes) == len(weights) and sum(sizes) == size and min(sizes) >= 1
    assert not any(one % multiple for one in sizes)
    assert all(
        abs(got - size * weight / sum(weights)) <= (len(weights) + 1) * multiple
        for got, weight in zip(sizes, weights, strict=True)
    )
