"""Rows off the GPU: what a cache takes, what its misses cost, and which tables leave the device
when it is full.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from rayrec.comm.codec import Codecs
from rayrec.distributed.program.compile import compile_slots
from rayrec.distributed.program.groups import CollectionSpec
from rayrec.distributed.ways.exchanged import Exchanged
from rayrec.errors import ConfigError, PlanError
from rayrec.layout import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    Shard,
    ShardingPlan,
    Storage,
    TableLayout,
    TablePlacement,
    Topology,
)
from rayrec.optim import RowWiseAdagrad
from rayrec.planner import EmbeddingShardingPlanner, NoPlan, ParameterConstraints
from rayrec.planner.costs import HOST_LINK_BW, CostModel
from rayrec.planner.estimate import estimate_ranks
from rayrec.planner.memory import owner_memory
from rayrec.planner.planner import plan_request
from rayrec.planner.work import TableWork, table_work
from rayrec.planner.zipf import distinct_rows
from rayrec.report.plan_page import render_page

GPU = Topology.local(1, memory_bytes=10**12, device="cuda")
TABLE = EmbeddingBagConfig(100_000, 64, "t", feature_names=["f"])
WHOLE = [Shard("t", range(100_000), range(64), 0)]


def work_of(storage: str, device: str = "cuda", **facts: float) -> TableWork:
    limits = ParameterConstraints(storage=storage, **facts)  # type: ignore[arg-type]
    return table_work(TABLE, limits, 4096, 1, device)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("optimizer", "per_row", "per_element"),
    [("sgd", 0, 0), ("rowwise_adagrad", 1, 0), ("partial_rowwise_adam", 1, 1)],
)
def test_memory_is_what_fbgemm_puts_on_the_device(
    optimizer: str, per_row: int, per_element: int
) -> None:
    """Of rows in the host's memory, states per row stay on the GPU and those per element do not; a
    cache holds its share of rows.
    """
    device, host, cached = (
        owner_memory(work_of(kind, cache_load_factor=0.05), WHOLE, optimizer)
        for kind in ("device", "host", "cached")
    )
    assert device.weight_bytes == 100_000 * 256 and device.optimizer_bytes == 400_000 * (
        per_row + 64 * per_element
    )
    assert (
        host.weight_bytes == 0
        and host.optimizer_bytes == cached.optimizer_bytes == 400_000 * per_row
    )
    slots = 5024  # 5,000 in sets of 32
    assert cached.weight_bytes == slots * (256 + 16) + 400_000
    assert owner_memory(work_of("cached", "cpu"), WHOLE, optimizer) == owner_memory(
        work_of("device", "cpu"), WHOLE, optimizer
    )


@pytest.mark.parametrize("skew", [0.0, 0.8, 1.4])
def test_misses_cross_the_hosts_link_and_nothing_else_of_the_rows_does(skew: float) -> None:
    work, device = work_of("cached", skew=skew, cache_load_factor=0.1), work_of("device", skew=skew)
    held, distinct = (distinct_rows(100_000, 4096, skew, first) for first in (10_000, None))
    assert work.missed == pytest.approx(1 - held / distinct)
    costs = CostModel(GPU)
    prices = [costs.seconds(costs.owner_amounts(each, WHOLE, 0)) for each in (work, device)]
    # in, and others out
    assert prices[0].lookup_s - prices[1].lookup_s == pytest.approx(
        2 * (distinct - held) * 256 / HOST_LINK_BW
    )
    assert prices[0].update_s == prices[1].update_s  # rows are in the cache by then
    elements = CostModel(GPU, "adagrad")
    # states are not
    assert (
        elements.seconds(elements.owner_amounts(work, WHOLE, 0)).update_s
        > elements.seconds(elements.owner_amounts(device, WHOLE, 0)).update_s
    )


def test_skew_and_size_make_a_cache_faster_and_it_lies_between_device_and_host() -> None:
    costs = CostModel(GPU)

    def seconds(storage: str, **facts: float) -> float:
        return costs.seconds(costs.owner_amounts(work_of(storage, **facts), WHOLE, 0)).total_s

    sizes = [seconds("cached", skew=1.1, cache_load_factor=f) for f in (0.01, 0.1, 0.5, 1.0)]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] == pytest.approx(
        seconds("device", skew=1.1)
    )
    missed = [work_of("cached", skew=skew).missed for skew in (0.0, 1.0, 1.6)]
    assert missed[0] == pytest.approx(0.8) and missed == sorted(missed, reverse=True)
    many = {"pooling_factor": 50.0, "skew": 1.2}
    assert seconds("device", **many) < seconds("cached", **many) < seconds("host", **many)


def bags(rng: random.Random, count: int) -> list[BaseEmbeddingConfig]:
    return [
        EmbeddingBagConfig(int(10 ** rng.uniform(3, 6)), 64, f"t{i}", feature_names=[f"f{i}"])
        for i in range(count)
    ]


def step_s(plan: ShardingPlan) -> float:
    assert plan.estimates is not None
    return plan.estimates.step_s


@pytest.mark.seeds(range(12))
def test_auto_keeps_rows_on_the_device_while_they_fit_and_gets_slower_bit_by_bit(seed: int) -> None:
    rng = random.Random(seed)
    tables, topology = (
        bags(rng, rng.choice([4, 15])),
        Topology.uniform(rng.choice([1, 2]), 2, 10**12, "cuda"),
    )
    limits = {
        t.name: ParameterConstraints(
            storage="auto", skew=rng.choice([0.0, 1.0]), pooling_factor=rng.choice([1, 10])
        )
        for t in tables
    }
    request = EmbeddingShardingPlanner(topology, 256, limits).request(tables)
    fixed = {
        kind: replace(request, constraints={n: replace(c, storage=kind) for n, c in limits.items()})
        for kind in ("device", "host")
    }
    ample = plan_request(request)
    assert {p.storage.kind for p in ample.tables.values()} == {"device"} and step_s(
        ample
    ) == step_s(plan_request(fixed["device"]))
    assert ample.estimates is not None
    peak = max(rank.memory_bytes for rank in ample.estimates.ranks)
    last, kinds = step_s(ample), set()
    for percent in (120, 80, 50, 25, 12):
        tight = replace(topology, memory_bytes=(peak * percent // 100,) * topology.world_size)
        try:
            plan = plan_request(replace(request, topology=tight))
        except NoPlan:
            continue  # no room for the buffers
        # The buffers of rows in host memory need room on the device, too: they are split less then.
        slowest = step_s(plan_request(replace(fixed["host"], topology=tight)))
        assert last <= step_s(plan) * 1.1 and step_s(plan) <= slowest * 1.1
        assert (
            plan.estimates is not None
            and max(rank.memory_bytes for rank in plan.estimates.ranks) <= tight.memory_bytes[0]
        )
        last = step_s(plan)
        off = [
            name for name, placement in plan.tables.items() if placement.storage.kind != "device"
        ]
        kinds |= {plan.tables[name].storage.kind for name in off}
        assert {plan.estimates.tables[name].why for name in off} <= {"to fit"}
    assert kinds


def test_auto_beats_every_other_choice_of_storages_on_small_problems() -> None:
    rng = random.Random(5)
    tables, topology = bags(rng, 3), Topology.local(2, memory_bytes=10**12, device="cuda")
    limits = {
        t.name: ParameterConstraints(
            storage="auto", pooling_factor=rng.choice([1, 20]), kinds=["table_wise", "row_wise"]
        )
        for t in tables
    }
    request = EmbeddingShardingPlanner(topology, 256, limits).request(tables)
    ample = plan_request(request)
    assert ample.estimates is not None
    tight = replace(
        topology, memory_bytes=(max(rank.memory_bytes for rank in ample.estimates.ranks) // 2,) * 2
    )
    found, others = step_s(plan_request(replace(request, topology=tight))), []
    for kinds in itertools.product(("device", "host", "cached"), repeat=3):
        given = {
            t.name: replace(limits[t.name], storage=kind)
            for t, kind in zip(tables, kinds, strict=True)
        }
        try:
            others.append(step_s(plan_request(replace(request, topology=tight, constraints=given))))
        except NoPlan:
            continue
    assert 1 < len(others) < 27 and found <= min(others) * 1.01


def test_tables_together_leave_the_device_together_and_cpu_ranks_have_one_memory() -> None:
    tables = [EmbeddingBagConfig(200_000, 64, f"t{i}", feature_names=[f"f{i}"]) for i in range(3)]
    limits = {t.name: ParameterConstraints(storage="auto", together="g") for t in tables[:2]}
    limits["t2"] = ParameterConstraints(storage="host", together="g")
    gpu = Topology.local(2, memory_bytes=20_000_000, device="cuda")
    plan = EmbeddingShardingPlanner(gpu, 64, limits).plan(tables)
    kinds = [plan.tables[t.name].storage.kind for t in tables]
    assert kinds[0] == kinds[1] != "device" and kinds[2] == "host"
    cpu = EmbeddingShardingPlanner(Topology.local(2, memory_bytes=10**9), 64, limits).plan(tables)
    assert [cpu.tables[t.name].storage.kind for t in tables] == ["device", "device", "host"]


def test_a_plan_is_priced_by_its_own_storages_and_names_them() -> None:
    layout = TableLayout((0, 100_000), (0, 64), ((0,),))
    request = EmbeddingShardingPlanner(GPU, 4096).request([TABLE])
    plans = [
        ShardingPlan(world_size=1, tables={"t": TablePlacement(layout, storage)})
        for storage in (Storage(), Storage("cached", 0.2), Storage("host"))
    ]
    device, cached, host = (estimate_ranks(request, plan)[0] for plan in plans)
    assert device.weight_bytes > cached.weight_bytes > host.weight_bytes == 0
    assert (
        "<td>cached 20%</td>" in render_page(plans[1])
        and ShardingPlan.from_json(plans[1].to_json()) == plans[1]
    )
    assert '"storage": {"kind": "cached", "load_factor": 0.2}' in plans[1].to_json()


def test_no_room_on_the_gpu_is_answered_by_the_hosts_memory() -> None:
    with pytest.raises(NoPlan, match="let 't' lie in the host's memory") as caught:
        EmbeddingShardingPlanner(
            Topology.local(1, memory_bytes=15_000_000, device="cuda"), 16
        ).plan([TABLE])
    (change,) = [change for change in caught.value.changes if "storage='auto'" in change.text]
    assert plan_request(change.request).tables["t"].storage.kind != "device"


def test_caches_of_different_sizes_or_widths_share_no_kernel() -> None:
    storages = [
        Storage("cached", 0.1),
        Storage("cached", 0.1),
        Storage("cached", 0.2),
        Storage("host"),
        Storage("cached", 0.1),
    ]
    tables = tuple(
        EmbeddingBagConfig(100, 8 if i == 4 else 16, f"t{i}", feature_names=[f"f{i}"])
        for i in range(5)
    )
    placed = {
        t.name: TablePlacement(TableLayout((0, 100), (0, t.embedding_dim), ((0,),)), s)
        for t, s in zip(tables, storages, strict=True)
    }
    plan = ShardingPlan(world_size=1, tables=placed)
    way = Exchanged(plan, torch.device("cpu"), Codecs(), None)
    specs, optimizers = {0: CollectionSpec("c", tables)}, {t.name: RowWiseAdagrad() for t in tables}
    slots = compile_slots(plan, specs, optimizers, 1, {0: way})
    groups = {tuple(shard.table for shard in group.shards) for group in slots.ranks[0].groups}
    assert groups == {("t0", "t1"), ("t2",), ("t3",), ("t4",)}


@pytest.mark.parametrize(
    "wrong", [{"storage": "disk"}, {"cache_load_factor": 0.0}, {"cache_load_factor": 1.5}]
)
def test_storages_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"disk|cache_load_factor="):
        ParameterConstraints(**wrong)  # type: ignore[arg-type]


def test_tables_of_bfloat16_stay_in_a_gpus_memory_and_take_half_of_it() -> None:
    table = replace(TABLE, data_type=DataType.BF16)
    with pytest.raises(PlanError, match=r"64 columns of BF16 and storage='cached'"):
        EmbeddingShardingPlanner(GPU, 8, {"t": ParameterConstraints(storage="cached")}).plan(
            [table]
        )
    plans = [
        EmbeddingShardingPlanner(GPU, 8, {"t": ParameterConstraints(storage="auto")}).plan([t])
        for t in (table, TABLE)
    ]
    half, whole = (plan.estimates.ranks[0].weight_bytes for plan in plans)  # type: ignore[union-attr]
    assert plans[0].tables["t"].storage.kind == "device" and 2 * half == whole


def test_tables_of_odd_widths_stay_in_a_gpus_memory() -> None:
    tables = [
        EmbeddingBagConfig(10_000, width, f"t{width}", feature_names=[f"f{width}"])
        for width in (62, 64)
    ]
    limits = {t.name: ParameterConstraints(storage="auto") for t in tables}
    little = Topology.local(1, memory_bytes=4_500_000, device="cuda")
    plan = EmbeddingShardingPlanner(little, 8, limits).plan(tables)
    assert (
        plan.tables["t62"].storage.kind == "device" and plan.tables["t64"].storage.kind != "device"
    )
    with pytest.raises(
        PlanError,
        match=r"table 't62' has 62 columns of FP32 and storage='host'.*widths are multiples of 4",
    ):
        EmbeddingShardingPlanner(little, 8, {"t62": ParameterConstraints(storage="host")}).plan(
            tables
        )
    cpu = Topology.local(1, memory_bytes=1 << 30)
    assert EmbeddingShardingPlanner(cpu, 8, {"t62": ParameterConstraints(storage="host")}).plan(
        tables
    )
