"""Real ranks measure themselves: all agree, the constants make sense, and parts of a step add up to
no more than the step.

Bounds of what is measured are those of any machine under any load: a hundred times off what is
usual.
"""

from __future__ import annotations

from time import perf_counter

import pytest
import torch

from rayrec.calibration.measure import measure_topology, plan_amounts, random_batch, random_design
from rayrec.comm.choose import Transport, exchange_for
from rayrec.distributed import DistributedModelParallel
from rayrec.layout import EmbeddingBagConfig, Topology
from rayrec.layout.rates import PARTS
from rayrec.modules import EmbeddingBagCollection
from rayrec.observe.timer import StepTimer
from rayrec.planner import EmbeddingShardingPlanner
from rayrec.planner.costs import CostModel
from tests.ranks import RankPool


def calibrate_rank(rank: int, world_size: int, transport: Transport) -> str:
    topology = Topology.local(world_size, memory_bytes=1 << 30)
    return measure_topology(
        exchange_for(None, torch.device("cpu"), transport), topology, designs=6
    ).to_json()


@pytest.mark.slow
@pytest.mark.parametrize("transport", [Transport.AUTO, Transport.PROCESS_GROUP])
def test_ranks_agree_on_a_topology_that_makes_sense(ranks: RankPool, transport: Transport) -> None:
    first, second = ranks.run(2, calibrate_rank, transport)
    assert first == second
    found = Topology.from_json(first)
    assert 1e6 < found.memory_bw < 1e14 and found.intra_host_bw > 1e5 and 0 < found.latency_s < 10
    costs = CostModel(found)
    step_s = max(
        (costs.seconds(a) + costs.fixed_cost()).total_s
        for a in plan_amounts(random_design(3, 2), found, True)
    )
    assert 1e-6 < step_s < 100
    tables = [EmbeddingBagConfig(1000, 64, f"t{i}", feature_names=[f"f{i}"]) for i in range(4)]
    assert EmbeddingShardingPlanner(found, 512).plan(tables).estimates is not None


def timed_rank(
    rank: int, world_size: int, share_tables: bool
) -> tuple[list[float], list[float], float]:
    """Seconds and waits by part, and of the whole step."""
    design = random_design(5, world_size)
    topology = Topology.local(world_size, memory_bytes=1 << 30)
    collection = EmbeddingBagCollection(list(design.tables), device=torch.device("meta"))
    model = DistributedModelParallel(
        collection, plan=design.plan(topology), seed=0, share_tables=share_tables
    )
    timer = model.timer = StepTimer()
    batch = random_batch(design, rank, torch.device("cpu"))
    for _ in range(3):
        timer.reset()
        start = perf_counter()
        model(batch).values().sum().backward()
        seconds = perf_counter() - start
    parts = timer.read()
    return [parts[p].seconds for p in PARTS], [parts[p].waited for p in PARTS], seconds


@pytest.mark.parametrize("share_tables", [False, True])
def test_parts_are_all_timed_and_add_up_to_less_than_the_step(
    ranks: RankPool, share_tables: bool
) -> None:
    for seconds, waited, step_s in ranks.run(2, timed_rank, share_tables):
        assert all(s > 0 for s in seconds[:2] + seconds[3:]) and sum(seconds) < step_s
        assert all(w <= s for w, s in zip(waited, seconds, strict=True))
        assert waited[0] > 0 and waited[3] > 0 and waited[1] == waited[4] == 0
        # rows that are read in place do not come home
        assert seconds[2] == 0 if share_tables else waited[2] > 0
