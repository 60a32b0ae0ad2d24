"""Ray's head does not answer for a while: failures are noticed all the same, and the run ends as
one that nothing happened to.

The head's process is stopped by a signal, as an overloaded machine would do it. No test depends on
how fast something is: the head goes on only once the driver has done what it can do without it, or
after a time that fails the test.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayrec.data.synthetic import SyntheticPaths
from rayrec.driver import FailureConfig
from rayrec.driver.commands import Ask
from rayrec.driver.head import RECONNECT, head
from rayrec.driver.ray_cluster import RayCluster
from rayrec.driver.rooms import PlacementGroups
from rayrec.driver.roster import Role, Stage
from rayrec.driver.views import View
from rayrec.train.callbacks import Callback
from rayrec.train.checkpoint_config import CheckpointConfig
from rayrec.train.events import Failure, Recovered
from tests.leftovers import processes_with
from tests.ray import worlds
from tests.ray.acting import acting
from tests.ray.heads import ROOT, started_head
from tests.words import sets

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.slow]

# longer than any answer of a head that is well; the silence is told after 5 s
SAFETY_S = 60.0


class Server:
    """The process of the head of the tests' cluster; it goes on after the block."""

    def __init__(self) -> None:
        import ray._private.worker as worker

        (gcs,) = worker._global_node.all_processes["gcs_server"]
        self.pid = gcs.process.pid

    @property
    def is_stopped(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def go_on_after(self, seconds: float) -> threading.Timer:
        timer = threading.Timer(seconds, self.go_on)
        timer.daemon = True
        timer.start()
        return timer


@pytest.fixture
def server(cluster: None) -> Iterator[Server]:
    server = Server()
    safety = server.go_on_after(3 * SAFETY_S)
    yield server
    safety.cancel()
    server.go_on()


class Heard(Callback):
    """What the driver heard, and whether the head was silent then."""

    def __init__(self, server: Server, goes_on: str, after_s: float) -> None:
        self._server, self._goes_on, self._after_s = server, goes_on, after_s
        self.heard: list[tuple[str, bool]] = []

    def on_failure(self, failure: Failure) -> None:
        self._note("failure")

    def on_recovery(self, recovered: Recovered) -> None:
        self._note("recovery")

    def _note(self, what: str) -> None:
        self.heard.append((what, self._server.is_stopped))
        if what == self._goes_on:
            self._server.go_on_after(self._after_s)


def run(
    clicks: SyntheticPaths, folder: Path, server: Server | None, spares: int = 0, **options: Any
) -> dict[str, str]:
    """Train with a head that stops at step 8, and a rank that dies at step 13; the digests.

    Where there are spares, a file "spare" says that one is ready, and the head stops then.
    """
    (folder / "scratch").mkdir(parents=True)
    where = str(folder)
    pid = server.pid if server is not None else 0

    def act(own: int, life: int, now: int) -> None:
        if not pid or (own, life) != (1, 0):
            return
        if now == 8:
            deadline = time.monotonic() + SAFETY_S
            while spares and not os.path.exists(f"{where}/spare"):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            os.kill(pid, signal.SIGSTOP)
        if now >= 8:
            # the driver's next questions meet a head that does not answer
            time.sleep(0.5)
        if now == 13:
            os.kill(os.getpid(), signal.SIGKILL)

    result = worlds.driver(
        clicks,
        2,
        model=acting(clicks, folder / "scratch", act),
        steps=24,
        batch=256,
        storage_path=str(folder),
        checkpoint=CheckpointConfig(every_n_steps=5),
        failure=FailureConfig(max_failures=1),
        plan="row_wise",
        progress="plain",
        spares=spares,
        timeout_s=2 * SAFETY_S,
        **options,
    ).fit()
    assert result.checkpoint is not None and result.failures == (1 if pid else 0)
    return worlds.digests(result.checkpoint)


@pytest.fixture(scope="module")
def undisturbed(
    cluster: None, clicks: SyntheticPaths, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    return run(clicks, tmp_path_factory.mktemp("undisturbed"), None)


def test_a_killed_rank_is_noticed_while_the_head_is_silent(
    clicks: SyntheticPaths,
    tmp_path: Path,
    undisturbed: dict[str, str],
    server: Server,
    capfd: pytest.CaptureFixture[str],
) -> None:
    heard = Heard(server, "failure", 8.0)
    told = run(clicks, tmp_path, server, callbacks=(heard,))
    assert heard.heard == [("failure", True), ("recovery", False)]
    assert told == undisturbed
    out = capfd.readouterr().out
    assert "the driver does not hear from Ray" in out and "hears from Ray again, after" in out


def test_a_spare_takes_the_place_of_a_rank_while_the_head_is_silent(
    clicks: SyntheticPaths,
    tmp_path: Path,
    undisturbed: dict[str, str],
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look = RayCluster.look

    def look_and_note(self: RayCluster, **options: Any) -> View:
        for seat in self._run.roster.of(Role.SPARE):
            if seat.stage is Stage.READY and seat.address is not None:
                (tmp_path / "spare").touch()
        return look(self, **options)

    monkeypatch.setattr(RayCluster, "look", look_and_note)
    heard = Heard(server, "recovery", 0.0)
    told = run(clicks, tmp_path, server, callbacks=(heard,), spares=1)
    assert heard.heard == [("failure", True), ("recovery", True)]
    assert told == undisturbed


def test_a_place_that_comes_after_its_run_has_ended_is_given_back(server: Server) -> None:
    """The process may go on, as a notebook does."""
    from ray.util.placement_group import placement_group_table

    before = placement_group_table().keys()
    groups = PlacementGroups({"CPU": 1.0})
    with pytest.raises(KeyboardInterrupt):
        os.kill(server.pid, signal.SIGSTOP)
        groups.ask(Ask(group=0))
        try:
            raise KeyboardInterrupt
        finally:
            groups.close()
    server.go_on()
    table = head.answer(placement_group_table)
    assert [table[name]["state"] for name in table.keys() - before] == ["REMOVED"]


def test_a_head_that_is_gone_ends_a_run_that_waits_for_room(
    private_home: Path, tmp_path: Path, clicks: SyntheticPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a code and a line, before Ray ends the process with neither."""
    words = ["--data", str(clicks.schema.parent), "--ranks", "4"]
    words += sets("scaling.placement_timeout_s=300")
    # of the other processes of the head, too, which wait for it as long
    monkeypatch.setenv(RECONNECT, "40")
    with started_head(private_home, num_cpus=1) as started:
        env = {**started.env, "RAY_ADDRESS": started.gcs, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "jobs.train_dlrm", *words]
        pipe = subprocess.PIPE
        job = subprocess.Popen(command, cwd=tmp_path, env=env, text=True, stdout=pipe, stderr=pipe)
        try:
            assert job.stdout is not None
            assert any("waiting for room" in line for line in job.stdout)
            (gcs,) = [pid for pid in processes_with(started.mark) if is_gcs(pid)]
            os.kill(gcs, signal.SIGKILL)
            out, errors = job.communicate(timeout=120)
        finally:
            job.kill()
    assert job.returncode == 3, errors
    assert re.search(r"^failed: the head of the Ray cluster at \S+ is gone: ", errors, re.M), errors
    assert "the driver does not hear from Ray" in out


def is_gcs(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].endswith(b"/gcs_server")
