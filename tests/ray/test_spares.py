"""A spare that waits beside the ranks takes the place of a killed one, and a new spare follows.

Every run is compared bit for bit with one that nothing happened to.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayrec.data.synthetic import SyntheticPaths
from rayrec.driver import FailureConfig, Result
from rayrec.driver.ray_cluster import RayCluster
from rayrec.driver.roster import Role, Stage
from rayrec.driver.views import View
from tests.ray import acting, worlds
from tests.ray.acting import STEPS, Act, pids

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.slow]

WAIT_S = 90.0


def run(
    clicks: SyntheticPaths, folder: Path, act: Act, **options: Any
) -> tuple[Result, dict[str, str]]:
    """Train a tiny model on two ranks, which may wait for long."""
    return acting.run(clicks, folder, act, timeout_s=2 * WAIT_S, progress="plain", **options)


@pytest.fixture(scope="module")
def undisturbed(clicks: SyntheticPaths, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digests of a run that nothing happens to."""
    return run(clicks, tmp_path_factory.mktemp("calm"), lambda own, life, now: None)[1]


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[int]]:
    """The processes of spares that were warm at some time, also for the ranks: as files."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    look = RayCluster.look

    def look_and_note(self: RayCluster, **options: Any) -> View:
        for seat in self._run.roster.of(Role.SPARE):
            if seat.stage is Stage.READY and seat.address is not None:
                (scratch / f"spare-{seat.address.pid}").touch()
        if self._run.short_s is None:
            (scratch / "short").touch()
        return look(self, **options)

    monkeypatch.setattr(RayCluster, "look", look_and_note)
    return lambda: {int(path.name[6:]) for path in scratch.glob("spare-*")}


def wait_until(is_so: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("rank", "sync_points"), [(1, None), (0, 4)])
def test_a_spare_takes_the_place_of_a_killed_rank_and_a_new_one_follows(
    clicks: SyntheticPaths,
    tmp_path: Path,
    undisturbed: dict[str, str],
    seen: Callable[[], set[int]],
    capfd: pytest.CaptureFixture[str],
    sync_points: int | None,
    rank: int,
) -> None:
    where = str(tmp_path / "scratch")

    def act(own: int, life: int, now: int) -> None:
        def spares() -> list[str]:
            return [name for name in os.listdir(where) if name.startswith("spare-")]

        if (life, now) == (0, 14) and own == rank:
            wait_until(spares)
            os.kill(os.getpid(), signal.SIGKILL)
        if (life, now) == (1, 3) and own == 1 - rank:
            wait_until(lambda: len(spares()) == 2)
            # nobody shall notice that this one dies
            ranks = [str(pid) for number in (0, 1) for pid in pids(Path(where).parent, number)]
            (idle,) = [name[6:] for name in spares() if name[6:] not in ranks]
            os.kill(int(idle), signal.SIGKILL)
            wait_until(lambda: len(spares()) == 3)

    failure = FailureConfig(max_failures=3, sync_every_n_steps=sync_points)
    result, told = run(clicks, tmp_path, act, spares=1, failure=failure)
    assert told == undisturbed
    assert (result.steps, result.failures, result.recoveries) == (STEPS, 1, 1)
    survivor, lost = pids(tmp_path, 1 - rank), pids(tmp_path, rank)
    assert survivor[0] == survivor[1] and lost[0] != lost[1]
    assert len(seen()) == 3 and lost[1] in seen()
    step = 10 if sync_points is None else 12
    out = capfd.readouterr().out
    assert "at step 13; a spare took its place in" in out
    assert out.count(f"; went on from step {step}") == 1
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in seen()))


def test_a_run_without_room_for_its_spare_says_so_and_goes_on_without(
    clicks: SyntheticPaths,
    tmp_path: Path,
    undisturbed: dict[str, str],
    seen: Callable[[], set[int]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    where = str(tmp_path / "scratch")

    def act(own: int, life: int, now: int) -> None:
        if (own, life, now) == (1, 0, 13):
            wait_until(lambda: os.path.exists(f"{where}/short"))
            os.kill(os.getpid(), signal.SIGKILL)

    cpus = worlds.CLUSTER_CPUS / 2
    result, _ = run(clicks, tmp_path, act, spares=1, cpus_per_worker=cpus)
    assert (result.steps, result.recoveries) == (STEPS, 1) and not seen()
    out = capfd.readouterr().out
    assert out.count("no room for 1 of 1 spares of 3 CPU each (free now: 0 CPU)") == 1
    assert "at step 12; replaced in" in out
