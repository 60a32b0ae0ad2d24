"""A run outlives its ranks: after a kill it goes on and ends with the tables of an undisturbed run.

Every run here is compared bit for bit with one that nothing happened to: the rows and the optimizer
state of all tables, and the dense layers, as the last checkpoint holds them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rayrec.checkpoint import CheckpointManager
from rayrec.comm import kept_memory
from rayrec.data.synthetic import SyntheticPaths
from rayrec.driver import FailureConfig
from rayrec.driver.commands import Begin, Command
from rayrec.driver.ray_cluster import RayCluster
from rayrec.driver.replay import timelines
from rayrec.errors import InputError, TrainingFailed
from rayrec.train.callbacks import Callback
from rayrec.train.events import Failure, Recovered
from rayrec.train.shaping import EvaluationConfig
from rayrec.watch import EventLog, read_events
from tests.ray import worlds
from tests.ray.acting import BATCH, STEPS, Act, acting, at, pids, run
from tests.ray.heads import ROOT

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def undisturbed(clicks: SyntheticPaths, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digests of a run that nothing happens to."""
    result, told = run(clicks, tmp_path_factory.mktemp("undisturbed"))
    assert result.failures == result.recoveries == 0 and result.seconds_lost == 0
    return told


def test_a_killed_rank_is_replaced_and_the_tables_are_those_of_an_undisturbed_run(
    clicks: SyntheticPaths,
    tmp_path: Path,
    undisturbed: dict[str, str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    act, heard = heard_before(tmp_path, 13), (Heard(tmp_path),)
    failure = FailureConfig(max_failures=3, log_decisions=True)
    result, told = run(clicks, tmp_path, act, callbacks=heard, progress="plain", failure=failure)
    assert told == undisturbed and heard[0].world == "2"
    (log,) = tmp_path.rglob("decisions-*.jsonl")
    states = [line.split()[-1] for line in timelines(str(log.parent.parent))][1:]
    once = ["filling", "planning", "starting", "running"]
    assert [s for s in states if s in {*once, "gathering", "ended"}] == [
        *once, "gathering", *once, "ended"
    ]  # fmt: skip
    assert (result.steps, result.failures, result.recoveries) == (STEPS, 1, 1)
    assert 0 < result.seconds_lost < 60
    survivor, lost = pids(tmp_path, 0), pids(tmp_path, 1)
    assert survivor[0] == survivor[1] and lost[0] != lost[1]
    out = capfd.readouterr().out
    assert "rank 1 on " in out and "at step 12; replaced in" in out, out
    assert out.count("; went on from step 10") == 1
    steps = [report.step for report in result.reports]
    assert steps == sorted(set(steps)) and steps[-1] == STEPS
    assert result.rows == result.reports[-1].rows == 6007, "an epoch, and no row counted twice"
    assert len({mark.name for mark in result.milestones}) == len(result.milestones)


class Heard(Callback):
    """Leaves a file for every step that the driver hears of; it looks a few times a second.

    Attributes:
        world: number of the world that may save after a recovery, as text.
    """

    world = ""

    def __init__(self, folder: Path) -> None:
        self.where = folder / "scratch"

    def on_recovery(self, recovered: Recovered) -> None:
        (mark,) = self.where.parent.rglob(".rayrec-token-*")
        self.world = mark.read_text()

    def on_step(self, step: int, trainer: Any = None) -> None:
        (self.where / f"heard-{step}").touch()


def heard_before(folder: Path, step: int) -> Act:
    """Kills rank 1 before the forward of a step, once the driver has heard of the step before it:
    otherwise the step that it tells would be one of an earlier look.
    """
    file = str(folder / "scratch" / f"heard-{step - 1}")

    def act(own: int, life: int, now: int) -> None:
        if (own, life, now) == (1, 0, step):
            deadline = time.monotonic() + 60
            while not os.path.exists(file):
                assert time.monotonic() < deadline, file
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)

    return act


IN_MEMORY = FailureConfig(max_failures=5, sync_every_n_steps=4)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_goes_on_from_memory(
    clicks: SyntheticPaths,
    tmp_path: Path,
    undisturbed: dict[str, str],
    capfd: pytest.CaptureFixture[str],
    rank: int,
    kept: list[str],
) -> None:
    """Steps 12, 20 and 16 are sync points; the checkpoint of step 15 or 20 may be newer."""
    result, told = run(
        clicks, tmp_path, at(rank, {0: 14, 1: 10, 2: 3}), failure=IN_MEMORY, progress="plain"
    )
    assert told == undisturbed
    assert (result.steps, result.failures) == (STEPS, 3)
    # a rank that dies in its third step may not have told that the run had gone on
    assert result.recoveries in (2, 3)
    out = capfd.readouterr().out
    assert out.count("; went on from step 12, in memory") == 1
    assert out.count("; went on from step 20") == 2
    check_freed(kept)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_without_storage_goes_on_from_memory_when_all_ranks_are_killed(
    clicks: SyntheticPaths,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    ranks: int,
    kept: list[str],
) -> None:
    """No rank is left on the host; what keeps the memory is."""

    def all_at(own: int, life: int, now: int) -> None:
        if (life, now) in ((0, 11), (1, 9)):
            os.kill(os.getpid(), signal.SIGKILL)

    ends: list[Any] = []
    for act in (lambda own, life, now: None, all_at):
        (tmp_path / "scratch").mkdir()
        model = acting(clicks, tmp_path / "scratch", act)
        driver = worlds.driver(
            clicks,
            ranks,
            model=model,
            steps=STEPS,
            batch=BATCH,
            failure=IN_MEMORY,
            progress="plain",
        )
        ends.append(driver.fit())
        shutil.rmtree(tmp_path / "scratch")
    assert ends[0].metrics == ends[1].metrics and ends[1].recoveries == 2
    assert ends[0].rows == ends[1].rows
    out = capfd.readouterr().out
    assert "went on from step 8, in memory" in out and "went on from step 16, in memory" in out
    check_freed(kept)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the memory of the runs of a test, as the driver ends it."""
    names: list[str] = []
    end = kept_memory.end_keeper

    def see(name: str) -> None:
        names.append(name)
        end(name)

    monkeypatch.setattr(kept_memory, "end_keeper", see)
    return names


def check_freed(names: list[str]) -> None:
    """Nothing keeps the memory of runs that have ended."""
    assert names
    deadline = time.monotonic() + 20
    while any(_keeper_of(name) for name in names):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _keeper_of(name: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if f"rayrec-{name}".encode() in path.read_bytes():
                return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_any_number_of_ranks_recovers(clicks: SyntheticPaths, tmp_path: Path, ranks: int) -> None:
    calm, expected = run(clicks, tmp_path / "calm", ranks=ranks)
    result, told = run(clicks, tmp_path / "shaken", at(0, {0: 8, 1: 4}), ranks=ranks)
    assert told == expected and result.failures == result.recoveries == 2
    assert result.rows == calm.rows


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_before_the_first_step_begins_the_run_again(
    clicks: SyntheticPaths, tmp_path: Path, undisturbed: dict[str, str], rank: int
) -> None:
    """The model is built on every rank amid the set-up, before anything is trained or saved."""
    build = acting(clicks, tmp_path / "scratch", lambda own, life, now: None)

    def model() -> Any:
        import torch.distributed as dist

        module = build()
        if dist.is_initialized() and dist.get_rank() == rank:
            lives = len(list((tmp_path / "scratch").glob(f"{rank}-*")))
            if lives <= 2:
                os.kill(os.getpid(), signal.SIGKILL)
        return module

    result, told = run(clicks, tmp_path, model=model)
    assert told == undisturbed and result.failures == 2


@pytest.mark.slow
def test_a_run_without_storage_begins_again_and_says_so(
    clicks: SyntheticPaths, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scratch").mkdir()
    kept: list[Any] = []
    for act in (lambda own, life, now: None, at(1, {0: 9})):
        model = acting(clicks, tmp_path / "scratch", act)
        driver = worlds.driver(
            clicks,
            2,
            model=model,
            steps=STEPS,
            batch=BATCH,
            failure=FailureConfig(max_failures=1),
            progress="plain",
        )
        kept.append(driver.fit())
        shutil.rmtree(tmp_path / "scratch")
        (tmp_path / "scratch").mkdir()
    assert kept[0].metrics == kept[1].metrics and kept[1].failures == 1
    assert kept[1].rows == kept[0].rows
    assert "began again, since there is no checkpoint of this run yet" in capfd.readouterr().out


@pytest.mark.slow
def test_both_ranks_at_once(
    clicks: SyntheticPaths, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    def act(own: int, life: int, now: int) -> None:
        if life == 0 and now == 13:
            os.kill(os.getpid(), signal.SIGKILL)

    result, told = run(clicks, tmp_path, act)
    assert told == undisturbed and result.recoveries == 1
    assert pids(tmp_path, 0)[0] != pids(tmp_path, 0)[1]


@pytest.mark.slow
def test_a_kill_during_an_evaluation(clicks: SyntheticPaths, tmp_path: Path) -> None:
    evaluation = EvaluationConfig(every_n_steps=6)
    calm, expected = run(clicks, tmp_path / "calm", evaluation=evaluation)

    def act(own: int, life: int, now: int) -> None:
        # the forward of an evaluation is not counted, so that the number stands still at 12
        if own == 1 and life == 0 and now == 12 and seen.append(now) is None and len(seen) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    seen: list[int] = []
    result, told = run(clicks, tmp_path / "shaken", act, evaluation=evaluation)
    assert told == expected and result.failures == 1
    steps = [evaluation.step for evaluation in result.evaluations]
    assert steps == [evaluation.step for evaluation in calm.evaluations]
    assert [e.scores for e in result.evaluations] == [e.scores for e in calm.evaluations]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_during_a_save_leaves_the_last_checkpoint_whole(
    clicks: SyntheticPaths, tmp_path: Path, undisturbed: dict[str, str], rank: int
) -> None:
    def act(own: int, life: int, now: int) -> None:
        if own != rank or life or now != 10:
            return
        from rayrec.checkpoint import save

        write = save._write_shards

        def cut(*arguments: Any) -> Any:
            write(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        save._write_shards = cut  # type: ignore[assignment]

    result, told = run(clicks, tmp_path, act)
    assert told == undisturbed and result.failures == 1
    assert not list((tmp_path / "run").glob("set-aside*"))


@pytest.mark.slow
def test_a_kill_while_the_run_recovers_is_recovered_from_too(
    clicks: SyntheticPaths, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    """The rank that survived the first kill is killed while the model is made anew."""
    scratch = tmp_path / "scratch"
    build = acting(clicks, scratch, at(1, {0: 13}))

    def model() -> Any:
        import torch.distributed as dist

        module = build()
        if dist.is_initialized() and dist.get_rank() == 0 and len(list(scratch.glob("0-*"))) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return module

    result, told = run(clicks, tmp_path, model=model)
    assert told == undisturbed
    assert (result.failures, result.recoveries) == (2, 1)


@pytest.mark.slow
def test_ranks_meet_again_after_one_is_killed_while_they_meet(
    clicks: SyntheticPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 keeps the meeting place, and dies while rank 1 waits there for rank 2."""
    do = RayCluster.do
    struck: list[int] = []

    def strike(first: int, last: int) -> None:
        os.kill(first, signal.SIGKILL)
        os.kill(last, signal.SIGCONT)

    def act(self: RayCluster, command: Command) -> None:
        if isinstance(command, Begin) and not struck and command.seat.rank == 0:
            addresses = [self.processes[number].address for number in self.processes.views]
            struck.extend(address.pid for address in addresses if address is not None)
            os.kill(struck[2], signal.SIGSTOP)
            threading.Timer(3.0, strike, (struck[0], struck[2])).start()
        do(self, command)

    monkeypatch.setattr(RayCluster, "do", act)
    result, _ = run(clicks, tmp_path, ranks=3)
    assert len(struck) == 3 and (result.failures, result.recoveries) == (1, 1)


@pytest.mark.slow
def test_a_frozen_rank_is_replaced_long_before_the_timeout_of_collectives(
    clicks: SyntheticPaths, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    started = time.monotonic()
    result, told = run(
        clicks, tmp_path, at(1, {0: 13}, signal.SIGSTOP), heartbeat_timeout_s=8.0, timeout_s=600.0
    )
    assert told == undisturbed and result.failures == 1
    assert time.monotonic() - started < 200
    assert not Path(f"/proc/{pids(tmp_path, 1)[0]}").exists()


@pytest.mark.slow
def test_a_rank_that_answers_after_all_keeps_its_process_and_is_not_counted(
    clicks: SyntheticPaths, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    class Wake(Callback):
        def on_failure(self, failure: Failure) -> None:
            os.kill(pids(tmp_path, 1)[-1], signal.SIGCONT)

    result, told = run(
        clicks,
        tmp_path,
        at(1, {0: 13, 1: 7}, signal.SIGSTOP),
        heartbeat_timeout_s=8.0,
        failure=FailureConfig(max_failures=1),
        callbacks=(Wake(),),
    )
    assert told == undisturbed and result.failures == 2, "more than may be"
    assert len(pids(tmp_path, 1)) == 3 and len(set(pids(tmp_path, 1))) == 1


@pytest.mark.slow
def test_the_first_cause_is_told_when_the_failures_are_used_up(
    clicks: SyntheticPaths, tmp_path: Path
) -> None:
    with pytest.raises(TrainingFailed) as caught:
        run(clicks, tmp_path, at(1, {0: 13, 1: 3}), failure=FailureConfig(max_failures=1))
    assert caught.value.rank == 1 and "process died" in caught.value.cause
    assert "the run had recovered from 1 failure, the first of rank 1" in str(caught.value)
    assert "\n" not in str(caught.value)
    checkpoints = CheckpointManager(str(tmp_path / "run"))
    assert checkpoints.latest() is not None, "the storage is whole"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "lives"), [("InputError", 1), ("ValueError", 2)])
def test_an_error_of_the_users_own_is_not_tried_for_ever(
    clicks: SyntheticPaths, tmp_path: Path, kind: str, lives: int
) -> None:
    """A typed error ends the run at once; another one when it comes again at the same step."""

    def act(own: int, life: int, now: int) -> None:
        # step 13 of the run is the third after the checkpoint
        if own == 1 and now == (13 if life == 0 else 3):
            from rayrec.errors import InputError

            raise {"InputError": InputError, "ValueError": ValueError}[kind]("row 7 is cursed")

    with pytest.raises(InputError if kind == "InputError" else TrainingFailed, match="row 7 is"):
        run(clicks, tmp_path, act, failure=FailureConfig(max_failures=-1))
    assert len(pids(tmp_path, 1)) == lives
    assert len(set(pids(tmp_path, 1))) == 1, "its process was kept"


@pytest.mark.slow
def test_an_error_that_passes_is_recovered_from_without_a_new_process(
    clicks: SyntheticPaths,
    tmp_path: Path,
    undisturbed: dict[str, str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    def act(own: int, life: int, now: int) -> None:
        if (own, life, now) == (0, 0, 13):
            raise OSError("the disk was away")

    result, told = run(clicks, tmp_path, act, progress="plain")
    assert told == undisturbed and result.failures == 1
    assert len(set(pids(tmp_path, 0))) == 1
    out = capfd.readouterr().out
    assert "failed (OSError: the disk was away) at step 12; all ranks met again in" in out


@pytest.mark.slow
def test_callbacks_and_the_log_of_events_hear_of_it(clicks: SyntheticPaths, tmp_path: Path) -> None:
    heard: list[Any] = []

    class Listener(Callback):
        def on_failure(self, failure: Failure) -> None:
            heard.append(failure)

        def on_recovery(self, recovered: Recovered) -> None:
            heard.append(recovered)

    callbacks = (Listener(), EventLog(tmp_path / "run"), Heard(tmp_path))
    result, _ = run(clicks, tmp_path, heard_before(tmp_path, 13), callbacks=callbacks)
    failure, recovered = heard
    assert (failure.rank, failure.step) == (1, 12) and "died" in failure.cause
    assert (recovered.step, recovered.failed_step, recovered.replaced) == (10, 12, True)
    events = read_events(tmp_path / "run")
    assert [event.step for event in events.of("recovery")] == [10]
    assert [event.step for event in events.of("window")] == [r.step for r in result.reports]


@pytest.mark.slow
def test_a_lost_node_is_replaced_by_another(private_home: Path, tmp_path: Path) -> None:
    """In a process of its own, since it needs a cluster of several nodes."""
    command = [sys.executable, "-m", "tests.ray.lost_node", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "same tables" in done.stdout
    assert re.search(
        "TrainingFailed rank . of 2 .* could not be replaced: .*need 2 CPU", done.stdout
    )
