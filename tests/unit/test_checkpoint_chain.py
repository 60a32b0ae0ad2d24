"""Chains of increments: what was saved comes back bit for bit, damage is found, and pruning leaves
chains whole.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from rayrec.checkpoint import (
    CheckpointManager,
    Parent,
    TableReader,
    check_whole,
    inspect_checkpoint,
    load_table,
    read_manifest,
    restore_checkpoint,
)
from rayrec.errors import CheckpointError, DamagedCheckpointError
from rayrec.layout import ShardingPlan, TablePlacement, row_wise
from tests.unit.chain_worlds import save_chain, save_increment
from tests.unit.checkpoint_worlds import (
    Truth,
    make_truth,
    one_rank_plan,
    random_plan,
    random_truths,
    save_world,
    shard_states,
)

LENGTH = 5


def assert_restored(
    path: str, truths: list[Truth], plan: ShardingPlan, saved_by: ShardingPlan
) -> None:
    """Every rank of `plan` gets what the truths hold; state of other column cuts is left out."""
    for rank in range(plan.world_size):
        got = shard_states(truths, plan, rank, fill=True)
        wanted = shard_states(truths, plan, rank)
        restore_checkpoint(path, got, tables=[t.config for t in truths])
        for one, other in zip(got, wanted, strict=True):
            name = one.shard.table
            assert torch.equal(one.weight, other.weight), f"{one.shard} of {path}"
            same_cuts = _col_cuts(plan, name) == _col_cuts(saved_by, name)
            for state, tensor in one.optimizer.items():
                if same_cuts or tensor.dim() == 2:
                    assert torch.equal(tensor, other.optimizer[state]), f"{state} of {one.shard}"
                assert not tensor.isnan().any()


def _col_cuts(plan: ShardingPlan, table: str) -> object:
    return sorted({(s.cols.start, s.cols.stop) for s in plan.tables[table].layout.shards(table)})


@pytest.mark.seeds(range(60))
def test_every_link_of_a_chain_restores_bit_for_bit_under_any_plan(seed, tmp_path):
    rng = random.Random(seed)
    truths, manager = random_truths(rng), CheckpointManager(str(tmp_path))
    plan = random_plan(rng, truths, rng.randint(1, 4))
    options = {"batch_bytes": rng.choice([64, 300, 1 << 20])}
    history = save_chain(rng, manager, truths, plan, LENGTH, rng.choice([0, 2, 3]), **options)
    other = random_plan(rng, truths, rng.randint(1, 4))
    for i, then in enumerate(history):
        path = manager.path(i + 1)
        assert_restored(path, then, rng.choice([plan, other]), plan)
        restored = restore_checkpoint(path, [])
        assert restored.step == i + 1 and bool((restored.dense["bias"] == i + 1).all())


@pytest.mark.seeds(range(20))
def test_all_readers_of_tables_see_whole_rows(seed, tmp_path):
    rng = random.Random(seed)
    truths, manager = random_truths(rng), CheckpointManager(str(tmp_path))
    plan = random_plan(rng, truths, rng.randint(1, 3))
    history = save_chain(rng, manager, truths, plan, 4, batch_bytes=200)
    path = manager.path(4)
    check_whole(path, read_manifest(path))
    reader = TableReader(path, read_manifest(path))
    for truth in history[-1]:
        name, rows = truth.config.name, truth.config.num_embeddings
        table = load_table(path, name)
        assert table["row"].to_pylist() == list(range(rows))
        weight = torch.tensor(table["weight"].to_pylist(), dtype=torch.float64)
        assert torch.equal(weight, truth.weight.double())
        assert torch.equal(reader.read(name, range(rows)), truth.weight.float())


def test_pyarrow_alone_reads_an_increment(tmp_path):
    rng = random.Random(0)
    truths, manager = [make_truth(rng, "t", 30, 8, "row")], CheckpointManager(str(tmp_path))
    plan = one_rank_plan(truths)
    (_, then) = save_chain(rng, manager, truths, plan, 2, batch_bytes=100)
    body = json.loads(Path(manager.path(2), "manifest.json").read_text())
    assert body["version"] == 2 and body["parent"]["name"] == "step-00000001"
    (entry,) = body["files"]
    table = pa.ipc.open_file(f"{manager.path(2)}/{entry['path']}").read_all()
    assert table.schema.names == ["row", "weight", "momentum1"] and len(table) == entry["held"]
    rows = table["row"].to_pylist()
    assert rows == sorted(set(rows))
    for row, weight in zip(rows, table["weight"].to_pylist(), strict=True):
        assert weight == then[0].weight[row].tolist()


def test_a_whole_checkpoint_is_written_as_version_1(tmp_path):
    """Older versions of rayrec read it, and what they wrote is read."""
    truths = [make_truth(random.Random(0), "t", 5, 4, "row")]
    save_world(str(tmp_path / "c"), truths, one_rank_plan(truths))
    body = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert body["version"] == 1 and "parent" not in body
    assert set(body["files"][0]) == {
        *("path", "table", "rows", "cols", "columns"),
        *("bytes", "crc32", "batch_rows", "marks"),
    }


def test_inspect_tells_what_an_increment_adds_to(tmp_path):
    rng = random.Random(1)
    truths, manager = [make_truth(rng, "t", 30, 8, "row")], CheckpointManager(str(tmp_path))
    save_chain(rng, manager, truths, one_rank_plan(truths), 2)
    whole, increment = (inspect_checkpoint(manager.path(step)) for step in (1, 2))
    (entry,) = read_manifest(manager.path(2)).files
    assert whole.parent is None and whole.tables[0].touched is None
    assert "increment" not in whole.to_text()
    assert increment.parent == "step-00000001" and increment.tables[0].touched == entry.held
    assert f"an increment on step-00000001: {entry.held} rows" in increment.to_text()
    assert increment.tables[0].state == ("momentum1",)


def test_shards_of_another_kind_than_the_save_are_refused(tmp_path):
    truths = [make_truth(random.Random(0), "t", 5, 4, "row")]
    plan, parent = one_rank_plan(truths), Parent("step-00000001", "0" * 64)
    with pytest.raises(CheckpointError, match=r"is a ShardState; this save wants a TouchedState"):
        save_world(str(tmp_path / "a"), truths, plan, parent=parent)
    with pytest.raises(CheckpointError, match=r"is a TouchedState; this save wants a ShardState"):
        save_increment(str(tmp_path / "b"), truths, plan, {"t": [1]}, None)


class Damage:
    """One thing that goes wrong with the files of a chain, drawn by a seed."""

    def __init__(self, rng: random.Random, root: Path, steps: int) -> None:
        self.rng = rng
        folder = root / f"step-{rng.randint(1, steps):08d}"
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        self.target, self.folder = rng.choice(files), folder
        self.kind = rng.choice(["flip", "flip", "flip", "cut", "gone", "folder", "swap", "none"])

    def happen(self) -> int | None:
        """Do it; the step that is damaged, or None where nothing changed."""
        step = int(self.folder.name.removeprefix("step-"))
        data = bytearray(self.target.read_bytes())
        # the newline after a manifest's JSON means nothing to its own reader
        end = len(data) - (self.target.name == "manifest.json")
        if self.kind == "none":
            return None
        if self.kind == "flip":
            data[self.rng.randrange(end)] ^= 1 << self.rng.randrange(8)
            self.target.write_bytes(data)
        elif self.kind == "cut":
            self.target.write_bytes(data[: self.rng.randrange(end)])
        elif self.kind == "gone":
            self.target.unlink()
        elif self.kind == "folder":
            shutil.rmtree(self.folder)
        elif self.kind == "swap":
            # the same kind of file, of another step
            others = [p for p in self.folder.parent.glob("step-*") if p != self.folder]
            other = self.rng.choice(sorted(others)) / self.target.relative_to(self.folder)
            if other.read_bytes() == bytes(data):
                return None
            shutil.copy(other, self.target)
        return step


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A chain of whole, 2 increments, whole, 2 increments on disk, and what it held at each."""
    root, rng = tmp_path_factory.mktemp("chain"), random.Random(5)
    truths = [make_truth(rng, "a", 12, 4, "row"), make_truth(rng, "b", 9, 8, "element")]
    manager, plan = CheckpointManager(str(root)), random_plan(rng, truths, 2)
    history = save_chain(rng, manager, truths, plan, 6, full_every=3, batch_bytes=150)
    return root, history


