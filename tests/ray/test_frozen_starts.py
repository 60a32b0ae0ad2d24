"""A process that freezes while it starts is lost after the heartbeat timeout; a busy one is not.

No other sign tells the two apart: neither gives an answer while Ray makes its actor, while it
imports torch, or while it fetches its task.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayrec.data.synthetic import SyntheticPaths
from rayrec.driver import FailureConfig, Result, ScalingConfig
from rayrec.driver.controller import Controller
from rayrec.driver.head import worker_of
from rayrec.driver.processes import Processes
from rayrec.driver.rank_group import Prepared, RankGroup
from rayrec.driver.run import Rules
from rayrec.errors import TrainingFailed
from rayrec.train.callbacks import Callback
from rayrec.train.checkpoint_config import CheckpointConfig
from rayrec.train.events import Failure
from tests.ray import worlds

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

HEARTBEAT_S = 6.0
# to the first look at a silent process of this machine, and of another one; and a busy machine
LATER_S = {"here": 6.0, "elsewhere": 14.0}


class Told(Callback):
    """The failures, and when the driver told of them."""

    def __init__(self) -> None:
        self.failures: list[tuple[float, Failure]] = []

    def on_failure(self, failure: Failure) -> None:
        self.failures.append((time.monotonic(), failure))


def run(
    clicks: SyntheticPaths, folder: Path, *callbacks: Callback, **options: Any
) -> tuple[Result, dict[str, str]]:
    driver = worlds.driver(
        clicks,
        2,
        steps=12,
        batch=256,
        storage_path=str(folder),
        checkpoint=CheckpointConfig(every_n_steps=5),
        failure=FailureConfig(max_failures=1),
        plan="row_wise",
        heartbeat_timeout_s=HEARTBEAT_S,
        callbacks=callbacks,
        **options,
    )
    for callback in callbacks:
        callback.driver = driver  # type: ignore[attr-defined]
    result = driver.fit()
    return result, worlds.digests(result.checkpoint or "")


@pytest.fixture(scope="module")
def undisturbed(clicks: SyntheticPaths, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(clicks, tmp_path_factory.mktemp("undisturbed"))[1]


@pytest.mark.parametrize(
    ("stage", "where"), [("made", "here"), ("importing", "here"), ("importing", "elsewhere")]
)
def test_a_rank_that_freezes_while_it_starts_is_lost_after_its_heartbeat(
    clicks: SyntheticPaths,
    tmp_path: Path,
    undisturbed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    where: str,
) -> None:
    """From another machine than that of the driver, a task on its node looks at it."""
    look, told = Processes.look, Told()
    struck: list[tuple[float, int]] = []
    described: list[bool] = []

    def has_described(self: Processes) -> bool:
        owed = [number for number, _, verb in self._calls.values() if verb == "describe"]
        return 2 not in owed

    def strike(self: Processes, timeout_s: float) -> None:
        process = self._all.get(2)
        if process is not None and process.actor is not None and not struck:
            address = process.address if has_described(self) else None
            while stage == "made" and address is None:
                address = worker_of(process.actor._actor_id.hex())
            if address is not None:
                os.kill(address.pid, signal.SIGSTOP)
                struck.append((time.monotonic(), address.pid))
        look(self, timeout_s)
        if process is not None and struck and not told.failures:
            described.append(has_described(self))
            assert not process.view.is_awake, "it had imported torch by then"

    monkeypatch.setattr(Processes, "look", strike)
    if where == "elsewhere":
        monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "another machine")
    result, tables = run(clicks, tmp_path, told)
    assert tables == undisturbed and result.failures == 1
    ((at, failure),), ((since, pid),) = told.failures, struck
    assert failure.rank == 1 and "stopped (SIGSTOP)" in failure.cause
    assert any(described) == (stage == "importing")
    assert HEARTBEAT_S <= at - since < HEARTBEAT_S + LATER_S[where]
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists(), "a process that was given up is ended"


@pytest.mark.parametrize("what", ["busy", "frozen", "frozen and awake"])
def test_a_rank_that_is_silent_while_the_driver_plans_is_lost_unless_it_is_busy(
    clicks: SyntheticPaths, tmp_path: Path, undisturbed: dict[str, str], what: str
) -> None:
    """One that imports may be silent for twice the heartbeat timeout, and keeps its process."""
    import ray

    class Hold:
        def __reduce__(self) -> Any:
            def hold() -> None:
                import ctypes

                # it sleeps with the lock of the interpreter, as an import of torch may
                ctypes.PyDLL(None).sleep(int(2.5 * HEARTBEAT_S))

            return hold, ()

    class Disturb(Told):
        driver: Any

        def on_start(self, info: Any) -> None:
            # the driver is this process, and its ranks wait for what it plans
            process = self.driver._ranks._controller._cluster.processes[1]
            while ray.get(process.actor.poll.remote()).starts:
                time.sleep(0.1)
            # as the driver had heard in a moment, or would have heard
            process.view = replace(process.view, is_awake=what == "frozen and awake")
            if what == "busy":
                process.actor.take.remote([ray.put(Hold())])
                time.sleep(1.0)
            else:
                os.kill(process.address.pid, signal.SIGSTOP)

    disturb = Disturb()
    result, tables = run(clicks, tmp_path, disturb, setup_timeout_s=600.0)
    assert tables == undisturbed
    assert result.failures == (what != "busy")
    assert [failure.rank for _, failure in disturb.failures] == [0] * result.failures


def test_a_rank_that_freezes_while_it_looks_at_files_is_named(tmp_path: Path) -> None:
    """The driver waits for its answer, and had not heard yet that it is done with importing."""

    def prepare(group: RankGroup) -> Prepared:
        process = group._processes[group._run.roster.ranks[1].process or 0]
        process.view = replace(process.view, is_awake=False)
        os.kill(group.addresses[1].pid, signal.SIGSTOP)
        group.see_folder(str(tmp_path), "token")
        return Prepared(None)

    (tmp_path / "token").touch()
    rules = Rules(scaling=ScalingConfig(num_workers=2), heartbeat_s=HEARTBEAT_S)
    with pytest.raises(TrainingFailed, match=r"rank 1 of 2 on .* stopped \(SIGSTOP\)"):
        Controller(rules, prepare).run()
