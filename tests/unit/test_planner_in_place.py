"""Prices and memory where CPU ranks of one host read rows in place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rayrec.layout import (
    DataType,
    DynamicConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    Layout,
    Topology,
    column_wise,
    data_parallel,
    grid_shard,
    row_wise,
    table_wise,
)
from rayrec.planner import EmbeddingShardingPlanner
from rayrec.planner.constraints import ParameterConstraints
from rayrec.planner.costs import CostModel
from rayrec.planner.request import PlanRequest
from rayrec.planner.work import table_work
from tests.unit.plan_worlds import memory_by_rank

TABLE = EmbeddingBagConfig(100_000, 64, name="t", feature_names=["f", "g"])
HOST = Topology.local(4, memory_bytes=1 << 32)
LAYOUTS = [
    table_wise(TABLE, 1),
    row_wise(TABLE, range(4)),
    column_wise(TABLE, range(4)),
    grid_shard(TABLE, ((0, 1, 2, 3),)),
    data_parallel(TABLE, range(4)),
]


def request(**changes) -> PlanRequest:
    return replace(PlanRequest(tables=[TABLE], topology=HOST, batch_size=512), **changes)


@pytest.mark.parametrize(
    "changes, shared",
    [
        ({}, True),
        ({"share_tables": False}, False),
        ({"topology": Topology.local(4, memory_bytes=1 << 32, device="cuda")}, False),
        ({"topology": Topology.uniform(2, 2, 1 << 32)}, False),
        ({"topology": Topology.local(1, memory_bytes=1 << 32)}, True),
        ({"sparse_optimizer": "adam"}, True),
        ({"qcomms_backward": "fp16"}, False),
        ({"tables": [replace(TABLE, data_type=DataType.FP16)]}, True),
        ({"tables": [EmbeddingConfig(100, 64, name="t", feature_names=["f"])]}, True),
    ],
)
def test_what_is_read_in_place(changes, shared: bool) -> None:
    assert request(**changes).works()[0].in_place == shared


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: type(layout).__name__)
def test_no_row_travels_and_every_rank_looks_up_its_own_bags(layout: Layout) -> None:
    model = CostModel(HOST)
    work = table_work(TABLE, ParameterConstraints(pooling_factor=3), 512, 4, share_tables=True)
    away = table_work(TABLE, ParameterConstraints(pooling_factor=3), 512, 4)
    home = model.layout_home_amounts(work, layout)
    assert home.output.stream == 0 and home.lookup.items == 512 * 2 * 3 * (
        4 if layout is LAYOUTS[2] else 1
    )
    assert home.gradient.stream == 2 * 4 * 512 * 2 * 64
    for rank, amounts in model.amounts(work, layout).items():
        assert amounts.lookup == amounts.output == amounts.gradient == type(amounts.lookup)()
        assert amounts.update == model.amounts(away, layout)[rank].update
        # all bags, where compact ones left some out
        assert amounts.input.near >= model.amounts(away, layout)[rank].input.near


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: type(layout).__name__)
def test_a_dynamic_table_takes_longer_than_a_static_one(layout: Layout, in_place: bool) -> None:
    dynamic = replace(TABLE, feature_names=["f", "g"], dynamic=DynamicConfig(blocks=4))
    model, given = CostModel(HOST), ParameterConstraints(pooling_factor=3)
    static_s, dynamic_s = (
        model.price(table_work(table, given, 512, 4, share_tables=in_place), layout)
        for table in (TABLE, dynamic)
    )
    assert static_s.keys() == dynamic_s.keys()
    for rank, cost in dynamic_s.items():
        assert cost.total_s > static_s[rank].total_s
        # an owner finds the row of every id that it gets
        ids = model.amounts(table_work(TABLE, given, 512, 4), layout)[rank].update.items
        assert 20e-9 < (cost.input_s - static_s[rank].input_s) / ids < 100e-9


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: type(layout).__name__)
def test_buffers_of_rows_are_saved(layout: Layout) -> None:
    work = table_work(TABLE, ParameterConstraints(), 512, 4, share_tables=True)
    shared, exchanged = (
        memory_by_rank(w, layout, "rowwise_adagrad") for w in (work, replace(work, in_place=False))
    )
    for a, b in zip(shared, exchanged, strict=True):
        assert (a.weight_bytes, a.optimizer_bytes) == (b.weight_bytes, b.optimizer_bytes)
    assert max(a.buffer_bytes for a in shared) < 0.85 * max(b.buffer_bytes for b in exchanged)
    assert sum(a.buffer_bytes for a in shared) < 0.85 * sum(b.buffer_bytes for b in exchanged)


def test_the_planner_can_be_told_that_rows_travel() -> None:
    tables = [
        EmbeddingBagConfig(50_000 * (i + 1), 64, name=f"t{i}", feature_names=[f"f{i}"])
        for i in range(6)
    ]
    shared, exchanged = (
        EmbeddingShardingPlanner(HOST, 2048, share_tables=share).plan(tables).estimates
        for share in (True, False)
    )
    assert shared is not None and exchanged is not None and shared.step_s < exchanged.step_s
    assert all(rank.output_s == 0 for rank in shared.ranks) and all(
        rank.output_s > 0 for rank in exchanged.ranks
    )


def test_owners_of_sequences_cut_by_rows_are_sent_all_ids() -> None:
    table = EmbeddingConfig(1000, 64, name="t", feature_names=["f"])
    work = table_work(table, ParameterConstraints(pooling_factor=5), 512, 4, share_tables=True)
    model, layout = CostModel(HOST), row_wise(table, range(4))
    whole = model.layout_home_amounts(work, table_wise(table, 0))
    cut = model.layout_home_amounts(work, layout)
    assert (
        cut.input.stream > 3.9 * whole.input.stream
        and cut.lookup == whole.lookup
        and cut.gradient == whole.gradient
    )
    assert whole.gradient.stream == 2 * 4 * 512 * 5 * 64
