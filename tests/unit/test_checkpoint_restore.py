"""Whatever plan wrote a checkpoint, any other plan reads the same table back."""

from __future__ import annotations

import random

import fsspec
import pytest
import torch
from pyarrow import fs

from rayrec.checkpoint import ShardState, read_manifest, restore_checkpoint
from rayrec.layout import DataType, Shard, ShardingPlan, TableLayout, column_wise, row_wise
from tests.unit.checkpoint_worlds import (
    Truth,
    make_truth,
    one_rank_plan,
    random_plan,
    random_truths,
    save_world,
    shard_states,
)
from tests.worlds import part_of, plan_for


def memory_store() -> fs.FileSystem:
    """A filesystem that is not the local one: no fsync, no memory map."""
    return fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))


def expected_rowwise(truth: Truth, saved: ShardingPlan, wanted: Shard) -> torch.Tensor:
    """Reference: give every element the saved value of its column block, then average over the
    wanted columns.
    """
    spread = torch.empty_like(truth.squares)
    for shard in saved.tables[truth.config.name].layout.shards(truth.config.name):
        means = part_of(truth.squares, shard).mean(1).float().double()
        part_of(spread, shard).copy_(means[:, None])
    return part_of(spread, wanted).mean(1).float()


def assert_restored(state: ShardState, truth: Truth, saved: ShardingPlan) -> None:
    want = truth.shard_state(state.shard, fill=False)
    assert torch.equal(state.weight, want.weight)
    for name, got in state.optimizer.items():
        if truth.state == "element":
            assert torch.equal(got, want.optimizer[name])
        else:  # two orders of one float64 sum, then rounded to float32: one unit in the last place
            torch.testing.assert_close(
                got, expected_rowwise(truth, saved, state.shard), rtol=2e-7, atol=0
            )


def save_and_restore(rng: random.Random, path: str, filesystem: fs.FileSystem | None) -> None:
    truths = random_truths(rng)
    saved, wanted = (random_plan(rng, truths, rng.randint(1, 6)) for _ in range(2))
    save_world(
        path, truths, saved, filesystem=filesystem, batch_bytes=rng.choice((1, 200, 1 << 20))
    )
    by_name = {t.config.name: t for t in truths}
    for rank in range(wanted.world_size):
        states = shard_states(truths, wanted, rank, fill=True)
        restored = restore_checkpoint(
            path, states, tables=[t.config for t in truths], filesystem=filesystem
        )
        assert restored.step == 7 and torch.equal(restored.dense["bias"], torch.arange(3.0))
        for state in states:
            assert_restored(state, by_name[state.shard.table], saved)


@pytest.mark.seeds(range(150))
def test_any_plan_restores_under_any_other_plan(seed):
    save_and_restore(random.Random(seed), f"/restore/{seed}", memory_store())


@pytest.mark.seeds(range(1000, 1010))
def test_any_plan_restores_from_local_disk(seed, tmp_path):
    save_and_restore(random.Random(seed), str(tmp_path / "checkpoint"), None)


@pytest.mark.seeds(range(3))
def test_same_plan_restores_bit_for_bit(seed, tmp_path):
    rng = random.Random(seed)
    truths = [
        make_truth(rng, "a", 40, 24, "row"),
        make_truth(rng, "b", 30, 12, "element", DataType.FP16),
    ]
    plan = random_plan(rng, truths, 3)
    save_world(str(tmp_path / "c"), truths, plan, batch_bytes=300)
    for rank in range(3):
        states = shard_states(truths, plan, rank, fill=True)
        restore_checkpoint(str(tmp_path / "c"), states)
        for state, want in zip(states, shard_states(truths, plan, rank), strict=True):
            assert torch.equal(state.weight, want.weight)
            assert torch.equal(state.optimizer["momentum1"], want.optimizer["momentum1"])


def test_merging_whole_column_blocks_gives_the_mean_over_all_columns(tmp_path):
    truth = make_truth(random.Random(0), "t", 50, 40, "row")
    # unequal widths, so that plain means would be wrong
    layout = TableLayout((0, 20, 50), (0, 4, 16, 40), ((0, 1, 0), (1, 0, 1)))
    save_world(str(tmp_path / "c"), [truth], plan_for(2, {"t": layout}))
    (state,) = shard_states([truth], one_rank_plan([truth]), 0, fill=True)
    restore_checkpoint(str(tmp_path / "c"), [state])
    torch.testing.assert_close(
        state.optimizer["momentum1"], truth.squares.mean(1).float(), rtol=2e-7, atol=0
    )


