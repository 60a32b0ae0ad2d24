"""SIGKILL of `rayrec forget` at any moment: readers find whole folders, a second run ends it."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.checkpoint import CheckpointManager, check_whole, load_table, read_manifest
from rayrec.driver.run_folder import ERASURE, JOURNAL, held
from rayrec.erasure.forget import forget
from rayrec.errors import ArtifactError, ConfigError
from rayrec.serve import Predictor, open_artifact
from tests.forgotten_run import STEPS, make_run

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "rayrec.erasure.forget", "tests.forgotten_run"])
MOMENTS = 280  # some more changes of the disk than a whole erasure makes
NOW = "forgotten"
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link")


def killed_at(moment: int, run: str, keys: str) -> None:
    """Forget, and be killed before one of the changes of the disk."""
    left = moment

    def look(event: str, args: tuple[object, ...]) -> None:
        nonlocal left
        is_write = event == "open" and isinstance(args[2], int) and args[2] & os.O_ACCMODE
        # trees are removed by names that are relative to open folders
        in_tree = event in ("os.remove", "os.rmdir")
        if in_tree or ((event in CHANGES or is_write) and run in str(args[0])):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    forget(run, keys)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, a key file, and the run without the keys."""
    folder = tmp_path_factory.mktemp("killed")
    run = make_run(folder)
    users = load_table(str(run / f"step-{STEPS:08d}"), "t_user")["id_key"].to_pylist()
    known = sorted(set(users) - {-1})[:4]
    pq.write_table(pa.table({"user": known, "item": [3, 4, 5, 6]}), folder / "keys.parquet")
    shutil.copytree(run, folder / "forgotten")
    forget(folder / "forgotten", folder / "keys.parquet")
    return folder


def contents(run: Path) -> dict[str, bytes]:
    """All files by their paths, but for receipts and what the killed owner of a lock leaves."""
    files = (file for file in run.rglob("*") if file.is_file())
    named = {file.relative_to(run).as_posix(): file.read_bytes() for file in files}
    of_owners = "forgotten-", ".rayrec-", "..rayrec-", ".lock.json-"
    return {name: held for name, held in named.items() if not name.startswith(of_owners)}


def check_readers(run: Path, made: Path) -> None:
    """Each folder that a reader finds is as it was or as it will be."""
    manager = CheckpointManager(str(run))
    for step in manager.steps():
        path = manager.path(step)
        check_whole(path, read_manifest(path))
        for name in ("t_user", "t_item"):
            versions = [load_table(f"{made / at}/{Path(path).name}", name) for at in ("run", NOW)]
            assert load_table(path, name) in versions
    for name in ("int8", "fp32"):
        try:
            open_artifact(run / "served" / name)
        except ArtifactError:
            assert not (run / "served" / name).exists()
    assert Predictor.follow(run).step == STEPS


@pytest.mark.seeds(range(40))
def test_a_kill_at_any_moment_leaves_whole_folders_and_a_second_run_ends_it(
    made: Path, tmp_path: Path, seed: int
) -> None:
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    moment = random.Random(seed).randint(1, MOMENTS)
    process = CONTEXT.Process(target=killed_at, args=(moment, str(run), str(made / "keys.parquet")))
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    check_readers(run, made)
    if (run / ERASURE / JOURNAL).exists():
        with (
            pytest.raises(ConfigError, match=r"was cut short\. Run rayrec forget"),
            held(str(run), print),
        ):
            pass
    forget(run, made / "keys.parquet", say=lambda line: None)
    assert contents(run) == contents(made / NOW)
    assert process.exitcode == 0 or len(list(run.glob("forgotten-*.json"))) in (1, 2)
