"""What a user sees when a rank fails: which rank, where, why, within seconds, and nothing of it
left behind.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from rayrec.data.synthetic import SyntheticPaths
from rayrec.errors import ConfigError, InputError, PlanError, TrainingFailed
from tests.ray import worlds
from tests.ray.worlds import CLUSTER_CPUS

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.parametrize(("victim", "ranks"), worlds.some([(0, 2), (1, 2), (2, 4)], []))
def test_a_killed_rank_is_named_within_seconds(
    clicks: SyntheticPaths, tmp_path: Path, victim: int, ranks: int
) -> None:
    driver = worlds.driver(
        clicks,
        ranks,
        model=worlds.misbehaving(clicks, tmp_path, lambda rank, step: None),
        steps=1_000_000,
        timeout_s=120.0,
    )
    killed: list[float] = []

    def kill() -> None:
        pid = worlds.wait_for_pid(tmp_path, victim)
        os.kill(pid, signal.SIGKILL)
        killed.append(time.monotonic())

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(TrainingFailed) as caught:
        driver.fit()
    thread.join()
    assert time.monotonic() - killed[0] < 60, "half of the timeout"
    assert caught.value.rank == victim and caught.value.host
    assert "process died" in caught.value.cause and f"rank {victim} of {ranks}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_exception_on_one_rank_is_the_cause(clicks: SyntheticPaths, tmp_path: Path) -> None:
    def fail(rank: int, step: int) -> None:
        if rank == 1 and step == 3:
            raise ValueError("the third step of rank 1 is cursed")

    with pytest.raises(TrainingFailed) as caught:
        worlds.driver(
            clicks, 2, model=worlds.misbehaving(clicks, tmp_path, fail), steps=1000, timeout_s=120.0
        ).fit()
    error = caught.value
    assert error.rank == 1 and error.cause == "ValueError: the third step of rank 1 is cursed"
    assert "after step 2" in str(error)
    assert "in fail" in error.traceback and "cursed" in str(error.__cause__)
    assert "in fail" in Path(error.log).read_text(), (
        "a file keeps the traceback for a terminal that shows one line"
    )


@pytest.mark.slow
def test_a_stopped_process_is_named_after_the_timeout(
    clicks: SyntheticPaths, tmp_path: Path
) -> None:
    def freeze(rank: int, step: int) -> None:
        if rank == 1 and step == 4:
            os.kill(os.getpid(), signal.SIGSTOP)

    started = time.monotonic()
    with pytest.raises(TrainingFailed) as caught:
        worlds.driver(
            clicks, 2, model=worlds.misbehaving(clicks, tmp_path, freeze), steps=1000, timeout_s=6.0
        ).fit()
    assert caught.value.rank == 1 and "no answer" in caught.value.cause
    assert "failed after step 3" in str(caught.value), (
        "four steps take less time than passes between two answers of a rank"
    )
    assert time.monotonic() - started < 100


@pytest.mark.slow
def test_a_rank_that_hangs_in_its_forward_is_named(clicks: SyntheticPaths, tmp_path: Path) -> None:
    """It answers the driver all the while, and rank 0 waits for it in a collective."""

    def hang(rank: int, step: int) -> None:
        if rank == 1 and step == 4:
            time.sleep(60.0)

    driver = worlds.driver(
        clicks, 2, model=worlds.misbehaving(clicks, tmp_path, hang), steps=1000, timeout_s=6.0
    )
    with pytest.raises(TrainingFailed, match="still is training; others then failed") as caught:
        driver.fit()
    assert caught.value.rank == 1


@pytest.mark.slow
def test_the_cluster_is_free_again_after_a_failure(clicks: SyntheticPaths, tmp_path: Path) -> None:
    import ray

    def fail(rank: int, step: int) -> None:
        raise ValueError("at once")

    with pytest.raises(TrainingFailed, match="at once"):
        worlds.driver(clicks, 2, model=worlds.misbehaving(clicks, tmp_path, fail), steps=10).fit()
    deadline = time.monotonic() + 10
    while ray.available_resources().get("CPU", 0) < CLUSTER_CPUS and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ray.available_resources()["CPU"] == CLUSTER_CPUS
    assert worlds.driver(clicks, 2, steps=2).fit().steps == 2


def test_more_ranks_than_cpus_is_refused_at_once_with_numbers(clicks: SyntheticPaths) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"7 ranks with 1 CPU each need 7 CPU, the cluster has {CLUSTER_CPUS}. "
        "Use num_workers=6",
    ):
        worlds.driver(clicks, CLUSTER_CPUS + 1).fit()


def test_a_plan_for_other_ranks_is_refused(clicks: SyntheticPaths) -> None:
    plan = worlds.driver(clicks, 1).plan()
    with pytest.raises(PlanError, match="for 1 ranks, the world has 2"):
        worlds.driver(clicks, 2, plan=plan).fit()


@pytest.mark.slow
def test_divergence_is_an_error_and_not_a_result(clicks: SyntheticPaths, tmp_path: Path) -> None:
    from rayrec.driver import OptimizerConfig

    with pytest.raises(InputError, match=r"the loss is (nan|inf).*[Ll]ower the learning rate"):
        worlds.driver(
            clicks, 1, epochs=20, sparse_optimizer=OptimizerConfig(name="sgd", lr=1e30)
        ).fit()
