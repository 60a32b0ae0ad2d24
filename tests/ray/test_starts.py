"""What is said of ranks that die, or see another disk, before training starts."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rayrec.driver.commands import Ask
from rayrec.driver.controller import Controller
from rayrec.driver.rank_group import Prepared, RankGroup
from rayrec.driver.rank_process import stacks_of
from rayrec.driver.rooms import PlacementGroups
from rayrec.driver.run import Rules
from rayrec.driver.run_log import RunLog
from rayrec.driver.scaling import ScalingConfig
from rayrec.errors import ConfigError, RunInterrupted, TrainingFailed
from rayrec.train.seat import RankContext
from tests.ray.worlds import held, some

pytestmark = pytest.mark.usefixtures("cluster")
RANKS = 2
RULES = Rules(scaling=ScalingConfig(num_workers=RANKS))


class Asleep:
    """A task whose rank 1 sleeps in a phase of its own."""

    def run(self, context: RankContext) -> None:
        """On one rank."""
        if context.seat.rank == 1:
            context.phase("taking a nap")
            time.sleep(6)


class Idle:
    """A task that does nothing."""

    def run(self, context: RankContext) -> None:
        """On one rank."""


def on_ranks(act: Callable[[RankGroup], None]) -> None:
    """Call `act` with ranks that have not begun, and have them do nothing."""

    def prepare(group: RankGroup) -> Prepared:
        act(group)
        return Prepared(Idle())

    Controller(RULES, prepare).run()


@pytest.mark.parametrize("victim", some(range(RANKS), [0]))
def test_a_rank_that_dies_before_the_start_is_named_among_all(victim: int) -> None:
    def act(group: RankGroup) -> None:
        os.kill(group.addresses[victim].pid, signal.SIGKILL)

    with pytest.raises(
        TrainingFailed,
        match=rf"rank {victim} of {RANKS} on .* could not (start|make the rendezvous): "
        "its process died",
    ):
        on_ranks(act)


def test_a_rank_that_gets_sigterm_ends_without_a_traceback() -> None:
    """Ray's own handler would raise SystemExit wherever the process is."""

    def act(group: RankGroup) -> None:
        os.kill(group.addresses[0].pid, signal.SIGTERM)

    with pytest.raises(TrainingFailed, match="its process died without a word"):
        on_ranks(act)


@pytest.mark.slow
def test_a_rank_that_dies_after_the_last_look_at_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").touch()
    # each look came just before the death
    monkeypatch.setattr(RankGroup, "_find_trouble", lambda group, what: None)

    def act(group: RankGroup) -> None:
        os.kill(group.addresses[1].pid, signal.SIGKILL)
        group.see_folder(str(tmp_path), "token")

    with pytest.raises(TrainingFailed, match=r"rank 1 of 2 on .* could not look at .*: its proc"):
        on_ranks(act)


@pytest.mark.slow
def test_a_folder_or_a_file_that_a_rank_does_not_see_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.parquet").write_bytes(b"1234")
    (tmp_path / "token").touch()

    def act(group: RankGroup) -> None:
        group.see_folder(str(tmp_path), "token")
        group.see_files([(f"{tmp_path}/data.parquet", 4)], "data")
        with pytest.raises(
            ConfigError,
            match=rf"folder {tmp_path} is not shared by all hosts: rank 0 of 2 .* "
            "does not see what the driver",
        ):
            group.see_folder(str(tmp_path), "another token")
        with pytest.raises(
            ConfigError,
            match=r"the data are not on every host: rank 0 of 2 .*with 4 bytes, the driver with 5",
        ):
            group.see_files([(f"{tmp_path}/data.parquet", 5)], "data")

    on_ranks(act)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.parquet", "token"]


@pytest.mark.slow
def test_stacks_of_ranks_tell_a_mute_one(tmp_path: Path) -> None:
    texts: list[str] = []

    def act(group: RankGroup) -> None:
        os.kill(group.addresses[1].pid, signal.SIGSTOP)
        texts.append(stacks_of(group.actors, group.addresses, 3.0))
        os.kill(group.addresses[1].pid, signal.SIGCONT)

    on_ranks(act)
    rank0, rank1 = texts[0].split("-- rank 1")
    assert "Thread 0x" in rank0 and "in stacks" in rank0
    assert "no answer in 3 s" in rank1


@pytest.mark.slow
def test_a_wait_for_ranks_can_be_interrupted() -> None:
    """A stopped rank would be waited for until its heartbeat is missed."""

    def act(group: RankGroup) -> None:
        os.kill(group.addresses[0].pid, signal.SIGSTOP)
        threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()

    begun = time.monotonic()
    with pytest.raises(RunInterrupted):
        on_ranks(act)
    assert time.monotonic() - begun < 25, "less than the heartbeat"


@pytest.mark.slow
def test_a_run_that_stands_still_says_where_and_leaves_all_stacks(tmp_path: Path) -> None:
    said: list[str] = []
    log = RunLog(str(tmp_path))
    on_event = lambda event: said.append(event) if isinstance(event, str) else None  # noqa: E731
    Controller(RULES, lambda group: Prepared(Asleep()), on_event, log=log, stall_s=2.0).run()
    (line,) = [line for line in said if "taking a nap" in line and "stacks" in line][:1]
    assert "rank 1 is taking a nap" in line and str(log.path) in line
    assert log.path is not None
    text = log.path.read_text()
    assert "-- driver" in text and "-- rank 0" in text and "-- rank 1" in text
    assert "in run" in text.split("-- rank 1")[1], "the sleeping line of the task"


@pytest.mark.slow
def test_places_that_are_given_back_at_once_are_free_again() -> None:
    """Ray keeps the room of some that are removed while it places them: 5 of 3,000."""
    chance, groups = random.Random(0), PlacementGroups({"CPU": 1.0})
    for number in range(2000):
        groups.ask(Ask(group=number))
        time.sleep(chance.random() * 0.003)
        groups.give_back(number)
    groups.close()
    deadline = time.monotonic() + 30.0
    while (left := held()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
