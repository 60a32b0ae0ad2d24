"""Random table sets for the planner's benchmark: four families, each from a seed, on 1 to 16 hosts
of 8 GPUs.

Sizes of the `criteo` family follow the 26 categorical columns of Criteo's Kaggle data, which are
public; the others are power laws.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from rayrec.layout import BaseEmbeddingConfig, EmbeddingBagConfig, Topology
from rayrec.layout.presets import preset_topology
from rayrec.planner import EmbeddingShardingPlanner, ParameterConstraints
from rayrec.planner.request import PlanRequest

CRITEO_ROWS = (1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194)
CRITEO_ROWS += (27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572)
FAMILIES = ("criteo", "production", "few_huge", "many_tiny")
HOSTS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Problem:
    """A named planning problem."""

    name: str
    request: PlanRequest

    @property
    def tables(self) -> int:
        """Number of tables."""
        return len(self.request.tables)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.request.topology.world_size


def make_problem(
    family: str, seed: int, topology: Topology, count: int | None = None, batch_size: int = 4096
) -> Problem:
    """One problem; the same arguments give the same problem.

    Args:
        count: tables; the family chooses when not given.
    """
    rng = random.Random(f"{family} {seed}")
    shapes: list[tuple[int, int, float]] = []  # rows, columns, ids per bag
    if family == "criteo":
        dim = rng.choice([16, 64, 128])
        shapes = [
            (max(4, int(rows * rng.uniform(0.5, 20))), dim, rng.choice([1.0, 1.0, 1.0, 10.0]))
            for rows in CRITEO_ROWS
        ]
        shapes = shapes[:count]
    elif family == "production":
        for _ in range(count or rng.choice([200, 500, 1000])):
            shapes.append(
                (
                    min(int(100 * rng.paretovariate(0.35)), 10**8),
                    rng.choice([32, 64, 96, 128]),
                    min(rng.paretovariate(1.1), 200.0),
                )
            )
    elif family == "few_huge":
        for _ in range(count or rng.randrange(4, 12)):
            shapes.append(
                (int(10 ** rng.uniform(7, 8)), rng.choice([64, 128]), rng.choice([1.0, 5.0, 30.0]))
            )
    else:
        for _ in range(count or rng.randrange(100, 400)):
            shapes.append(
                (
                    int(10 ** rng.uniform(0.5, 4)),
                    rng.choice([4, 8, 16, 32]),
                    rng.choice([1.0, 1.0, 3.0]),
                )
            )
    tables: list[BaseEmbeddingConfig] = [
        EmbeddingBagConfig(rows, dim, f"t{i}", feature_names=[f"f{i}"])
        for i, (rows, dim, _) in enumerate(shapes)
    ]
    limits = {
        f"t{i}": ParameterConstraints(pooling_factor=pooling)
        for i, (_, _, pooling) in enumerate(shapes)
    }
    request = EmbeddingShardingPlanner(topology, batch_size, limits).request(tables)
    return Problem(f"{family} {len(tables)} x {topology.world_size} #{seed}", request)


def all_problems(seeds: int) -> Iterator[Problem]:
    """`seeds` problems of each family, hosts in turn."""
    for family in FAMILIES:
        for seed in range(seeds):
            yield make_problem(
                family, seed, preset_topology("a100-80", hosts=HOSTS[seed % len(HOSTS)])
            )


def small_problems(count: int) -> Iterator[Problem]:
    """Four tables on two or three ranks, few enough to try every plan."""
    for seed in range(count):
        yield make_problem(
            FAMILIES[seed % 4], seed, preset_topology("a100-80", ranks=2 + seed % 2), count=4
        )
