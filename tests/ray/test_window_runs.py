"""A run over windows in time that loses a rank and changes their number: the tables and the figures
of every window are those of a calm run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data import PlantedLogConfig, TimeWindows, write_planted_log
from rayrec.data.synthetic import SyntheticPaths
from rayrec.driver import Driver, FailureConfig, Result
from rayrec.errors import ConfigError
from rayrec.train.callbacks import Callback
from rayrec.train.checkpoint_config import CheckpointConfig
from rayrec.train.events import Resized
from rayrec.watch import read_events
from tests.ray import worlds
from tests.ray.acting import Act, acting

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.slow]

DAYS = TimeWindows(column="day", size=2)
FOUND = [0, 2, 4, 6]


@pytest.fixture(scope="module")
def days(clicks: SyntheticPaths, tmp_path_factory: pytest.TempPathFactory) -> SyntheticPaths:
    """The clicks of seven days."""
    folder = tmp_path_factory.mktemp("days")
    for file in sorted(clicks.train.glob("*.parquet")):
        table = pq.read_table(file)
        own = pa.array([row * 7 // table.num_rows for row in range(table.num_rows)])
        pq.write_table(table.append_column("day", own), folder / file.name)
    return clicks._replace(train=folder)


@pytest.fixture(scope="module")
def plays(tmp_path_factory: pytest.TempPathFactory) -> SyntheticPaths:
    """A log of seven days, whose histories are cut on reading."""
    folder = tmp_path_factory.mktemp("plays")
    config = PlantedLogConfig(events=6007, users=80, items=20, days=7, history=6, dim=8)
    write_planted_log(folder, config)
    log = folder / "log"
    return SyntheticPaths(log, log, folder / "schema.json", folder / "truth.json")


class Asks(Callback):
    """In the driver: asks for one rank after a step, and is told of the change."""

    driver: Driver | None = None

    def __init__(self, step: int) -> None:
        self._step: int | None = step
        self.told: list[Resized] = []

    def on_step(self, step: int, trainer: Any = None) -> None:
        """Ask once."""
        if self._step is not None and step >= self._step:
            assert self.driver is not None
            self.driver.resize(1)
            self._step = None

    def on_resize(self, resized: Resized) -> None:
        """The run goes on with other ranks."""
        self.told.append(resized)


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "windows": DAYS,
        "batch": 256,
        "storage_path": str(folder),
        "checkpoint": CheckpointConfig(every_n_steps=5),
        "failure": FailureConfig(max_failures=3),
        "plan": "row_wise",
        "report_every_s": 0.2,
        "timeout_s": 120.0,
        **more,
    }


def dies(folder: Path) -> Act:
    """Rank 1 dies in its tenth step; afterwards two ranks are slow enough for a busy driver."""

    def act(own: int, life: int, now: int) -> None:
        import os
        import signal
        import time

        time.sleep(0.4 if life == 1 else 0.05)
        if own == 1 and life == 0 and now == 10:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def windows_of(result: Result) -> dict[int | None, tuple[int, dict[str, float]]]:
    scored = [e for e in result.evaluations if e.window is not None]
    assert len(scored) == len({e.window for e in scored})
    return {e.window: (e.step, dict(e.scores)) for e in scored}


@pytest.mark.parametrize(("data", "model"), [("days", "dlrm"), ("plays", "din")])
def test_a_lost_rank_and_another_number_of_ranks_change_no_window(
    data: str, model: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    days: SyntheticPaths = request.getfixturevalue(data)
    calm_model = worlds.recipe(days, model)
    calm = worlds.driver(days, 2, **options(tmp_path / "calm", model=calm_model)).fit()
    wanted = windows_of(calm)
    assert list(wanted) == FOUND and calm.steps > 20
    scratch, asks = tmp_path / "scratch", Asks(step=16)
    scratch.mkdir()
    chosen = options(tmp_path / "run", model=acting(days, scratch, dies(scratch), model))
    asks.driver = driver = worlds.driver(
        days, (1, 2), grow_after_s=3600.0, callbacks=(asks,), **chosen
    )
    result = driver.fit()
    assert (result.failures, result.steps, result.plan.world_size) == (1, calm.steps, 1)
    assert [(one.ranks_before, one.ranks) for one in asks.told if not one.lost] == [(2, 1)]
    found = windows_of(result)
    assert list(found) == FOUND
    for window, (step, scores) in wanted.items():
        assert found[window][0] == step
        # one rank adds up in another order, which few pairs of scores notice
        assert found[window][1] == pytest.approx(scores, abs=2e-3)
    assert calm.checkpoint is not None and result.checkpoint is not None
    worlds.compare(calm.checkpoint, result.checkpoint)
    (events,) = (tmp_path / "run").rglob("events.jsonl")
    told = [e.values["window"] for e in read_events(events).of("evaluation")]
    assert set(told) == {*FOUND, None}


def test_windows_are_walked_once(days: SyntheticPaths, tmp_path: Path) -> None:
    for wrong, says in (
        ({"epochs": 2}, r"epochs=2, and windows in time are walked once, up to step \d+"),
        ({"steps": 500}, r"steps=500, and windows in time are walked once"),
        ({"epochs": 1, "accumulate": 2}, r"accumulate=2, and windows in time begin at any step"),
    ):
        chosen = options(tmp_path, checkpoint=CheckpointConfig(), **wrong)
        with pytest.raises(ConfigError, match=says):
            worlds.driver(days, 1, **chosen).fit()
