"""kill -9 of a writing process at random moments leaves every earlier checkpoint whole, and the
next save goes on.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time

import pytest
import torch

from rayrec.checkpoint import (
    CheckpointManager,
    Parent,
    ShardState,
    TouchedState,
    copy_touched,
    restore_checkpoint,
    save_checkpoint,
)
from rayrec.layout import EmbeddingBagConfig, TableLayout
from tests.worlds import plan_for

KILLS = 10
ROWS, DIM = 4000, 16
TABLES = [EmbeddingBagConfig(ROWS, DIM, name, feature_names=[name]) for name in ("a", "b")]
# six files per table, all written by rank 0
LAYOUT = TableLayout((0, 1000, 2500, ROWS), (0, 4, DIM), ((0, 0), (0, 0), (0, 0)))
PLAN = plan_for(1, {table.name: LAYOUT for table in TABLES})


def states_at(step: int) -> list[ShardState]:
    """The model after `step` steps: every element tells its row and the last step that touched it.

    A step touches every third row.
    """
    states = []
    for shard in PLAN.shards(0):
        rows = torch.arange(shard.rows.start, shard.rows.stop)
        last = (step - (step - rows) % 3).float()
        states.append(
            ShardState(
                shard,
                (rows * 1000.0 + last)[:, None].repeat(1, len(shard.cols)),
                {"momentum1": rows + last},
            )
        )
    return states


def touched_at(step: int) -> list[TouchedState]:
    """What an increment of a step holds."""
    copies = []
    for state in states_at(step):
        rows = torch.arange(state.shard.rows.start, state.shard.rows.stop)
        copies.append(copy_touched(state, rows[(step - rows) % 3 == 0]))
    return copies


def save_forever(storage_path: str, first_step: int, started, increments: bool) -> None:
    """The process to be killed: it does nothing but save, one step after the other, and keeps three
    checkpoints; with `increments`, each fourth one is whole.
    """
    manager = CheckpointManager(storage_path)
    parent: Parent | None = None
    for step in range(first_step, first_step + 100_000):
        started.set()
        if not increments or step % 4 == 0:
            parent = None
        manifest = save_checkpoint(
            manager.path(step),
            shards=states_at(step) if parent is None else touched_at(step),
            parent=parent,
            tables=TABLES,
            plan=PLAN,
            rank=0,
            world_size=1,
            gather=lambda value: [value],
            dense={"w": torch.full((50_000,), float(step))},
            step=step,
            batch_bytes=4096,
        )
        parent = Parent(manager.path(step).rpartition("/")[2], manifest.sha256())
        manager.prune(3)


def assert_whole(manager: CheckpointManager, step: int) -> None:
    states = [
        ShardState(
            s.shard, torch.zeros_like(s.weight), {"momentum1": torch.zeros(len(s.shard.rows))}
        )
        for s in states_at(step)
    ]
    restored = restore_checkpoint(manager.path(step), states, tables=TABLES)
    assert restored.step == step and bool((restored.dense["w"] == step).all())
    for got, want in zip(states, states_at(step), strict=True):
        assert torch.equal(got.weight, want.weight) and torch.equal(
            got.optimizer["momentum1"], want.optimizer["momentum1"]
        )


@pytest.mark.parametrize("increments", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kill_9_at_random_moments_leaves_earlier_checkpoints_whole(tmp_path, increments):
    rng = random.Random(time.time_ns())  # the moments cannot repeat anyway
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "pyarrow.fs", "rayrec.checkpoint"])
    manager = CheckpointManager(str(tmp_path))
    last, cut_short = 0, 0
    for _ in range(KILLS):
        started = context.Event()
        writer = context.Process(
            target=save_forever, args=(str(tmp_path), last + 1, started, increments), daemon=True
        )
        writer.start()
        assert started.wait(60)
        deadline = time.monotonic() + 60
        # on a busy machine no save might be done before the last kill
        while not manager.steps() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.3))
        writer.kill()
        writer.join()
        assert writer.exitcode == -9
        steps = manager.steps()
        assert not last or (steps and steps[-1] >= last), (
            f"checkpoint {last} was there before and is gone: {steps}"
        )
        for step in steps:
            assert_whole(manager, step)
        last = steps[-1] if steps else last
        cut_short += len(os.listdir(tmp_path)) > len(steps)
    assert last > 0, "no save ever completed, so nothing was at stake"
    assert cut_short > 0, "no kill came during a save, so nothing was tested"
