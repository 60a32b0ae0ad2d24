"""Runs whose number of ranks changes: they end with the tables of a run that kept its ranks.

The tables are equal within the tolerance that runs of different numbers of ranks have, since sums
over ranks are made in another order.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rayrec.checkpoint import CheckpointManager
from rayrec.data.synthetic import SyntheticPaths
from rayrec.driver import Driver, FailureConfig
from rayrec.driver.states import Handing, Starting
from rayrec.errors import ConfigError, PlanError
from rayrec.layout import ShardingPlan, Topology
from rayrec.train.callbacks import Callback
from rayrec.train.checkpoint_config import CheckpointConfig
from rayrec.train.events import Recovered, Resized
from rayrec.watch import read_events
from tests.ray import worlds
from tests.ray.acting import Act, acting, pids
from tests.ray.heads import ROOT

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.slow]

STEPS = 40


class Plan(Callback):
    """In the driver: asks for numbers of ranks at steps, each once the one before has come."""

    def __init__(self, wishes: list[tuple[int, int]]) -> None:
        self._wishes, self._ranks = list(wishes), 0
        self.driver: Driver | None = None
        self.told: list[Resized] = []
        self.recovered: list[Recovered] = []

    def on_step(self, step: int, trainer: Any = None) -> None:
        """Ask for the next number when its step is done."""
        waits = len(self.told) < self._ranks
        if self._wishes and step >= self._wishes[0][0] and not waits:
            assert self.driver is not None
            self.driver.resize(self._wishes.pop(0)[1])
            self._ranks += 1

    def on_resize(self, resized: Resized) -> None:
        """The run goes on with other ranks."""
        self.told.append(resized)

    def on_recovery(self, recovered: Recovered) -> None:
        """The run goes on after a failure."""
        self.recovered.append(recovered)


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "steps": STEPS,
        "batch": 128,
        "storage_path": str(folder),
        "checkpoint": CheckpointConfig(every_n_steps=10),
        "plan": "row_wise",
        "report_every_s": 0.2,
        "timeout_s": 120.0,
        **more,
    }


def slowly(own: int, life: int, now: int) -> None:
    """Take a moment for every step, so that a wish finds the run under way."""
    import time

    time.sleep(0.05)


def until_it_grows(folder: Path) -> Act:
    """Go on slowly, and after the first change not to the end before the next one begins."""
    gate = str(folder / "gate")

    def act(own: int, life: int, now: int) -> None:
        import os
        import time

        time.sleep(0.05)
        deadline = time.monotonic() + 100
        while life == 1 and now == 15 and not os.path.exists(gate):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    return act


@contextmanager
def opening_the_gate(plan: Plan, folder: Path) -> Iterator[None]:
    """Let ranks that wait in `until_it_grows` go on once they are asked to pause."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            assert plan.driver is not None
            controller = plan.driver._ranks._controller
            standing = None if controller is None else controller.standing
            if plan.told and standing is not None and standing.sizing.paused_since is not None:
                (folder / "gate").touch()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def shrinks_and_grows(clicks: SyntheticPaths, folder: Path) -> tuple[Plan, Driver]:
    """A run of three ranks that is asked for two after step 8, and for three after step 20."""
    (folder / "scratch").mkdir()
    plan = Plan([(8, 2), (20, 3)])
    model = acting(clicks, folder / "scratch", until_it_grows(folder))
    chosen = options(folder, model=model, callbacks=(plan,), progress="plain")
    # what is asked for does not wait for the next look at the cluster
    plan.driver = driver = worlds.driver(clicks, (2, 3), grow_after_s=3600.0, **chosen)
    return plan, driver


