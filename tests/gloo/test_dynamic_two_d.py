"""Dynamic tables in sharding groups: with sync in every step two groups are one world."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rayrec.checkpoint import CheckpointManager, load_table
from rayrec.distributed import DistributedModelParallel
from rayrec.driver.planning import find_tables
from rayrec.errors import ConfigError
from rayrec.layout import (
    DynamicConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    GrowthConfig,
    Shard,
    column_wise,
    row_wise,
)
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection
from rayrec.optim import SGD
from rayrec.sparse import KeyedJaggedTensor
from tests.dynamic_clicks import TABLE, TIMED, write
from tests.gloo.dynamic_spec import HALF, STEPS, spec
from tests.gloo.trainers import begin_and_run
from tests.ranks import RankPool
from tests.sim.dynamic_worlds import KEYS, Bags, drifting, kjt_of, random_times
from tests.worlds import plan_for

SEED = 3
GROWTH = GrowthConfig(max_num_embeddings=96, every_n_steps=1)


class Two(torch.nn.Module):
    """A pooled and a sequence collection; the ids of one feature admit none, or live for less."""

    def __init__(self) -> None:
        super().__init__()
        pooled = [
            DynamicConfig(blocks=4, ttl_s=500, read_only_features=("g",), growth=GROWTH),
            DynamicConfig(
                blocks=2,
                admission_threshold=2,
                counter_capacity=60,
                eviction="timestamp",
                ttl_s=400,
                feature_ttl_s={"f": 30},
            ),
        ]
        sequence = [
            DynamicConfig(blocks=2, ttl_steps=4, feature_ttl_steps={"g": 1}),
            DynamicConfig(blocks=2, eviction="lfu"),
        ]
        self.pooled = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(24, 8, f"p{i}", feature_names=[*KEYS], dynamic=rule)
                for i, rule in enumerate(pooled)
            ],
            device="meta",
        )
        self.sequence = EmbeddingCollection(
            [
                EmbeddingConfig(16, 8, f"s{i}", feature_names=[*KEYS], dynamic=rule)
                for i, rule in enumerate(sequence)
            ],
            device="meta",
        )

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        rows = [one.values() for one in self.sequence(kjt).values()]
        return self.pooled(kjt).values().sum() + torch.cat(rows).sum()


def place_of(shard: Shard) -> tuple[str, int, int]:
    return shard.table, shard.rows.start, shard.cols.start


def train(rank: int, world_size: int, group_size: int | None, seed: int) -> Any:
    """What this rank knows of ids in the end, with their rows; counts of steps and of growth."""
    rng, module = random.Random(seed), Two()
    tables = [*module.pooled.embedding_bag_configs(), *module.sequence.embedding_configs()]
    owners = list(range(group_size or world_size))
    kinds = {"p0": row_wise, "p1": column_wise, "s0": row_wise, "s1": row_wise}
    layouts = {t.name: kinds[t.name](t, owners) for t in tables}
    model = DistributedModelParallel(
        module,
        plan=plan_for(len(owners), layouts),
        sparse_optimizer=SGD(lr=0.05),
        sharding_group_size=group_size,
        seed=SEED,
    )
    steps = drifting(rng, 4, 8)
    times = random_times(rng, steps)
    for bags, of_ranks in zip(steps, times, strict=True):
        share = 4 // world_size
        mine = range(rank * share, (rank + 1) * share)
        parts: list[Bags] = [bags[one] for one in mine]
        whole = {key: [bag for part in parts for bag in part[key]] for key in KEYS}
        told = [of_ranks[one] for one in mine if of_ranks[one] is not None]
        loss = model(kjt_of(whole, max(told, default=None)))
        (loss * world_size).backward()  # gradients are averaged over ranks
        with torch.no_grad():
            model.eval()
            model(kjt_of(whole))
            model.train()
        model.grow()
    found = {
        place_of(state.shard): (state.weight.clone(), {k: v.clone() for k, v in state.ids.items()})
        for state in model.shard_states()
    }
    counts = {
        place_of(one.shard): one.take_counts(model.id_clocks[one.table.name])
        for one in model.dynamic_rows()
    }
    clocks, rows = model.id_clocks, dict(model.plan.rows)
    model.close()
    return found, counts, clocks, rows


@pytest.mark.seeds(range(10))
def test_two_groups_are_one_world(ranks: RankPool, seed: int) -> None:
    one, grid = ranks.run(2, train, None, seed), ranks.run(4, train, 2, seed)
    for rank in (0, 1):
        wanted, counts, clocks, rows = one[rank]
        assert rows["p0"] > 24, "the table has grown"
        for group in (0, 2):
            found, *others = grid[rank + group]
            assert others == [counts, clocks, rows]
            assert found.keys() == wanted.keys()
            for place, (weight, ids) in found.items():
                values, columns = wanted[place]
                assert ids.keys() == columns.keys()
                for name, column in ids.items():
                    assert torch.equal(column, columns[name]), (place, name)
                # float32 sums in another order
                torch.testing.assert_close(weight, values, rtol=1e-4, atol=1e-5)
        for place, (weight, _) in grid[rank][0].items():
            assert torch.equal(weight, grid[rank + 2][0][place][0])


def run(
    rank: int, world_size: int, data: Path, folder: Path, group: int | None, goes_on: str | None
) -> None:
    """Train, in groups or not, from the beginning or a checkpoint."""
    whole = spec(data, world_size, folder)
    (table,) = find_tables(whole.model)
    owners = range(group or world_size)
    plan = plan_for(len(owners), {table.name: row_wise(table, [*owners])})
    saved = (goes_on,) if goes_on else ()
    begin_and_run(replace(whole, plan=plan, sharding_group_size=group, resume_from=saved))


def test_a_run_in_groups_saves_what_one_rank_saves(ranks: RankPool, tmp_path: Path) -> None:
    rule = TIMED | {"growth": {"max_num_embeddings": 128, "every_n_steps": 2}}
    small = TABLE | {"num_embeddings": 32, "dynamic": rule}
    data = write(tmp_path / "data", small)
    one, grid, other = tmp_path / "one", tmp_path / "grid", tmp_path / "other"
    run(0, 1, data, one, None, None)
    ranks.run(4, run, data, grid, 2, None)
    run(0, 1, data, other, None, CheckpointManager(str(grid)).path(HALF))
    wanted = saved_ids(one)
    assert wanted == saved_ids(grid) == saved_ids(other)
    assert len(wanted) > 32


def saved_ids(folder: Path) -> list[tuple[int, ...]]:
    """What the last checkpoint knows of ids and candidates, row by row."""
    rows = load_table(CheckpointManager(str(folder)).path(STEPS), "t_user")
    names = [name for name in rows.column_names if name.startswith(("id_", "candidate_"))]
    assert "id_time" in names and "candidate_key" in names
    return list(zip(*(rows[name].to_pylist() for name in names), strict=True))


def refused(rank: int, world_size: int) -> None:
    module = Two()
    tables = [*module.pooled.embedding_bag_configs(), *module.sequence.embedding_configs()]
    plan = plan_for(2, {t.name: row_wise(t, [0, 1]) for t in tables})
    with pytest.raises(ConfigError, match=r"table 'p0' is dynamic, and rows of sharding groups"):
        DistributedModelParallel(module, plan=plan, sharding_group_size=2, sync_every=2)


def test_groups_that_drift_apart_are_refused(ranks: RankPool) -> None:
    ranks.run(4, refused)
