"""Rows that travel coded: the bytes are those of the runtime's codecs, only what crosses the wire
shrinks, and coding is paid for.
"""

from __future__ import annotations

import random

import pytest

from rayrec.errors import ConfigError
from rayrec.layout import EmbeddingBagConfig, Replicated, TableLayout, Topology
from rayrec.layout.kinds import row_wise, table_wise
from rayrec.planner import EmbeddingShardingPlanner, ParameterConstraints
from rayrec.planner.costs import CostModel
from rayrec.planner.work import TableWork, table_work
from rayrec.spec.wire import WIRE_PRECISIONS, CommType, ExchangeOptions
from tests.unit.plan_worlds import memory_by_rank, random_layout

TABLE = EmbeddingBagConfig(50_000, 64, "t", feature_names=["f"])


def work_of(forward: str, backward: str, world_size: int = 4) -> TableWork:
    return table_work(
        TABLE,
        ParameterConstraints(pooling_factor=3),
        512,
        world_size,
        wire=ExchangeOptions(qcomms_forward=forward, qcomms_backward=backward).wire,
    )


def test_codings_are_those_of_the_runtimes_codecs() -> None:
    import fbgemm_gpu  # noqa: F401  # registers the operators of the int8 codec
    import torch

    # needs torch, which the planner does not
    from rayrec.comm.codec import Codecs, QCommsConfig

    for kind in CommType:
        codec = Codecs.from_config(QCommsConfig(forward_precision=kind)).forward
        values = torch.randn(1280)
        sent = values if codec is None else codec.encode(values, [1280])
        assert sent.numel() * sent.element_size() == 1280 * 4 * kind.coding.size
        assert (codec is None) == (kind.coding.passes == 0)


@pytest.mark.seeds(range(30))
def test_only_rows_on_the_wire_shrink_and_each_direction_by_its_own_type(seed: int) -> None:
    rng = random.Random(seed)
    model = CostModel(Topology(hosts=((0, 1), (2, 3)), memory_bytes=(1,) * 4))
    layout = random_layout(rng, 50_000, 64, 4)
    forward, backward = rng.choice(WIRE_PRECISIONS), rng.choice(WIRE_PRECISIONS)
    plain, coded = work_of("fp32", "fp32"), work_of(forward, backward)
    summed = model.summed(plain, layout)
    before, after = model.amounts(plain, layout), model.amounts(coded, layout)
    for rank in layout.ranks:
        assert (before[rank].input, before[rank].lookup, before[rank].update) == (
            after[rank].input,
            after[rank].lookup,
            after[rank].update,
        )
        for part, kind in (("output", forward), ("gradient", backward)):
            old, new = getattr(before[rank], part), getattr(after[rank], part)
            assert new.far == pytest.approx(old.far * CommType(kind).coding.size)
            # sums inside a host travel as they are
            assert new.near == pytest.approx(
                old.near * (CommType(kind).coding.size if summed == 1 else 1)
            )
            silent = isinstance(layout, Replicated) and part == "output"
            assert new.stream == old.stream if kind == "fp32" or silent else new.stream > old.stream


def test_a_rank_encodes_and_decodes_every_value_once_each_way() -> None:
    """fp16: 4 bytes are read and 2 written, or the reverse, by the owner of the rows and by their
    home.
    """
    model, layout = CostModel(Topology.local(4, memory_bytes=1)), table_wise(TABLE, 0)
    values = 4 * 512 * 64  # of the batches of all ranks
    for part, kinds in (("output", ("fp16", "fp32")), ("gradient", ("fp32", "fp16"))):
        plain, coded = work_of("fp32", "fp32"), work_of(*kinds)
        owners = [getattr(model.amounts(work, layout)[0], part).stream for work in (plain, coded)]
        homes = [
            getattr(model.layout_home_amounts(work, layout), part).stream for work in (plain, coded)
        ]
        assert owners[1] - owners[0] == pytest.approx(6 * values)
        assert homes[1] - homes[0] == pytest.approx(6 * values / 4)


def test_one_rank_codes_nothing_and_coded_rows_need_room() -> None:
    assert work_of("int8", "int8", world_size=1) == work_of("fp32", "fp32", world_size=1)
    layout = row_wise(TABLE, range(4))
    plain, coded = (
        memory_by_rank(work_of(kind, kind), layout, "sgd")[0] for kind in ("fp32", "fp16")
    )
    assert coded.buffer_bytes > plain.buffer_bytes and coded.weight_bytes == plain.weight_bytes


def test_codecs_make_the_step_faster_where_the_wire_is_slow_and_slower_where_it_is_free() -> None:
    tables = [EmbeddingBagConfig(10_000, 128, f"t{i}", feature_names=[f"f{i}"]) for i in range(8)]

    def step_s(topology: Topology, kind: str) -> float:
        plan = EmbeddingShardingPlanner(
            topology, 1024, qcomms_forward=kind, qcomms_backward=kind
        ).plan(tables)
        assert plan.estimates is not None
        return plan.estimates.step_s

    slow = Topology.uniform(4, 1, 10**10, "cuda", inter_host_bw=1e9)
    free = Topology.uniform(1, 4, 10**10, "cpu", intra_host_bw=1e15)
    assert step_s(slow, "int8") < 0.5 * step_s(slow, "fp32") and step_s(
        slow, "bf16"
    ) < 0.7 * step_s(slow, "fp32")
    assert step_s(free, "bf16") > step_s(free, "fp32")


def test_a_driver_plans_for_the_types_of_its_run() -> None:
    import torch

    from rayrec.driver import OptimizerConfig, RunConfig
    from rayrec.driver.planning import RunPlanner

    topology = Topology.uniform(2, 1, 10**10, "cuda", inter_host_bw=1e9)
    given = {"qcomms_forward": "int8", "qcomms_backward": "bf16"}
    sgd = OptimizerConfig(name="sgd", lr=0.1)
    run = RunConfig(global_batch_size=1024, steps=1, sparse_optimizer=sgd, **given)
    planning = RunPlanner(torch.nn.Identity, run, "auto", None, [TABLE], None)
    found = planning.plan(topology)
    wanted = EmbeddingShardingPlanner(topology, 512, sparse_optimizer="sgd", **given).plan([TABLE])
    assert (
        found.estimates
        == wanted.estimates
        != EmbeddingShardingPlanner(topology, 512, sparse_optimizer="sgd").plan([TABLE]).estimates
    )


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="qcomms_backward='fp8' is unknown; the types on the wire are fp32, fp16, bf16, int8",
    ):
        EmbeddingShardingPlanner(Topology.local(1), 8, qcomms_backward="fp8")


def test_a_cut_over_rows_of_a_host_codes_its_sums_only() -> None:
    """Each rank codes a share of the sums of its host, not its own rows."""
    layout = TableLayout((0, 25_000, 50_000), (0, 64), ((0,), (1,)))
    plain, coded = work_of("fp32", "fp32"), work_of("fp16", "fp32")
    flat, hops = (
        CostModel(Topology(hosts=hosts, memory_bytes=(1,) * 4))
        for hosts in (((0, 1, 2, 3),), ((0, 1), (2, 3)))
    )
    more = [
        model.amounts(coded, layout)[0].output.stream
        - model.amounts(plain, layout)[0].output.stream
        for model in (flat, hops)
    ]
    assert more[0] == pytest.approx(2 * more[1])