def test_splitting_then_merging_column_blocks_gives_the_same_row_state_bit_for_bit(tmp_path):
    truth = make_truth(random.Random(1), "t", 50, 12, "row")
    whole, split = (one_rank_plan([truth]), plan_for(3, {"t": column_wise(truth.config, range(3))}))
    save_world(str(tmp_path / "whole"), [truth], whole)
    parts = [state for rank in range(3) for state in shard_states([truth], split, rank, fill=True)]
    restore_checkpoint(str(tmp_path / "whole"), parts)
    save_world(
        str(tmp_path / "split"),
        [truth],
        split,
        by_rank={rank: {"shards": [parts[rank]]} for rank in range(3)},
    )
    (merged,) = shard_states([truth], whole, 0, fill=True)
    restore_checkpoint(str(tmp_path / "split"), [merged])
    assert torch.equal(merged.optimizer["momentum1"], truth.squares.mean(1).float())


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (DataType.FP16, torch.float32),
        (DataType.FP32, torch.float16),
        (DataType.BF16, torch.float32),
        (DataType.FP32, torch.bfloat16),
        (DataType.FP16, torch.bfloat16),
    ],
)
def test_half_and_single_precision_convert_into_each_other(saved, wanted, tmp_path):
    truth = make_truth(random.Random(2), "t", 30, 8, "none", saved)
    save_world(str(tmp_path / "c"), [truth], one_rank_plan([truth]))
    weight = torch.zeros(30, 8, dtype=wanted)
    restore_checkpoint(
        str(tmp_path / "c"), [ShardState(one_rank_plan([truth]).shards(0)[0], weight)]
    )
    assert torch.equal(weight, truth.weight.to(wanted))


def test_a_rank_verifies_only_the_batches_it_reads(tmp_path):
    truth = make_truth(random.Random(3), "t", 40, 4, "row")
    # 5 rows of 20 bytes per batch
    save_world(str(tmp_path / "c"), [truth], one_rank_plan([truth]), batch_bytes=100)
    (entry,) = read_manifest(str(tmp_path / "c")).files
    assert len(entry.marks) == 9
    with open(tmp_path / "c" / entry.path, "r+b") as file:  # damage rows 35 to 39
        file.seek(entry.marks[7].end - 30)
        file.write(b"\xff" * 8)
    halves = plan_for(2, {"t": row_wise(truth.config, range(2))})
    (lower,), (upper,) = (shard_states([truth], halves, rank, fill=True) for rank in range(2))
    restore_checkpoint(str(tmp_path / "c"), [lower])
    assert torch.equal(lower.weight, truth.weight[:20])
    with pytest.raises(Exception, match="damaged between bytes"):
        restore_checkpoint(str(tmp_path / "c"), [upper])


def test_live_tensors_may_be_strided_parameters(tmp_path):
    truth = make_truth(random.Random(4), "t", 30, 8, "row")
    shard = one_rank_plan([truth]).shards(0)[0]
    store = torch.nn.Parameter(torch.zeros(30, 16))
    with torch.no_grad():
        store[:, ::2] = truth.weight
    state = ShardState(shard, store[:, ::2], {"momentum1": torch.zeros(60)[::2]})
    save_world(
        str(tmp_path / "c"), [truth], one_rank_plan([truth]), by_rank={0: {"shards": [state]}}
    )
    back = torch.nn.Parameter(torch.zeros(30, 16))
    restore_checkpoint(str(tmp_path / "c"), [ShardState(shard, back[:, 1::2])])  # the weight alone
    assert torch.equal(back[:, 1::2], truth.weight) and not back[:, ::2].any()


def test_dense_optimizer_goes_on_as_if_it_had_not_stopped(tmp_path):
    truth = make_truth(random.Random(5), "t", 4, 4, "none")

    def make() -> tuple[torch.nn.Linear, torch.optim.Adam]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 2)
        return layer, torch.optim.Adam(layer.parameters(), lr=0.1)

    def train(layer: torch.nn.Linear, optimizer: torch.optim.Adam, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            layer(torch.full((5, 3), float(step))).square().sum().backward()
            optimizer.step()

    straight, optimizer = make()
    train(straight, optimizer, range(6))
    first, optimizer = make()
    train(first, optimizer, range(3))
    cursor, extras = {"epoch": 1, "batch": 3}, {"seed": 11}
    options = {
        "dense": dict(first.named_parameters()),
        "dense_optimizer": optimizer.state_dict(),
        "cursor": cursor,
        "extras": extras,
    }
    save_world(str(tmp_path / "c"), [truth], one_rank_plan([truth]), **options)
    second, optimizer = make()
    restored = restore_checkpoint(str(tmp_path / "c"), [])
    second.load_state_dict(restored.dense)
    optimizer.load_state_dict(restored.dense_optimizer)
    train(second, optimizer, range(3, 6))
    assert torch.equal(second.weight, straight.weight) and torch.equal(second.bias, straight.bias)
    assert restored.cursor == cursor and restored.extras == extras


def test_manifest_is_the_same_on_every_rank_and_keeps_the_plan(tmp_path):
    rng = random.Random(6)
    truths = random_truths(rng)
    plan = random_plan(rng, truths, 4)
    manifests = save_world(
        str(tmp_path / "c"), truths, plan, optimizers={"t0": {"name": "sgd", "lr": 0.1}}
    )
    on_disk = read_manifest(str(tmp_path / "c"))
    assert all(manifest.to_bytes() == on_disk.to_bytes() for manifest in manifests)
    assert on_disk.sharding_plan() == plan and list(on_disk.sharding_plan().tables) == list(
        plan.tables
    )
    assert on_disk.optimizers == {"t0": {"name": "sgd", "lr": 0.1}}
