"""Checkpoints of dynamic tables in tables of another size or of other blocks: who keeps a row."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rayrec.checkpoint import CheckpointManager, ShardState, restore_checkpoint, save_checkpoint
from rayrec.data.hashing import mix
from rayrec.dynamic.clock import NO_TIME, Instant, clock_extras
from rayrec.dynamic.columns import IdColumns
from rayrec.dynamic.key_blocks import blocks_of
from rayrec.dynamic.kinds import KINDS, kinds_of
from rayrec.dynamic.resize import places_in
from rayrec.errors import CheckpointError
from rayrec.layout import (
    DynamicConfig,
    EmbeddingBagConfig,
    ShardingPlan,
    column_wise,
    data_parallel,
    grid_shard,
    row_wise,
    table_wise,
)
from tests.unit.checkpoint_worlds import Ranks
from tests.worlds import plan_for

STEP, TIME, WIDTH = 50, 1_700_000_000, 8
NOW = Instant(STEP, TIME)
TTLS: list[dict[str, int]] = [{}, {"ttl_steps": 3}, {"ttl_s": 30}]
EVICTIONS = ["step", "timestamp", "lfu", "none"]


def random_table(rng: random.Random, ttl: dict[str, int], eviction: str) -> EmbeddingBagConfig:
    blocks = rng.choice([1, 2, 4, 8])
    rule = DynamicConfig(
        blocks=blocks,
        eviction=eviction,
        admission_threshold=2,
        counter_capacity=rng.choice([None, blocks * rng.randint(1, 20)]),
        **ttl,
    )
    rows = blocks * rng.randint(1, 8)
    return EmbeddingBagConfig(rows, WIDTH, "t", feature_names=["f"], dynamic=rule)


def places_of(table: EmbeddingBagConfig, name: str) -> tuple[int, int, int]:
    """Blocks, places of a block, and how many of them keys get."""
    size, (kind,) = table.row_multiple, [one for one in kinds_of(table) if one.name == name]
    return table.num_embeddings // size, size * kind.lanes, kind.most


def random_columns(rng: random.Random, table: EmbeddingBagConfig, kind: str) -> IdColumns:
    """Keys at the places of their blocks, some of which are free."""
    blocks, size, most = places_of(table, kind)
    keys = [-1] * (blocks * size)
    for _ in range(2 * len(keys)):
        one = rng.randrange(-(2**63), 2**63)
        (block,) = blocks_of(np.array([one]), blocks)
        free = [at for at in range(block * size, block * size + most) if keys[at] == -1]
        if one != -1 and free and rng.random() < 0.7:
            keys[rng.choice(free)] = one
    seen = torch.tensor([rng.randint(STEP - 6, STEP) for _ in keys], dtype=torch.int32)
    hits = torch.tensor([rng.randint(1, 3) for _ in keys], dtype=torch.int32)
    time = torch.tensor([TIME - 10 * rng.randint(0, 6) for _ in keys])
    timed = table.dynamic is not None and table.dynamic.uses_time
    return IdColumns(torch.tensor(keys), seen, hits, time if timed else None)


def mixed(key: int) -> int:
    return int(mix(np.array([key], np.int64).view(np.uint64))[0])


def kept_by(table: EmbeddingBagConfig, saved: IdColumns, kind: str) -> tuple[dict[int, int], int]:
    """Key -> place, and how many found none, in plain Python."""
    rule, (blocks, size, most) = table.dynamic, places_of(table, kind)
    assert rule is not None
    eviction = rule.eviction if kind == "id" else "step"
    by_block: dict[int, list[tuple[int, ...]]] = {}
    times = torch.full_like(saved.key, -1) if saved.time is None else saved.time
    columns = (column.tolist() for column in (*saved[:3], times))
    for at, (key, seen, hits, time) in enumerate(zip(*columns, strict=True)):
        is_over = rule.ttl_steps is not None and seen + rule.ttl_steps < STEP
        is_over = is_over or (rule.ttl_s is not None and -1 < time < TIME - rule.ttl_s)
        if key != -1 and not is_over:
            (block,) = blocks_of(np.array([key]), blocks)
            scores = {"lfu": (hits, seen), "timestamp": (time, hits)}
            score = scores.get(eviction, (seen, hits))
            by_block.setdefault(int(block), []).append((*score, mixed(key), at, key))
    places, left_out = {}, 0
    for block, ids in by_block.items():
        best = sorted(sorted(ids)[-most:], key=lambda one: one[3])
        left_out += len(ids) - len(best)
        places |= {one[4]: block * size + number for number, one in enumerate(best)}
    return places, left_out


@pytest.mark.seeds(range(100))
def test_the_best_of_a_block_keep_a_row(seed: int) -> None:
    rng = random.Random(seed)
    ttl, eviction = rng.choice(TTLS), rng.choice(EVICTIONS)
    old, new = random_table(rng, ttl, eviction), random_table(rng, ttl, eviction)
    kind = rng.choice(KINDS)
    saved = random_columns(rng, old, kind)
    places, left_out = places_in(new, saved, kind, NOW)
    wanted = kept_by(new, saved, kind)
    got = {int(saved.key[at]): int(place) for at, place in enumerate(places) if place >= 0}
    assert (got, left_out) == wanted


def random_plan(rng: random.Random, table: EmbeddingBagConfig, ranks: int) -> ShardingPlan:
    every = list(range(ranks))
    layouts = [table_wise(table, rng.choice(every)), row_wise(table, every)]
    layouts += [column_wise(table, every), grid_shard(table, [every]), data_parallel(table, every)]
    return plan_for(ranks, {"t": rng.choice(layouts)})


def states_of(
    table: EmbeddingBagConfig, plan: ShardingPlan, rank: int, whole: dict[str, torch.Tensor]
) -> list[ShardState]:
    states = []
    for shard in plan.shards(rank):
        rows, cols = slice(shard.rows.start, shard.rows.stop), slice(*_ends(shard.cols))
        own = {name: tensor[rows].clone() for name, tensor in whole.items()}
        optimizer = {"sums": own.pop("sums"), "squares": own.pop("squares")[:, cols].contiguous()}
        states.append(ShardState(shard, own.pop("weight")[:, cols].contiguous(), optimizer, own))
    return states


def _ends(part: range) -> tuple[int, int]:
    return part.start, part.stop


def save(
    path: str,
    table: EmbeddingBagConfig,
    plan: ShardingPlan,
    whole: dict,
    clocks: dict[str, Instant],
) -> None:
    def body(rank: int, gather) -> None:
        save_checkpoint(
            path,
            shards=states_of(table, plan, rank, whole),
            tables=[table],
            plan=plan,
            rank=rank,
            world_size=plan.world_size,
            gather=gather,
            dense={},
            step=STEP,
            extras=clock_extras(clocks),
        )

    Ranks(plan.world_size).run(body).all()


@pytest.mark.seeds(range(60))
def test_any_plan_restores_any_other_size(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    ttl, eviction = rng.choice(TTLS), rng.choice(EVICTIONS[:3])
    old, new = random_table(rng, ttl, eviction), random_table(rng, ttl, eviction)
    rows = old.num_embeddings
    saved, waiting = (random_columns(rng, old, kind) for kind in KINDS)
    whole = {"weight": torch.randn(rows, WIDTH), "squares": torch.rand(rows, WIDTH)}
    whole["sums"] = torch.rand(rows)
    whole |= saved.in_lanes("id", 1) | in_lanes(old, waiting)
    path = CheckpointManager(str(tmp_path)).path(STEP)
    save(path, old, random_plan(rng, old, rng.randint(1, 3)), whole, {"t": NOW})
    plan = random_plan(rng, new, rng.randint(1, 3))
    empty = {
        name: torch.full((new.num_embeddings, *tensor.shape[1:]), 7, dtype=tensor.dtype)
        for name, tensor in whole.items()
        if not name.startswith("candidate_")
    }
    blank = in_lanes(new, random_columns(rng, new, "candidate"))
    empty |= {name: torch.full_like(column, 7) for name, column in blank.items()}
    is_same = places_of(old, "candidate") == places_of(new, "candidate")
    is_same = is_same and rows == new.num_embeddings
    places, left_out = kept_by(new, saved, "id")
    for rank in range(plan.world_size):
        states = states_of(new, plan, rank, empty)
        restored = restore_checkpoint(path, states, tables=[new])
        assert restored.left_out == ({"t": left_out} if states and not is_same else {})
        if is_same:
            continue
        for state in states:
            check(state, places, whole, saved.key.tolist())
            wanted = kept_by(new, waiting, "candidate")[0]
            known = IdColumns.of_lanes("candidate", state.ids)
            lanes = len(known.key) // len(state.shard.rows)
            found = enumerate(known.key.tolist(), lanes * state.shard.rows.start)
            assert {key: at for at, key in found if key != -1} == {
                key: at for key, at in wanted.items() if at // lanes in state.shard.rows
            }
            for key, seen in zip(known.key.tolist(), known.seen.tolist(), strict=True):
                assert key == -1 or seen == waiting.seen[waiting.key == key]


def in_lanes(table: EmbeddingBagConfig, waiting: IdColumns) -> dict[str, torch.Tensor]:
    """Columns of candidates as a checkpoint has them."""
    return waiting.in_lanes("candidate", len(waiting.key) // table.num_embeddings)


def check(state: ShardState, places: dict[int, int], whole: dict, keys: list[int]) -> None:
    first, cols = state.shard.rows.start, slice(*_ends(state.shard.cols))
    found = {key: at for at, key in enumerate(state.ids["id_key"].tolist(), first) if key != -1}
    assert found == {key: at for key, at in places.items() if at in state.shard.rows}
    for key, at in found.items():
        old, own = keys.index(key), at - first
        assert torch.equal(state.weight[own], whole["weight"][old, cols])
        assert torch.equal(state.optimizer["squares"][own], whole["squares"][old, cols])
        assert state.optimizer["sums"][own] == whole["sums"][old]
        for name in (one for one in state.ids if one.startswith("id_")):
            assert state.ids[name][own] == whole[name][old]
    free = [at for at in range(len(state.weight)) if at + first not in found.values()]
    assert not state.weight[free].any()


@pytest.mark.seeds(range(20))
def test_a_table_that_was_not_dynamic_becomes_one(seed: int, tmp_path: Path) -> None:
    """Its row numbers are ids, which go first when others need rows."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    new = random_table(rng, rng.choice(TTLS), rng.choice(["step", "timestamp"]))
    old = replace(new, num_embeddings=rng.randint(1, 40), dynamic=None)
    rows = old.num_embeddings
    whole = {"weight": torch.randn(rows, WIDTH), "squares": torch.rand(rows, WIDTH)}
    whole["sums"] = torch.rand(rows)
    path = CheckpointManager(str(tmp_path)).path(STEP)
    save(path, old, random_plan(rng, old, rng.randint(1, 3)), whole, {})
    none = torch.zeros(rows, dtype=torch.int32)
    saved = IdColumns(torch.arange(rows), none, none)
    places, left_out = kept_by(
        replace(new, dynamic=replace(new.dynamic, ttl_steps=None, ttl_s=None)), saved, "id"
    )
    plan = random_plan(rng, new, 2)
    shape = (new.num_embeddings, WIDTH)
    empty = {"weight": torch.full(shape, 7.0), "squares": torch.full(shape, 7.0)}
    empty["sums"] = torch.full(shape[:1], 7.0)
    columns = random_columns(rng, new, "id").in_lanes("id", 1)
    columns |= in_lanes(new, random_columns(rng, new, "candidate"))
    empty |= {name: torch.full_like(column, 7) for name, column in columns.items()}
    whole |= {"id_key": torch.arange(rows), "id_seen": none, "id_hits": none}
    whole["id_time"] = torch.full((rows,), NO_TIME)
    for rank in range(plan.world_size):
        states = states_of(new, plan, rank, empty)
        restored = restore_checkpoint(path, states, tables=[new])
        assert restored.left_out == ({"t": left_out} if states else {})
        for state in states:
            check(state, places, whole, list(range(rows)))
            assert (IdColumns.of_lanes("candidate", state.ids).key == -1).all()


def test_another_width_is_refused(tmp_path: Path) -> None:
    rng = random.Random(0)
    old = random_table(rng, {}, "step")
    rows = old.num_embeddings
    whole = {"weight": torch.randn(rows, WIDTH), "squares": torch.rand(rows, WIDTH)}
    whole["sums"] = torch.rand(rows)
    whole |= random_columns(rng, old, "id").in_lanes("id", 1)
    whole |= in_lanes(old, random_columns(rng, old, "candidate"))
    path = CheckpointManager(str(tmp_path)).path(STEP)
    save(path, old, random_plan(rng, old, 1), whole, {"t": NOW})
    other = replace(old, num_embeddings=2 * rows, embedding_dim=4)
    with pytest.raises(CheckpointError, match=f"'t' is {rows} x 8 in .* and {2 * rows} x 4"):
        restore_checkpoint(path, [], tables=[other])
