"""Worlds for the checkpoint tests: random tables and plans, a truth to cut shards from, and ranks
as threads that really gather.

The truth of a table is its whole weight and, per state, one value per element; row-wise state of a
shard is the mean over its columns.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rayrec.checkpoint import Gather, Manifest, ShardState, save_checkpoint
from rayrec.layout import (
    DataType,
    EmbeddingBagConfig,
    ShardingPlan,
    TableLayout,
    column_wise,
    data_parallel,
    grid_shard,
    row_wise,
    table_wise,
)
from rayrec.modules.names import DTYPES
from tests.unit.plan_worlds import random_cuts
from tests.worlds import part_of, plan_for

STATES = ("none", "row", "element")


@dataclass(frozen=True)
class Truth:
    """A whole table: weight (rows, dim) and per-element sums of squares (rows, dim) float64."""

    config: EmbeddingBagConfig
    state: str
    weight: Tensor
    squares: Tensor

    def shard_state(self, shard, fill: bool) -> ShardState:
        """The shard cut from the truth, or NaNs of its shape when it is to be filled."""
        weight, squares = part_of(self.weight, shard).clone(), part_of(self.squares, shard)
        states = {
            "none": {},
            "row": {"momentum1": squares.mean(1).float()},
            "element": {"momentum1": squares.float()},
        }[self.state]
        if not fill:
            return ShardState(shard, weight, states)
        return ShardState(
            shard,
            torch.full_like(weight, torch.nan),
            {k: torch.full_like(v, torch.nan) for k, v in states.items()},
        )


def make_truth(
    rng: random.Random,
    name: str,
    rows: int,
    dim: int,
    state: str,
    data_type: DataType = DataType.FP32,
) -> Truth:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    weight = torch.randn(rows, dim, generator=generator).to(DTYPES[data_type])
    config = EmbeddingBagConfig(rows, dim, name, data_type=data_type, feature_names=[name])
    return Truth(
        config, state, weight, torch.rand(rows, dim, generator=generator, dtype=torch.float64)
    )


def random_truths(rng: random.Random) -> list[Truth]:
    return [
        make_truth(
            rng,
            f"t{i}",
            rng.randint(1, 60),
            4 * rng.randint(1, 8) - rng.choice([0, 0, 1, 3]),
            rng.choice(STATES),
            rng.choice(list(DataType)),
        )
        for i in range(rng.randint(1, 4))
    ]


def random_layout(rng: random.Random, table: EmbeddingBagConfig, world_size: int):
    ranks = list(range(world_size))
    kind = rng.choice(("table", "row", "column", "grid", "replicated", "product", "product"))
    if kind == "table":
        return table_wise(table, rng.choice(ranks))
    if kind == "row":
        return row_wise(table, ranks)
    if kind == "column":
        return column_wise(table, ranks)
    if kind == "replicated":
        return data_parallel(table, ranks)
    if kind == "grid" and world_size % 2 == 0:
        return grid_shard(table, (ranks[: world_size // 2], ranks[world_size // 2 :]))
    rows, cols = random_cuts(rng, table.num_embeddings), random_cuts(rng, table.embedding_dim, 4)
    return TableLayout(
        rows, cols, tuple(tuple(rng.choice(ranks) for _ in cols[1:]) for _ in rows[1:])
    )


def random_plan(rng: random.Random, truths: Sequence[Truth], world_size: int) -> ShardingPlan:
    layouts = {t.config.name: random_layout(rng, t.config, world_size) for t in truths}
    return plan_for(world_size, layouts)


def one_rank_plan(truths: Sequence[Truth]) -> ShardingPlan:
    return plan_for(1, {t.config.name: table_wise(t.config, 0) for t in truths})


def shard_states(
    truths: Sequence[Truth], plan: ShardingPlan, rank: int, fill: bool = False
) -> list[ShardState]:
    by_name = {t.config.name: t for t in truths}
    return [by_name[shard.table].shard_state(shard, fill) for shard in plan.shards(rank)]


@dataclass
class Ranks:
    """Ranks as threads; results and errors by rank."""

    size: int
    results: list[Any] = field(default_factory=list)
    errors: list[Exception | None] = field(default_factory=list)

    def run(self, body: Callable[[int, Gather], Any]) -> Ranks:
        self.results, self.errors = [None] * self.size, [None] * self.size
        box: list[Any] = [None] * self.size
        # a rank that waits for one that is gone fails the test, it does not hang it
        barrier = threading.Barrier(self.size, timeout=20)

        def rank_body(rank: int) -> None:
            def gather(value: Any) -> list[Any]:
                box[rank] = value
                barrier.wait()
                values = list(box)
                barrier.wait()
                return values

            try:
                self.results[rank] = body(rank, gather)
            except Exception as error:
                self.errors[rank] = error

        threads = [threading.Thread(target=rank_body, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self

    def all(self) -> list[Any]:
        for error in self.errors:
            if error:
                raise error
        return self.results


def save_world(
    path: str, truths: Sequence[Truth], plan: ShardingPlan, **options: Any
) -> list[Manifest]:
    """Save from all ranks of `plan`; raises the first rank's error."""
    return attempt_save(path, truths, plan, **options).all()


def attempt_save(
    path: str,
    truths: Sequence[Truth],
    plan: ShardingPlan,
    by_rank: dict[int, dict] | None = None,
    **options: Any,
) -> Ranks:
    """Save from all ranks of `plan`, with options that differ for some of them."""

    def body(rank: int, gather: Gather) -> Manifest:
        given = {
            "path": path,
            "shards": shard_states(truths, plan, rank),
            "tables": [t.config for t in truths],
            "plan": plan,
        }
        given |= {
            "dense": {"bias": torch.arange(3.0)},
            "step": 7,
            **options,
            **(by_rank or {}).get(rank, {}),
        }
        return save_checkpoint(rank=rank, world_size=plan.world_size, gather=gather, **given)

    return Ranks(plan.world_size).run(body)