@pytest.fixture(scope="module")
def calm(clicks: SyntheticPaths, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The last checkpoint of a run of two ranks."""
    result = worlds.driver(clicks, 2, **options(tmp_path_factory.mktemp("calm"))).fit()
    assert result.resizes == 0 and result.checkpoint is not None
    return result.checkpoint


def test_a_run_is_resized_by_hand(
    clicks: SyntheticPaths, tmp_path: Path, calm: str, capfd: pytest.CaptureFixture[str]
) -> None:
    plan, driver = shrinks_and_grows(clicks, tmp_path)
    with opening_the_gate(plan, tmp_path):
        result = driver.fit()
    told = [(one.ranks_before, one.ranks, one.lost) for one in plan.told]
    assert told == [(3, 2, False), (2, 3, False)] and result.resizes == 2
    assert all(one.seconds > 0 and one.step >= 8 for one in plan.told)
    assert (result.steps, result.failures, result.plan.world_size) == (STEPS, 0, 3)
    assert result.checkpoint is not None
    worlds.compare(calm, result.checkpoint)
    out = capfd.readouterr().out
    assert f"shrunk from 3 to 2 ranks at step {plan.told[0].step}\n" in out
    assert f"grown from 2 to 3 ranks at step {plan.told[1].step}\n" in out
    assert len(set(pids(tmp_path, 0))) == 1, "a survivor keeps its process"
    # the changes themselves go through no storage
    saved = CheckpointManager(str(tmp_path / "run")).steps()
    assert saved == (10, 20, 30, STEPS)
    steps = [report.step for report in result.reports]
    assert steps == sorted(set(steps)) and steps[-1] == STEPS
    events = read_events(tmp_path / "run")
    assert [event.values["ranks"] for event in events.of("resize")] == [2, 3]
    with pytest.raises(ConfigError, match="no fit is running"):
        driver.resize(2)


def test_a_growth_without_room_says_why(
    clicks: SyntheticPaths, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The cluster has six CPUs. The steps take 20 s at least, and the line comes after 3."""
    (tmp_path / "scratch").mkdir()
    plan = Plan([(8, 3)])
    model = acting(clicks, tmp_path / "scratch", slowly)
    chosen = options(tmp_path, model=model, callbacks=(plan,), progress="plain", steps=400)
    plan.driver = worlds.driver(clicks, (2, 3), cpus_per_worker=worlds.CLUSTER_CPUS / 2, **chosen)
    assert plan.driver.fit().resizes == 0
    why = "3 ranks with 3 CPU each need 9 CPU, the cluster has 6."
    out = capfd.readouterr().out
    assert out.count(f"3 ranks are asked for, and 2 have room: {why}") == 1


def least_memory(driver: Driver, ranks: int) -> int:
    """Bytes for each of so many ranks that the tables fit into, and not into 16 KiB less."""
    for memory in range(1 << 14, 1 << 26, 1 << 14):
        with suppress(PlanError):
            hosts = (tuple(range(ranks)),)
            driver._planning.plan(Topology(hosts=hosts, memory_bytes=(memory,) * ranks))
            return memory
    raise AssertionError("the tables fit into no memory")


def test_a_change_to_too_few_ranks_is_called_off(
    clicks: SyntheticPaths, tmp_path: Path, calm: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The tables do not fit one rank; it costs no step, and the ranks that were to leave stay."""
    (tmp_path / "scratch").mkdir()
    plan = Plan([(8, 1)])
    model = acting(clicks, tmp_path / "scratch", slowly)
    chosen = options(tmp_path, model=model, callbacks=(plan,), progress="plain")
    chosen["plan"] = "auto"
    one, two = (least_memory(worlds.driver(clicks, 2, **chosen), ranks) for ranks in (1, 2))
    assert two < one
    plan.driver = worlds.driver(clicks, (1, 2), memory_per_worker=two, **chosen)
    result = plan.driver.fit()
    out = capfd.readouterr().out
    assert "cannot go on with 1 ranks, and keeps its 2: " in out and not plan.told
    assert (result.steps, result.failures, result.resizes) == (STEPS, 0, 0)
    assert result.plan.world_size == 2
    for rank in range(2):
        assert len(set(pids(tmp_path, rank))) == 1, "a rank that was to leave keeps its process"
    assert result.checkpoint is not None
    worlds.compare(calm, result.checkpoint)


def test_growth_that_cannot_be_planned_is_called_off(
    clicks: SyntheticPaths, tmp_path: Path, calm: str, capfd: pytest.CaptureFixture[str]
) -> None:
    plan, driver = shrinks_and_grows(clicks, tmp_path)
    planned = driver._planning.plan

    def refuse(topology: Topology) -> ShardingPlan:
        if plan.told and topology.world_size == 3:
            raise PlanError("no plan for three.")
        return planned(topology)

    driver._planning.plan = refuse  # type: ignore[method-assign]
    with opening_the_gate(plan, tmp_path):
        result = driver.fit()
    out = capfd.readouterr().out
    assert "cannot go on with 3 ranks, and keeps its 2: no plan for three." in out
    assert [(one.ranks_before, one.ranks) for one in plan.told] == [(3, 2)]
    assert (result.steps, result.failures, result.plan.world_size) == (STEPS, 0, 2)
    assert result.checkpoint is not None
    worlds.compare(calm, result.checkpoint)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_kill_while_tables_are_passed_on(
    clicks: SyntheticPaths, tmp_path: Path, calm: str, victim: int
) -> None:
    """The run goes on from its newest checkpoint, as after any failure."""
    (tmp_path / "scratch").mkdir()
    plan = Plan([(15, 2)])
    model = acting(clicks, tmp_path / "scratch", slowly)
    failure = FailureConfig(max_failures=1)
    chosen = options(tmp_path, model=model, callbacks=(plan,), failure=failure)
    plan.driver = driver = worlds.driver(clicks, (1, 3), **chosen)
    killed = threading.Event()

    def strike() -> None:
        while not killed.wait(0.002):
            controller = driver._ranks._controller
            standing = None if controller is None else controller.standing
            # its ranks begin to pass tables on
            state = None if standing is None else standing.state
            begins = isinstance(state, Starting) and state.first and state.verb == "begin"
            if standing is not None and (begins or isinstance(state, Handing)):
                address = standing.joint()[victim].address
                assert address is not None
                os.kill(address.pid, signal.SIGKILL)
                killed.set()

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        result = driver.fit()
    finally:
        was_killed = killed.is_set()
        killed.set()
        thread.join()
    assert was_killed and result.failures == 1
    (recovered,) = plan.recovered
    assert recovered.path is not None and recovered.step in (10, 20, 30)
    assert (result.steps, result.plan.world_size) == (STEPS, 2)
    assert result.checkpoint is not None
    worlds.compare(calm, result.checkpoint)


def test_a_kill_amid_a_run_that_was_resized(
    clicks: SyntheticPaths, tmp_path: Path, calm: str
) -> None:
    """The killed rank's place is still there, so it is replaced, and the run keeps its size."""
    (tmp_path / "scratch").mkdir()
    plan = Plan([(6, 2)])

    def act(own: int, life: int, now: int) -> None:
        slowly(own, life, now)
        if own == 1 and life == 1 and now == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    model = acting(clicks, tmp_path / "scratch", act)
    failure = FailureConfig(max_failures=2)
    chosen = options(tmp_path, model=model, callbacks=(plan,), failure=failure)
    plan.driver = worlds.driver(clicks, (1, 3), **chosen)
    result = plan.driver.fit()
    assert [(one.ranks_before, one.ranks) for one in plan.told] == [(3, 2)]
    (recovered,) = plan.recovered
    assert recovered.replaced and not recovered.dropped and result.failures == 1
    assert result.checkpoint is not None
    worlds.compare(calm, result.checkpoint)


def test_a_run_starts_with_what_there_is_room_for(
    clicks: SyntheticPaths, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chosen = options(tmp_path, steps=4, progress="plain")
    half = worlds.CLUSTER_CPUS / 2
    result = worlds.driver(clicks, (1, 3), cpus_per_worker=half, **chosen).fit()
    assert result.plan.world_size == 2
    out = capfd.readouterr().out
    assert "starts with 2 of at most 3 ranks; the cluster is asked for the rest" in out


def test_two_threads_may_ask(clicks: SyntheticPaths, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    model = acting(clicks, tmp_path / "scratch", slowly)
    plan = Plan([])
    driver = worlds.driver(clicks, (1, 2), **options(tmp_path, model=model, callbacks=(plan,)))
    began = threading.Event()
    plan.on_step = lambda step, trainer=None: began.set()  # type: ignore[method-assign]
    asked = threading.Thread(target=lambda: began.wait(60) and driver.resize(1))
    asked.start()
    result = driver.fit()
    asked.join()
    assert result.plan.world_size == 1 and [one.ranks for one in plan.told] == [1]


def test_a_lost_node_leaves_fewer_ranks_and_a_new_one_brings_more(
    private_home: Path, tmp_path: Path
) -> None:
    """In a process of its own, since it needs a cluster of several nodes."""
    command = [sys.executable, "-m", "tests.ray.elastic_nodes", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "[(2, 1, True), (1, 2, False)]" in done.stdout
    assert "1 of 2 ranks is left; goes on with 1 from step" in done.stdout
    assert "grown from 1 to 2 ranks at step" in done.stdout
    assert "the others met again in" in done.stdout
    assert "2 resizes, 2 ranks" in done.stdout and "equal tables" in done.stdout