def links_of(step: int) -> set[int]:
    """The links of the chain of a step."""
    first = 1 if step <= 3 else 4
    return set(range(first, step + 1))


def check_damage(seed: int, chain, tmp_path: Path, schedules: int) -> None:
    """Against a model: a step restores exactly when none of its links is damaged."""
    source, history = chain
    one = one_rank_plan(history[0])
    for schedule in range(schedules):
        root = Path(shutil.copytree(source, tmp_path / str(schedule)))
        rng = random.Random(f"{seed} {schedule}")
        damaged = Damage(rng, root, len(history)).happen()
        for step, truths in enumerate(history, start=1):
            states = shard_states(truths, one, 0, fill=True)
            try:
                restore_checkpoint(f"{root}/step-{step:08d}", states)
            except CheckpointError:
                assert damaged in links_of(step), f"step {step}, schedule {schedule}"
                continue
            # The bytes of a dense part are read for its own step, not for those that add to it.
            assert damaged != step
            wanted = shard_states(truths, one, 0)
            for got, want in zip(states, wanted, strict=True):
                assert torch.equal(got.weight, want.weight)
                for name, tensor in got.optimizer.items():
                    if tensor.dim() == 2:
                        assert torch.equal(tensor, want.optimizer[name])
        shutil.rmtree(root)


