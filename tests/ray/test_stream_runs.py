"""Runs on a stream that lose a rank: the tables are those of a calm run, bit for
bit, and the windows are those that were cut.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data import FeatureSchema
from rayrec.data.synthetic import SyntheticPaths
from rayrec.driver import FailureConfig
from rayrec.streams import StreamConfig, StreamDataset
from rayrec.streams.kept import WindowFolder
from rayrec.train.checkpoint_config import CheckpointConfig
from tests.ray import worlds
from tests.ray.acting import Act, acting

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


def dies(rank: int, step: int) -> Act:
    """The rank dies in a step of its first life."""

    def act(own: int, life: int, now: int) -> None:
        import os
        import signal

        if own == rank and life == 0 and now == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


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
    failures, told = run(clicks, incoming, tmp_path, dies(rank, step), **options)
    assert failures == 1
    assert told == calm
