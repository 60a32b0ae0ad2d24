"""Constants that are fitted are those that made the measurements; a topology with rates survives
JSON.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rayrec.errors import ConfigError, PlanError
from rayrec.layout import Topology
from rayrec.layout.rates import PARTS, PartRates, Rates
from rayrec.planner.amounts import StepAmounts
from rayrec.planner.costs import CostModel
from rayrec.planner.fit_rates import Links, StepSample, fit_topology, non_negative
from rayrec.planner.work import TableWork
from tests.unit.plan_worlds import random_layout

LINKS = Links(memory_bw=5e9, latency_s=3e-5, near_byte_s=0.0, far_byte_s=None)


def random_rates(rng: random.Random) -> Rates:
    parts = {
        part: PartRates(
            fixed_s=rng.uniform(0, 3e-4),
            slot_s=rng.uniform(0, 1e-5),
            home_slot_s=rng.uniform(0, 1e-5) if part not in ("lookup", "update") else 0.0,
            item_s=rng.uniform(0, 1e-8),
            stream=rng.uniform(0.05, 1.0),
            rows=rng.uniform(0, 1.0) if part in ("lookup", "update") else 0.0,
        )
        for part in PARTS
    }
    return Rates(**parts, step_s=rng.uniform(0, 1e-4))


def random_amounts(rng: random.Random, topology: Topology) -> list[StepAmounts]:
    """Of a few random tables under random layouts, per rank."""
    costs, ranks = CostModel(topology), [StepAmounts()] * topology.world_size
    for _ in range(rng.randrange(1, 20)):
        rows, dim = round(10 ** rng.uniform(1, 6)), 4 * rng.randrange(1, 33)
        work = TableWork(
            rows,
            dim,
            4,
            rng.randrange(1, 3),
            2 ** rng.randrange(6, 11),
            topology.world_size,
            rng.uniform(1, 20),
            False,
            True,
        )
        layout = random_layout(rng, rows, dim, topology.world_size)
        home, owners = costs.layout_home_amounts(work, layout), costs.amounts(work, layout)
        ranks = [r.plus(home).plus(owners.get(i, StepAmounts())) for i, r in enumerate(ranks)]
    return ranks


@pytest.mark.seeds(range(8))
def test_the_fit_predicts_what_made_its_samples(seed: int) -> None:
    """Constants that always occur together may be told apart wrongly, so predictions of new plans
    are compared, with 1% of noise.
    """
    rng = random.Random(seed)
    true = Topology(
        hosts=((0, 1),),
        memory_bytes=(1, 1),
        memory_bw=5e9,
        intra_host_bw=1e12,
        latency_s=0.0,
        rates=random_rates(rng),
    )
    costs = CostModel(true)
    samples = []
    for _ in range(40):
        for amounts in random_amounts(rng, true):
            cost = costs.seconds(amounts) + costs.fixed_cost()
            noise = rng.uniform(0.99, 1.01)
            parts = tuple(noise * getattr(cost, f"{part}_s") for part in PARTS)
            samples.append(StepSample(amounts, parts, noise * cost.total_s))
    hidden = fit_topology(Topology.local(2, memory_bytes=1, input_hidden=0.9), LINKS, samples)
    # an assumption about the trainer, which no step of a calibration shows
    assert hidden.input_hidden == 0.9
    found = CostModel(replace(hidden, input_hidden=0.0))
    assert (
        found.topology.memory_bw == 5e9
        and found.topology.latency_s == 3e-5
        and found.topology.intra_host_bw == 1e12
    )
    for _ in range(10):
        for amounts in random_amounts(rng, true):
            wanted = (costs.seconds(amounts) + costs.fixed_cost()).total_s
            got = (found.seconds(amounts) + found.fixed_cost()).total_s - 4 * 3e-5
            assert got == pytest.approx(wanted, rel=0.05)


@pytest.mark.seeds(range(20))
def test_least_squares_without_negative_parts_beat_every_neighbour(seed: int) -> None:
    rng = random.Random(seed)
    rows = [[rng.uniform(0, 2) for _ in range(4)] for _ in range(12)]
    wanted = [rng.uniform(-1, 5) for _ in rows]

    def error(x: list[float]) -> float:
        return sum(
            (sum(a * b for a, b in zip(row, x, strict=True)) - w) ** 2
            for row, w in zip(rows, wanted, strict=True)
        )

    best = non_negative(rows, wanted)
    assert min(best) >= 0
    for _ in range(200):
        other = [max(0.0, value + rng.gauss(0, 0.1)) for value in best]
        assert error(other) >= error(best) - 1e-9


def test_a_fit_without_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        fit_topology(Topology.local(2, memory_bytes=1), LINKS, [])


def test_rates_survive_json_and_old_topologies_read_as_defaults() -> None:
    topology = Topology(
        hosts=((0, 1),), memory_bytes=(5, 5), rates=random_rates(random.Random(1)), input_hidden=0.4
    )
    assert Topology.from_json(topology.to_json()) == topology
    text = topology.to_json()
    old = text[: text.index(', "rates"')] + "}"
    assert Topology.from_json(old).rates == Rates() and Topology.from_json(old).input_hidden == 0


@pytest.mark.parametrize(
    "change, named",
    [
        (('"item_s": ', '"item_s": -'), "item_s=-"),
        (('"step_s"', '"stop_s"'), "step_s"),
        (('"stream"', '"steam"'), "stream"),
    ],
)
def test_a_wrong_rate_is_named(change: tuple[str, str], named: str) -> None:
    text = Topology(
        hosts=((0,),), memory_bytes=(1,), rates=random_rates(random.Random(2))
    ).to_json()
    with pytest.raises(PlanError, match=named):
        Topology.from_json(text.replace(*change, 1))
