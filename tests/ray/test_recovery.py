"""A run outlives its ranks: after a kill it goes on and ends with the tables of an undisturbed run.

Every run here is compared bit for bit with one that nothing happened to: the rows and the optimizer
state of all tables, and the dense layers, as the last checkpoint holds them.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayrec.data.synthetic import SyntheticPaths
from rayrec.driver import FailureConfig, Result
from rayrec.train.config import CheckpointConfig
from tests.ray import worlds

pytestmark = pytest.mark.usefixtures("cluster")

STEPS = 24
BATCH = 256
Act = Callable[[int, int, int], None]


def digests(checkpoint: str) -> dict[str, str]:
    """A digest of every file of a checkpoint but for its manifest, which tells of times."""
    told = {}
    for path in sorted(Path(checkpoint).rglob("*")):
        if path.is_file() and path.name != "manifest.json":
            told[str(path.relative_to(checkpoint))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return told


def run(
    clicks: SyntheticPaths, folder: Path, act: Act | None = None, ranks: int = 2, **options: Any
) -> tuple[Result, dict[str, str]]:
    """Train a tiny model; `act(rank, life, step)` is called before every forward.

    The lives of a rank are counted by files in `folder`, since a killed process forgets.
    """
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    chosen: dict[str, Any] = {
        "steps": STEPS,
        "batch": BATCH,
        "storage_path": str(folder),
        "checkpoint": CheckpointConfig(every_n_steps=5),
        "failure": FailureConfig(max_failures=3),
        "plan": "row_wise",
        "timeout_s": 120.0,
    }
    model = None if act is None else acting(clicks, scratch, act)
    result = worlds.driver(clicks, ranks, model=model, **{**chosen, **options}).fit()
    assert result.checkpoint is not None
    return result, digests(result.checkpoint)


def acting(clicks: SyntheticPaths, scratch: Path, act: Act) -> Callable[[], Any]:
    """The tiny model, which calls act(rank, life, step); made of closures, so that it travels."""
    build, where = worlds.recipe(clicks), str(scratch)

    def model() -> Any:
        import torch.distributed as dist

        module = build()
        rank = dist.get_rank() if dist.is_initialized() else 0
        if not dist.is_initialized():
            return module
        life = 0
        while True:
            try:
                with open(f"{where}/{rank}-{life}", "x") as file:
                    file.write(str(os.getpid()))
                break
            except FileExistsError:
                life += 1
        steps = [0]

        def before(_module: Any, _inputs: Any) -> None:
            if module.training:
                steps[0] += 1
            act(rank, life, steps[0])

        module.register_forward_pre_hook(before)
        return module

    return model


def pids(folder: Path, rank: int) -> list[int]:
    """The processes of a rank by life."""
    paths = sorted((folder / "scratch").glob(f"{rank}-*"), key=lambda path: int(path.name[2:]))
    return [int(path.read_text()) for path in paths]


@pytest.fixture(scope="module")
def undisturbed(clicks: SyntheticPaths, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digests of a run that nothing happens to."""
    result, told = run(clicks, tmp_path_factory.mktemp("undisturbed"))
    assert result.failures == result.recoveries == 0 and result.seconds_lost == 0
    return told


def kill_in_step(rank: int, step: int) -> Act:
    def act(own: int, life: int, now: int) -> None:
        if (own, life, now) == (rank, 0, step):
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def test_a_killed_rank_is_replaced_and_the_tables_are_those_of_an_undisturbed_run(
    clicks: SyntheticPaths,
    tmp_path: Path,
    undisturbed: dict[str, str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    result, told = run(clicks, tmp_path, kill_in_step(1, 13), progress="plain")
    assert told == undisturbed
    assert (result.steps, result.failures, result.recoveries) == (STEPS, 1, 1)
    assert 0 < result.seconds_lost < 60
    survivor, lost = pids(tmp_path, 0), pids(tmp_path, 1)
    assert survivor[0] == survivor[1] and lost[0] != lost[1]
    out = capfd.readouterr().out
    assert "rank 1 on " in out and "at step 12; replaced in" in out
    assert out.count("; went on from step 10") == 1
    steps = [report.step for report in result.reports]
    assert steps == sorted(set(steps)) and steps[-1] == STEPS
    assert result.rows == result.reports[-1].rows == 6007, "an epoch, and no row counted twice"
    assert len({mark.name for mark in result.milestones}) == len(result.milestones)