@pytest.mark.seeds(range(25))
def test_a_damaged_link_is_found_and_other_chains_do_not_mind(seed, chain, tmp_path):
    check_damage(seed, chain, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.seeds(range(100))
def test_damage_by_ten_thousand_schedules(seed, chain, tmp_path):
    check_damage(seed + 1000, chain, tmp_path, 100)


def test_the_manifest_of_a_parent_that_was_saved_anew_is_not_taken(tmp_path):
    """Another life of a run may have written the step again."""
    rng = random.Random(2)
    truths, manager = [make_truth(rng, "t", 6, 4, "none")], CheckpointManager(str(tmp_path))
    save_chain(rng, manager, truths, one_rank_plan(truths), 2)
    shutil.rmtree(manager.path(1))
    save_world(manager.path(1), truths, one_rank_plan(truths), step=1, extras={"life": 2})
    with pytest.raises(DamagedCheckpointError, match="another than it was saved on"):
        restore_checkpoint(manager.path(2), [])


def test_a_parent_of_other_rectangles_or_steps_is_refused(tmp_path):
    rng = random.Random(3)
    truths, manager = [make_truth(rng, "t", 6, 8, "none")], CheckpointManager(str(tmp_path))
    save_world(manager.path(1), truths, one_rank_plan(truths), step=1)
    parent = Parent("step-00000001", read_manifest(manager.path(1)).sha256())
    halves = TablePlacement(row_wise(truths[0].config, range(2)))
    other = ShardingPlan(world_size=2, tables={"t": halves})
    save_increment(manager.path(2), truths, other, {"t": [2]}, parent, step=2)
    with pytest.raises(DamagedCheckpointError, match="differ in their rectangles"):
        restore_checkpoint(manager.path(2), [])
    save_increment(manager.path(3), truths, one_rank_plan(truths), {"t": [2]}, parent, step=1)
    with pytest.raises(DamagedCheckpointError, match="differ in their steps"):
        restore_checkpoint(manager.path(3), [])


@pytest.mark.seeds(range(25))
def test_pruning_keeps_every_chain_whole(seed, tmp_path):
    rng = random.Random(seed)
    truths, manager = [make_truth(rng, "t", 8, 4, "row")], CheckpointManager(str(tmp_path))
    plan, every = one_rank_plan(truths), rng.randint(1, 4)
    history = save_chain(rng, manager, truths, plan, 7, full_every=every)
    num_to_keep, best = rng.randint(1, 4), rng.randint(1, 7)
    deleted = manager.prune(num_to_keep, keep=[best])
    asked = {*range(8 - num_to_keep, 8), best}
    bases = {step: range(step - (step - 1) % every, step + 1) for step in asked}
    wanted = {link for links in bases.values() for link in links}
    assert set(manager.steps()) == wanted
    assert set(deleted) == set(range(1, 8)) - wanted
    for step in sorted(wanted):
        assert_restored(manager.path(step), history[step - 1], plan, plan)


def test_pruning_beside_a_damaged_increment_leaves_what_it_may_add_to(tmp_path):
    rng = random.Random(4)
    truths, manager = [make_truth(rng, "t", 8, 4, "row")], CheckpointManager(str(tmp_path))
    save_chain(rng, manager, truths, one_rank_plan(truths), 4, full_every=3)
    Path(manager.path(3), "manifest.json").write_text("{")
    manager.prune(2)
    assert manager.steps() == (1, 2, 3, 4)


def test_an_increment_that_was_set_aside_still_finds_its_base(tmp_path):
    rng = random.Random(6)
    truths, manager = [make_truth(rng, "t", 8, 4, "row")], CheckpointManager(str(tmp_path))
    plan = one_rank_plan(truths)
    history = save_chain(rng, manager, truths, plan, 4)
    aside = manager.set_aside(2)
    assert aside is not None and manager.steps() == (1, 2)
    assert_restored(f"{aside}/step-00000004", history[3], plan, plan)
