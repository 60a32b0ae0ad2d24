"""Bytes and seconds against counts made the long way: send every id of a small world and count what
arrives.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from rayrec.errors import ConfigError
from rayrec.layout import Replicated, Shard, TableLayout, Topology
from rayrec.layout.rates import PARTS, PartRates, Rates
from rayrec.planner import EmbeddingShardingPlanner
from rayrec.planner.amounts import StepCost
from rayrec.planner.costs import CostModel
from rayrec.planner.memory import owner_memory
from rayrec.planner.work import TableWork, returned_rows, shard_traffic, summed_ranks
from tests.unit.plan_worlds import memory_by_rank, random_hosts, random_layout


def random_work(rng: random.Random, world_size: int) -> TableWork:
    """A table whose every row is looked up equally often, so that uniform ids are exact."""
    rows, batch, features = rng.randrange(1, 20), rng.randrange(1, 6), rng.randrange(1, 3)
    return TableWork(
        rows=rows,
        dim=4 * rng.randrange(1, 5),
        element_bytes=rng.choice([2, 4]),
        features=features,
        batch_size=batch,
        world_size=world_size,
        pooling_factor=rows * rng.randrange(1, 4) / (batch * features),
        weighted=rng.random() < 0.5,
        pooled=rng.random() < 0.6,
    )


def owned(layout: TableLayout | Replicated, rank: int) -> list[Shard]:
    return [shard for shard in layout.shards("") if shard.rank == rank]


@pytest.mark.seeds(range(80))
def test_traffic_is_what_arrives_when_every_id_is_sent(seed: int) -> None:
    rng = random.Random(seed)
    work = random_work(rng, world_size=3)
    layout = random_layout(rng, work.rows, work.dim, 3)
    id_bytes: Counter[int] = Counter()
    row_bytes: Counter[int] = Counter()
    for rank in layout.ranks:
        shards = owned(layout, rank)
        # each row is asked for equally often, and crosses once per destination rank
        for row in range(work.rows):
            asked = round(work.ids / work.rows)
            here = [shard for shard in shards if row in shard.rows]
            id_bytes[rank] += asked * (12 if work.weighted else 8) * bool(here)
            row_bytes[rank] += (
                0 if work.pooled else asked * 4 * sum(len(shard.cols) for shard in here)
            )
        # of each, lengths when pooled, and two counts per feature
        blocks = len({shard.rows for shard in shards})
        id_bytes[rank] += blocks * ((4 * work.bags if work.pooled else 0) + 16 * work.features)
        row_bytes[rank] += (
            work.bags * 4 * sum(len(shard.cols) for shard in shards) if work.pooled else 0
        )
        traffic = shard_traffic(work, shards, summed=2)  # of all bags
        assert traffic.id_bytes == pytest.approx(
            id_bytes[rank]
        ) and traffic.row_bytes == pytest.approx(row_bytes[rank])


@pytest.mark.parametrize(
    ("blocks", "pooling"), [(2, 1), (4, 1), (8, 3), (4, 0.5), (2, 10), (8, 30)]
)
def test_bags_without_ids_stay_at_home(blocks: int, pooling: float) -> None:
    """Against bags whose ids are drawn: the expected number, or all where most have ids in every
    block.
    """
    rng, bags = random.Random(0), 4000
    work = replace(big_work(), batch_size=bags, features=1, pooling_factor=pooling)
    count = int(pooling) if pooling >= 1 else None
    drawn = [count if count is not None else int(rng.random() < pooling) for _ in range(bags)]
    here = sum(any(rng.randrange(blocks) == 0 for _ in range(n)) for n in drawn)
    shard = Shard("", range(work.rows // blocks), range(work.dim), 0)
    assert returned_rows(work, shard) == pytest.approx(
        here if here < 0.55 * bags else bags, rel=0.12
    )  # a little more: the fullest of several
    assert (
        returned_rows(work, shard, summed=2)
        == returned_rows(work, Shard("", range(work.rows), range(8), 0))
        == bags
    )
    # blocks too narrow for an index
    assert returned_rows(replace(work, dim=12), replace(shard, cols=range(12))) == bags


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adagrad", "adam"])
@pytest.mark.seeds(range(30))
def test_weights_and_state_are_those_of_the_tensors(seed: int, optimizer: str) -> None:
    rng = random.Random(seed)
    work = random_work(rng, world_size=4)
    layout = random_layout(rng, work.rows, work.dim, 4)
    memory = memory_by_rank(work, layout, optimizer)
    for rank in range(4):
        shapes = [shard.shape for shard in owned(layout, rank)]
        elements = sum(r * c * 4 for r, c in shapes)
        state = {
            "sgd": 0,
            "rowwise_adagrad": sum(r * 4 for r, _ in shapes),
            "adagrad": elements,
            "adam": 2 * elements,
        }
        assert memory[rank].weight_bytes == sum(r * c for r, c in shapes) * work.element_bytes
        assert memory[rank].optimizer_bytes == state[optimizer]


@pytest.mark.seeds(range(30))
def test_buffers_hold_the_whole_step(seed: int) -> None:
    """At the least: what an owner receives, returns and updates by, and what a home sends, joins
    and gets the gradient of.
    """
    rng = random.Random(seed)
    work = random_work(rng, world_size=4)
    layout = random_layout(rng, work.rows, work.dim, 4)
    traffic = {rank: shard_traffic(work, owned(layout, rank)) for rank in layout.ranks}
    rows = work.bags if work.pooled else work.ids
    home = 2 * sum(t.id_bytes for t in traffic.values()) + 3 * 4 * rows * work.dim
    for rank, memory in enumerate(memory_by_rank(work, layout, "sgd")):
        shards = owned(layout, rank) if rank in traffic else []
        ids = sum(4 * work.ids * len(shard.rows) / work.rows for shard in shards)
        least = 28 * ids + 14 * traffic[rank].row_bytes if shards else 0
        most = least + 4 * ids + 4 * 12 * work.bags * len(shards) + 8 * work.ids
        assert home + least - 2 <= memory.buffer_bytes <= home + most + 2


@pytest.mark.seeds(range(40))
def test_wire_seconds_count_every_peer_once(seed: int) -> None:
    rng = random.Random(seed)
    hosts = random_hosts(rng, 6)
    wire_only = Rates(**{part: PartRates(stream=0.0, rows=0.0) for part in PARTS})
    topology = Topology(
        hosts=hosts, memory_bytes=(1,) * 6, intra_host_bw=1e9, inter_host_bw=1e8, rates=wire_only
    )
    work = random_work(rng, 6)
    layout = random_layout(rng, work.rows, work.dim, 6)
    model = CostModel(topology)
    for rank, price in model.price(work, layout).items():
        traffic = shard_traffic(work, owned(layout, rank))
        byte_s = sum(
            1 / (1e9 if topology.host_of[peer] == topology.host_of[rank] else 1e8)
            for peer in range(6)
            if peer != rank
        )
        assert price.input_s == pytest.approx(traffic.id_bytes * byte_s)
        if model.summed(work, layout) > 1:
            continue
        assert price.gradient_s == pytest.approx(traffic.row_bytes * byte_s)
        assert price.output_s == (0.0 if isinstance(layout, Replicated) else price.gradient_s)


def big_work(
    pooled: bool = True, rows: int = 10**6, dim: int = 128, pooling_factor: float = 10.0
) -> TableWork:
    return TableWork(rows, dim, 4, 1, 1024, 4, pooling_factor, False, pooled)


def total(
    layout: TableLayout | Replicated, work: TableWork, optimizer: str = "rowwise_adagrad"
) -> tuple[float, float]:
    """(slowest rank, sum over ranks) in seconds, homes included."""
    model = CostModel(Topology.local(4, memory_bytes=1), optimizer)
    prices, home_s = (
        model.price(work, layout).values(),
        model.layout_home_cost(work, layout).total_s,
    )
    return max(p.total_s for p in prices) + home_s, sum(p.total_s for p in prices) + 4 * home_s


def test_row_wise_reads_a_share_but_returns_a_row_for_every_bag() -> None:
    work = big_work()
    cuts = (0, 250_000, 500_000, 750_000, 10**6)
    whole, parts = (
        TableLayout((0, 10**6), (0, 128), ((0,),)),
        TableLayout(cuts, (0, 128), ((0,), (1,), (2,), (3,))),
    )
    model = CostModel(Topology.local(4, memory_bytes=1))
    one, four = model.price(work, whole)[0], model.price(work, parts)
    assert four[2].output_s == pytest.approx(one.output_s)
    # every block gets the gradient of every bag
    assert four[2].gradient_s == pytest.approx(one.gradient_s)
    slot_s = model.topology.rates.update.slot_s
    assert four[2].update_s - slot_s == pytest.approx((one.update_s - slot_s) / 4, rel=1e-6)
    # ids once, lengths four times
    assert sum(p.input_s for p in four.values()) == pytest.approx(one.input_s, rel=0.2)


def test_needless_cuts_of_a_tiny_table_cost_more() -> None:
    work = big_work(rows=8, dim=8, pooling_factor=1.0)
    whole = TableLayout((0, 8), (0, 8), ((0,),))
    for cut in (
        TableLayout((0, 2, 4, 6, 8), (0, 8), ((0,), (1,), (2,), (3,))),
        TableLayout((0, 8), (0, 4, 8), ((0, 1),)),
    ):
        assert total(cut, work)[1] > total(whole, work)[1]


def test_a_state_per_element_costs_more_than_one_per_row_than_none() -> None:
    layout = TableLayout((0, 10**6), (0, 128), ((0,),))
    sgd, rowwise, adagrad = (
        total(layout, big_work(), name)[0] for name in ("sgd", "rowwise_adagrad", "adagrad")
    )
    assert sgd < rowwise < adagrad


def test_a_replica_pays_for_the_updates_of_all_ranks() -> None:
    work = big_work()
    slowest, everywhere = total(Replicated(10**6, 128, (0, 1, 2, 3)), work)
    alone = CostModel(Topology.local(4, memory_bytes=1)).price(
        work, TableLayout((0, 10**6), (0, 128), ((0,),))
    )[0]
    assert slowest > alone.update_s + alone.gradient_s and everywhere == pytest.approx(4 * slowest)


def test_one_rank_has_no_wire_and_no_latency() -> None:
    work = TableWork(100, 8, 4, 1, 16, 1, 1.0, False, True)
    model = CostModel(Topology.local(1, memory_bytes=1))
    layout = TableLayout((0, 100), (0, 8), ((0,),))
    amounts, price = model.amounts(work, layout)[0], model.price(work, layout)[0]
    assert (
        not any(part.near or part.far for part in amounts)
        and price.lookup_s > 0
        and price.update_s > 0
    )
    assert (
        model.fixed_cost() == StepCost()
        and CostModel(Topology.local(2, memory_bytes=1)).fixed_cost().total_s > 0
    )


def test_what_a_pipeline_hides_of_the_input_is_not_priced() -> None:
    rates = Rates(input=PartRates(fixed_s=1e-3, slot_s=1e-5), lookup=PartRates(fixed_s=2e-3))
    work, layout = big_work(), TableLayout((0, 10**6), (0, 64, 128), ((0, 1),))
    plain = CostModel(Topology(hosts=((0, 1, 2, 3),), memory_bytes=(1,) * 4, rates=rates))
    half, whole = (CostModel(replace(plain.topology, input_hidden=share)) for share in (0.5, 1.0))
    for price in (
        lambda model: model.price(work, layout)[1],
        lambda model: model.layout_home_cost(work, layout),
    ):
        seen, some, none = (price(model) for model in (plain, half, whole))
        assert (
            some == replace(seen, input_s=seen.input_s / 2)
            and none == replace(seen, input_s=0.0)
            and seen.input_s > 0
        )
    # a calibration counts it all the same
    assert whole.amounts(work, layout) == plain.amounts(work, layout)
    latency = plain.topology.latency_s
    assert plain.fixed_cost().total_s == pytest.approx(
        3e-3 + 4 * latency
    ) and whole.fixed_cost().total_s == pytest.approx(2e-3 + 2 * latency)


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="'adamw' is unknown"):
        EmbeddingShardingPlanner(Topology.local(1), 8, sparse_optimizer="adamw")


def test_column_blocks_on_one_rank_are_sent_their_ids_once() -> None:
    work = big_work()
    split = [Shard("", range(10**6), range(64), 0), Shard("", range(10**6), range(64, 128), 0)]
    assert shard_traffic(work, split) == shard_traffic(
        work, [Shard("", range(10**6), range(128), 0)]
    )
    whole = owner_memory(work, [Shard("", range(10**6), range(128), 0)], "sgd").total
    assert owner_memory(work, split, "sgd").total > whole  # each looks them up


@pytest.mark.parametrize(
    "owners, hosts, ranks",
    [
        (((0,), (1,)), ((0, 1), (2, 3)), 2),  # one host's rows
        (((0,), (1,), (2,), (3,)), ((0, 1), (2, 3)), 2),  # rows over all ranks
        (((1, 2), (0, 3)), ((0, 1), (2, 3)), 2),  # a grid, in any order of a host's ranks
        (((0,), (2,)), ((0, 1), (2, 3)), 1),  # half of each host
        (((0,), (0,)), ((0, 1), (2, 3)), 1),  # one rank twice
        (((0,), (1,)), ((0, 1),), 1),  # one host
        (((0,), (1,)), ((0,), (1,)), 1),  # hosts of one rank
        (((0,), (1,)), ((0, 1), (2,)), 1),  # hosts of different sizes
    ],
)
def test_two_hops_sum_over_hosts_that_row_blocks_fill(owners, hosts, ranks) -> None:
    layout = TableLayout(
        tuple(range(len(owners) + 1)), tuple(range(0, 4 * len(owners[0]) + 1, 4)), owners
    )
    assert summed_ranks(layout, hosts) == ranks
