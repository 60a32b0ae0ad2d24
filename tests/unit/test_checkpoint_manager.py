"""Step directories: what counts as a checkpoint, which is newest, what pruning takes and what it
leaves.
"""

from __future__ import annotations

import os
import random

import fsspec
import pytest
from pyarrow import fs

from rayrec.checkpoint import (
    CheckpointManager,
    TableReader,
    checkpoint_path,
    load_table,
    read_manifest,
    restore_checkpoint,
)
from rayrec.driver import RunConfig
from rayrec.errors import CheckpointError, ConfigError, SaveError
from tests.unit.checkpoint_worlds import make_truth, one_rank_plan, save_world

TRUTH = make_truth(random.Random(0), "t", 6, 4, "none")


def save_steps(
    manager: CheckpointManager, steps: list[int], filesystem: fs.FileSystem | None = None
) -> None:
    for step in steps:
        save_world(
            manager.path(step), [TRUTH], one_rank_plan([TRUTH]), step=step, filesystem=filesystem
        )


def test_a_storage_path_that_does_not_exist_has_no_checkpoints(tmp_path):
    manager = CheckpointManager(str(tmp_path / "new"))
    assert manager.steps() == () and manager.latest() is None and manager.prune(1) == ()


def test_latest_is_the_newest_complete_step(tmp_path):
    manager = CheckpointManager(str(tmp_path))
    save_steps(manager, [20, 100_000_001, 3])
    assert manager.path(20).endswith("/step-00000020")
    assert manager.steps() == (3, 20, 100_000_001) and manager.latest() == manager.path(100_000_001)
    os.remove(f"{manager.latest()}/manifest.json")
    assert manager.latest() == manager.path(20)


def with_best(manager: CheckpointManager, step: int, best: int | None) -> None:
    """Let the checkpoint of a step tell of the best evaluation until then."""
    extras = {} if best is None else {"best": {"step": best, "value": 0.7}}
    save_world(manager.path(step), [TRUTH], one_rank_plan([TRUTH]), step=step, extras=extras)


def test_a_checkpoint_may_be_named_by_its_run(tmp_path, monkeypatch):
    manager = CheckpointManager(str(tmp_path / "a"))
    with_best(manager, 2, 2)
    with_best(manager, 4, 2)
    monkeypatch.chdir(tmp_path)
    for name, step in (("a@latest", 4), ("a@best", 2)):
        assert checkpoint_path("it", name) == manager.path(step)
        assert read_manifest(name).step == step
        assert restore_checkpoint(name, []).step == step
        assert load_table(name, "t").equals(load_table(manager.path(step), "t"))
        assert TableReader(name, read_manifest(name)).read("t", range(2)).shape == (2, 4)
        for option in ("resume_from", "init_from"):
            run = RunConfig(global_batch_size=8, steps=1, **{option: name})
            assert getattr(run, option) == manager.path(step)
    with_best(manager, 6, 6)
    os.remove(f"{manager.path(6)}/manifest.json")  # the newest was cut short
    assert checkpoint_path("it", "a@latest") == manager.path(4)


def test_the_folder_of_a_run_tells_which_checkpoints_it_has(tmp_path):
    run = tmp_path / "a"
    manager = CheckpointManager(str(run))
    with pytest.raises(CheckpointError, match="a holds no complete checkpoint"):
        checkpoint_path("it", f"{run}@best")
    with_best(manager, 3, None)
    for read in (read_manifest, lambda path: restore_checkpoint(path, [])):
        words = "is the folder of a run and no checkpoint. Its newest is .*/a/step-00000003. Name"
        with pytest.raises(CheckpointError, match=words):
            read(str(run))
    with pytest.raises(CheckpointError, match="was not evaluated with a score"):
        checkpoint_path("it", f"{run}@best")
    with_best(manager, 5, 4)
    with pytest.raises(CheckpointError, match=r"step-00000004, which was not kept.*or .*/a@latest"):
        read_manifest(str(run))
    with pytest.raises(CheckpointError, match=r"at step 4, of which it holds no.*keep_best=True"):
        checkpoint_path("it", f"{run}@best")
    with pytest.raises(CheckpointError, match=r"'newest' no word for one.*or .*/a@best"):
        read_manifest(f"{run}@newest")
    for path in (tmp_path, tmp_path / "b@newest"):
        with pytest.raises(CheckpointError, match="path is wrong, or the save was cut short"):
            read_manifest(str(path))


def test_prune_keeps_the_newest_and_what_is_not_its_own(tmp_path):
    manager = CheckpointManager(str(tmp_path))
    save_steps(manager, [1, 2, 3, 4, 5, 6])
    os.remove(f"{manager.path(4)}/manifest.json")  # an old save that was cut short
    os.remove(f"{manager.path(6)}/manifest.json")  # one that may still be going on
    for name in ("logs", "step-best", "step-7"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000001.txt").write_text("")
    assert manager.prune(2) == (1, 2)
    assert sorted(os.listdir(tmp_path)) == [
        "logs",
        "step-00000001.txt",
        "step-00000003",
        "step-00000005",
        "step-00000006",
        "step-7",
        "step-best",
    ]
    assert manager.prune(1) == (3,) and manager.steps() == (5,)
    with pytest.raises(ConfigError, match="num_to_keep=0"):
        manager.prune(0)


class CutShort(fs.FSSpecHandler):
    """Dies where a directory would be deleted."""

    def delete_dir(self, path: str) -> None:
        raise OSError("cut short")


def test_a_deletion_cut_short_leaves_no_half_checkpoint_that_counts():
    whole = fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))
    save_steps(CheckpointManager("/manager/cut", whole), [1, 2], whole)
    with pytest.raises(SaveError, match="cut short"):
        CheckpointManager(
            "/manager/cut", fs.PyFileSystem(CutShort(fsspec.filesystem("memory")))
        ).prune(1)
    manager = CheckpointManager("/manager/cut", whole)
    assert manager.steps() == (2,)
    manager.prune(1)
    assert [entry.base_name for entry in whole.get_file_info(fs.FileSelector("/manager/cut"))] == [
        "step-00000002"
    ]


def test_manager_works_on_other_filesystems():
    filesystem = fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))
    manager = CheckpointManager("/manager/run", filesystem)
    save_steps(manager, [1, 2], filesystem)
    assert manager.prune(1) == (1,) and manager.latest() == "/manager/run/step-00000002"
    assert restore_checkpoint(manager.path(2), [], filesystem=filesystem).step == 2


def test_uris_name_a_filesystem(tmp_path):
    manager = CheckpointManager(f"file://{tmp_path}/run")
    save_steps(manager, [1])
    assert (tmp_path / "run" / "step-00000001" / "manifest.json").exists()
    assert restore_checkpoint(manager.latest(), []).step == 1
    with pytest.raises(CheckpointError, match="no filesystem for 'nowhere://x'"):
        CheckpointManager("nowhere://x")
