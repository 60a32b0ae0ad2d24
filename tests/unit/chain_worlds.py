"""Chains of checkpoints: a truth that changes between saves, whole ones and increments in turn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from rayrec.checkpoint import (
    CheckpointManager,
    Manifest,
    Parent,
    ShardState,
    TouchedState,
    copy_touched,
)
from rayrec.layout import ShardingPlan
from tests.unit.checkpoint_worlds import Truth, save_world, shard_states


def train(rng: random.Random, truths: Sequence[Truth]) -> tuple[list[Truth], dict[str, list[int]]]:
    """The truths after some steps, and per table the rows that were touched; perhaps none."""
    after, touched = [], {}
    for truth in truths:
        rows = truth.config.num_embeddings
        chosen = sorted(rng.sample(range(rows), rng.randint(0, rows)))
        weight, squares = truth.weight.clone(), truth.squares.clone()
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        # a touched row may stay as it is
        moved = [row for row in chosen if rng.random() < 0.8]
        shape = (len(moved), weight.shape[1])
        weight[moved] = torch.randn(shape, generator=generator).to(weight.dtype)
        squares[moved] = torch.rand(shape, generator=generator, dtype=squares.dtype)
        after.append(replace(truth, weight=weight, squares=squares))
        touched[truth.config.name] = chosen
    return after, touched


def touched_states(
    states: Sequence[ShardState], touched: dict[str, list[int]]
) -> list[TouchedState]:
    """What an increment of these shards holds."""
    copies = []
    for state in states:
        rows = [row for row in touched[state.shard.table] if row in state.shard.rows]
        copies.append(copy_touched(state, torch.tensor(rows, dtype=torch.int64)))
    return copies


def save_increment(
    path: str,
    truths: Sequence[Truth],
    plan: ShardingPlan,
    touched: dict[str, list[int]],
    parent: Parent,
    **options: object,
) -> Manifest:
    """Save the touched rows from all ranks of `plan`."""
    by_rank = {}
    for rank in range(plan.world_size):
        states = shard_states(truths, plan, rank)
        by_rank[rank] = {"shards": touched_states(states, touched)}
    given = {"by_rank": by_rank, "parent": parent, **options}
    return save_world(path, truths, plan, **given)[0]


def save_chain(
    rng: random.Random,
    manager: CheckpointManager,
    truths: Sequence[Truth],
    plan: ShardingPlan,
    length: int,
    full_every: int = 0,
    **options: object,
) -> list[list[Truth]]:
    """Save `length` checkpoints, every `full_every`-th of them whole; the truths at each.

    Step i lies at `manager.path(i + 1)`.
    """
    history: list[list[Truth]] = []
    now, parent = list(truths), None
    for i in range(length):
        path, step = manager.path(i + 1), i + 1
        given = {"step": step, "dense": {"bias": torch.full((3,), float(step))}, **options}
        if parent is None or (full_every and i % full_every == 0):
            manifest = save_world(path, now, plan, **given)[0]
        else:
            now, touched = train(rng, now)
            manifest = save_increment(path, now, plan, touched, parent, **given)
        parent = Parent(path.rpartition("/")[2], manifest.sha256())
        history.append(now)
    return history
