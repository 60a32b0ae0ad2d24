"""Runs on a stream that lose a rank or their driver: the tables are those of a calm run, bit for
bit, and the windows are those that were cut.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.checkpoint import CheckpointManager
from rayrec.data import FeatureSchema
from rayrec.data.synthetic import SyntheticPaths
from rayrec.driver import FailureConfig
from rayrec.streams import StreamConfig, StreamDataset
from rayrec.streams.kept import WindowFolder
from rayrec.train.checkpoint_config import CheckpointConfig
from tests.ray import worlds
from tests.ray.acting import Act, acting, at
from tests.ray.heads import ROOT, started_head

pytestmark = pytest.mark.slow

ROWS, WINDOW, BATCH = 6007, 1000, 256


@pytest.fixture(scope="module")
def incoming(clicks: SyntheticPaths, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows of the clicks, as files of a stream."""
    folder = tmp_path_factory.mktemp("incoming")
    rows = pa.concat_tables(map(pq.read_table, sorted(clicks.train.glob("*.parquet"))))
    assert len(rows) == ROWS
    for number in range(9):
        pq.write_table(rows.slice(number * 700, 700), folder / f"part-{number}.parquet")
    return folder


def run(
    clicks: SyntheticPaths, incoming: Path, folder: Path, act: Act | None = None, **options: Any
) -> tuple[int, dict[str, str]]:
    """Train on the whole stream; return the failures, and digests of the last checkpoint."""
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    config = StreamConfig(folder=str(incoming), rows=WINDOW, seconds=5.0, stop_after_windows=7)
    stream = StreamDataset(config=config, schema=FeatureSchema.load(clicks.schema))
    chosen: dict[str, Any] = {
        "stream": stream,
        "batch": BATCH,
        "storage_path": str(folder),
        "checkpoint": CheckpointConfig(every_n_steps=5, num_to_keep=2),
        "failure": FailureConfig(max_failures=3),
        "plan": "row_wise",
        "timeout_s": 120.0,
        **options,
    }
    if act is not None:
        chosen["model"] = acting(clicks, scratch, act)
    result = worlds.driver(clicks, 2, **chosen).fit()
    assert result.checkpoint is not None
    # six windows of four steps, and one of seven rows
    assert result.steps == 25
    last = WindowFolder(str(folder / "run")).read(6)
    assert last is not None and last.rows == 7
    return result.failures, worlds.digests(result.checkpoint)


@pytest.fixture(scope="module")
def calm(
    cluster: None, clicks: SyntheticPaths, incoming: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The digests of a run that nothing happens to."""
    failures, told = run(clicks, incoming, tmp_path_factory.mktemp("calm"))
    assert failures == 0
    return told


@pytest.mark.parametrize(
    ("rank", "step", "options"),
    [
        # it cuts the windows: amid the first window, between two, and behind a checkpoint
        (0, 2, {}),
        (0, 5, {}),
        (0, 17, {}),
        (1, 12, {}),
        (1, 12, {"failure": FailureConfig(max_failures=3, sync_every_n_steps=3)}),
    ],
)
def test_a_killed_rank_changes_no_bit(
    calm: dict[str, str],
    clicks: SyntheticPaths,
    incoming: Path,
    tmp_path: Path,
    rank: int,
    step: int,
    options: dict[str, Any],
) -> None:
    failures, told = run(clicks, incoming, tmp_path, at(rank, {0: step}), **options)
    assert failures == 1
    assert told == calm


RUN_FILE = """
[data]
schema = "{schema}"
[data.stream]
folder = "{incoming}"
rows = 1000
seconds = 5.0
stop_after_windows = 7
[model]
model = "dlrm"
dense_layers = [16]
over_layers = [16]
[scaling]
num_workers = 2
[run]
global_batch_size = 256
storage_path = "{folder}"
name = "run"
resume_from = "auto"
report_every_s = 0.1
[run.checkpoint]
every_n_steps = 3
num_to_keep = 2
[plan]
plan = "row_wise"
"""


def started(folder: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    """Start a driver in a process group of its own."""
    words = [sys.executable, "-m", "rayrec.cli.main", "train", str(folder / "stream.toml")]
    log = (folder / "train.log").open("a")
    return subprocess.Popen(
        words, cwd=ROOT, env=env, stdout=log, stderr=log, text=True, start_new_session=True
    )


def checkpoint_of(folder: Path, env: dict[str, str]) -> dict[str, str]:
    """Train to the end, and return the digests of the last checkpoint."""
    driver = started(folder, env)
    log = folder / "train.log"
    assert driver.wait(240) == 0, log.read_text()[-3000:]
    manager = CheckpointManager(str(folder / "run"))
    assert manager.steps()[-1] == 25
    return worlds.digests(manager.path(25))


def test_a_killed_driver_goes_on_bit_for_bit(
    private_home: Path, clicks: SyntheticPaths, incoming: Path, tmp_path: Path
) -> None:
    chance = random.Random(0)
    with started_head(private_home, num_cpus=4) as head:
        env = {**head.env, "RAY_ADDRESS": head.gcs, "PYTHONPATH": str(ROOT)}
        for name in ("calm", "killed"):
            (tmp_path / name).mkdir()
            text = RUN_FILE.format(schema=clicks.schema, incoming=incoming, folder=tmp_path / name)
            (tmp_path / name / "stream.toml").write_text(text)
        wanted = checkpoint_of(tmp_path / "calm", env)
        folder, killed = tmp_path / "killed", 0
        for window in (0, 2, 4):
            driver = started(folder, env)
            record = folder / "run" / "stream" / f"window-{window:08d}.json"
            until = time.monotonic() + 120
            while not record.exists() and driver.poll() is None and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(chance.random() * 0.3)
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)
                killed += 1
            driver.wait(30)
        assert killed
        assert checkpoint_of(folder, env) == wanted
