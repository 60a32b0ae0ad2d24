"""`rayrec chaos`: the schedule of faults, the account, and the verdict."""

from __future__ import annotations

import json
import os
import socket
from itertools import islice
from pathlib import Path

import pytest

from rayrec.chaos import cluster
from rayrec.chaos.account import Account, InjectedFault, RunRecord, account, table
from rayrec.chaos.campaign import Outcome
from rayrec.chaos.moments import DOING, Moments, doing, moment_words
from rayrec.chaos.schedule import LONGEST_GAP, Fault, schedule, signal_words
from rayrec.chaos.stillness import MOST_WITHOUT_STEP, Stillness
from rayrec.cli.main import main
from rayrec.driver.blame import Blame
from rayrec.driver.recovery import Recovery
from rayrec.errors import ConfigError, RayrecError
from rayrec.train.progress import SHOWN_IN
from rayrec.watch import EventLog
from rayrec.watch.event_file import NAME
from rayrec.watch.events import RunEvent
from tests.gloo.trainers import context_of

KINDS = ("KILL", "STOP", "driver", "node")
EXPECTED = {"t": "aa", "u": "bb"}


def first(seed: int, count: int) -> list[Fault]:
    return list(islice(schedule(seed, 10.0, KINDS), count))


@pytest.mark.seeds(range(10))
def test_the_faults_follow_from_the_seed(seed: int) -> None:
    drawn = first(seed, 2000)
    assert drawn == first(seed, 2000) and drawn[:50] != first(seed + 1, 50)
    assert {fault.kind for fault in drawn[: len(KINDS)]} == set(KINDS), "each kind comes early"
    assert all(0 <= fault.after_s <= LONGEST_GAP * 10.0 for fault in drawn)
    assert 8.0 < sum(fault.after_s for fault in drawn) / len(drawn) < 12.0
    counts = {kind: sum(fault.kind == kind for fault in drawn) for kind in KINDS}
    assert counts["KILL"] > counts["STOP"] > counts["driver"] > 0


@pytest.mark.seeds(range(10))
def test_a_fault_strikes_only_what_there_is(seed: int) -> None:
    seen = set()
    for fault in first(seed, 300):
        assert fault.struck([]) == ()
        assert fault.struck([7]) == (7,)
        struck = fault.struck([3, 5, 8])
        assert len(struck) == len(set(struck)) == fault.ranks and set(struck) <= {3, 5, 8}
        seen |= set(struck)
    assert seen == {3, 5, 8}


def test_the_moment_that_was_struck_least_comes_first_and_none_takes_all() -> None:
    moments = Moments(("train", "save", "join", "recover"), faults=8)
    training, saving = {7: {"train"}, 8: {"train"}}, {7: {"save"}, 8: {"train"}}
    assert moments.at_hand(training, recovers=False) == ("train", (7, 8))
    moments.struck("train")
    assert moments.at_hand(training, recovers=False) is None, "it was the last one"
    assert moments.at_hand(saving, recovers=False) == ("save", (7,))
    moments.struck("save")
    assert moments.at_hand({7: {"start"}, 8: ()}, recovers=True) == ("recover", (7, 8))
    assert moments.at_hand({7: {"join"}, 8: {"train"}}, recovers=False) == ("join", (7,))
    assert moments.at_hand({7: {"start"}, 8: ()}, recovers=False) is None, "nobody wants it"
    for moment in ("train", "save"):
        moments.struck(moment)
    assert moments.at_hand(training, recovers=False) is None, "it had its two of eight"
    assert moments.at_hand(training, recovers=True) == ("recover", (7, 8))
    alone = Moments(("join",))
    alone.struck("join")
    assert alone.at_hand({7: {"join"}}, recovers=False) == ("join", (7,))


def test_a_rank_shows_from_outside_what_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHOWN_IN, str(tmp_path))
    context = context_of(0, 1)
    assert doing(tmp_path, os.getpid()) == frozenset()
    for moment, words in DOING.items():
        context.phase(words)
        assert doing(tmp_path, os.getpid()) == {moment}
    context.phase("taking a nap")
    assert doing(tmp_path, os.getpid()) == frozenset()


def test_signals_and_moments_are_read() -> None:
    assert signal_words("kill, SIGSTOP") == ("KILL", "STOP")
    assert moment_words("join, save") == ("join", "save")
    for text in ("join,join", "lunch", ""):
        with pytest.raises(ConfigError):
            moment_words(text)
    for text in ("KILL,KILL", "HUP", "", "KILL,"):
        with pytest.raises(ConfigError):
            signal_words(text)


def events(*told: tuple[str, float, int]) -> list[RunEvent]:
    return [RunEvent(kind, at, step, 0, {}) for kind, at, step in told]


def test_a_fault_lasts_until_the_next_finished_step() -> None:
    story = events(
        ("start", 10.0, 0),
        ("window", 12.0, 1),
        ("window", 13.0, 30),
        ("failure", 15.0, 34),
        ("recovery", 17.0, 20),
        ("window", 18.0, 21),
        ("window", 19.0, 50),
        ("start", 30.0, 40),
        ("window", 33.0, 41),
        ("window", 40.0, 60),
    )
    # the second strikes while the run recovers from the first, the last after everything
    blows = [InjectedFault(at=at, kind="KILL", pids=(1,)) for at in (14.0, 16.5, 25.0, 50.0)]
    told = account(story, blows)
    assert told == Account(failures=1, recoveries=2, waits=(4.0, 8.0), repeated=14 + 10)


def test_a_window_of_the_life_that_was_struck_ends_no_fault() -> None:
    story = events(("start", 1.0, 0), ("window", 2.0, 1), ("window", 5.0, 9))
    assert account(story, [InjectedFault(at=4.0, kind="KILL", pids=(1,))]).waits == ()


def run(**changes: object) -> RunRecord:
    return RunRecord(**{"seed": 3, "end": "done", "digests": EXPECTED, **changes})  # type: ignore[arg-type]


def test_only_a_run_that_ends_with_the_same_tables_is_good() -> None:
    assert run().is_good(EXPECTED) and run().verdict(EXPECTED) == "same tables"
    for bad, says in (
        (run(digests={"t": "aa", "u": "xx"}), "OTHER TABLES: u"),
        (run(digests={"t": "aa"}), "OTHER TABLES: u"),
        (run(digests={**EXPECTED, "v": "cc"}), "OTHER TABLES: v"),
        (run(end="hung", words="no new step", digests={}), "hung: no new step"),
        (run(end="failed", words="code 1: lost", digests=EXPECTED), "failed: code 1: lost"),
    ):
        assert not bad.is_good(EXPECTED) and bad.verdict(EXPECTED) == says


def test_the_table_counts_every_rank_that_was_struck() -> None:
    blows = (
        InjectedFault(at=1.0, kind="KILL", pids=(1, 2)),
        InjectedFault(at=2.0, kind="driver", pids=(3,)),
    )
    shaken = run(blows=blows, account=Account(failures=2, recoveries=1, waits=(3.0,), repeated=7))
    bad = run(seed=4, end="hung", words="no new step", digests={})
    lines = table([shaken, bad], EXPECTED, ("KILL", "STOP", "driver"))
    assert lines[2] == "| 3 | 2 | 0 | 1 | 2 | 1 | 3.0 s | 3.0 s | 7 | 0 | same tables |"
    assert lines[3].endswith("| none | none | 0 | 0 | hung: no new step |")
    assert lines[4].startswith("| all | 2 | 0 | 1 |") and "1 of 2 the same tables" in lines[4]


def test_an_outcome_is_written_and_read() -> None:
    blows = (InjectedFault(at=1.5, kind="KILL", pids=(1, 2)),)
    shaken = run(blows=blows, account=Account(failures=2, waits=(3.0, 4.5)), seconds=9.5)
    outcome = Outcome(calm=run(seed=0), runs=(shaken,), kinds=("KILL",))
    text = outcome.to_json()
    assert Outcome.from_json(text) == outcome and outcome.is_good
    assert json.loads(text)["runs"][0]["verdict"] == "same tables"


def test_only_later_steps_and_what_follows_them_are_progress(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    steps = Stillness(path, 0.0)
    assert not steps.moved()

    def write(event: str, step: int, end: str = "\n") -> None:
        with path.open("a") as file:
            file.write(json.dumps({"event": event, "step": step}) + end)

    write("start", 0)
    write("window", 5, end="")
    assert not steps.moved(), "the line is not whole yet"
    with path.open("a") as file:
        file.write("\n")
    assert steps.moved() and steps.newest == 5
    write("failure", 7)
    steps.moved()
    assert steps.recovers
    write("recovery", 2)
    write("window", 4)
    write("checkpoint", 4)
    assert not steps.moved(), "steps that are done again are none"
    assert not steps.recovers
    write("checkpoint", 5)
    assert steps.moved()
    with path.open("a") as file:
        file.write('{"event": "win\n')
    assert not steps.moved()


def test_debug_behind_the_dashes_is_the_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--", "no-such-command", "--debug"]) == 2
    error = capsys.readouterr().err
    assert "'no-such-command' is not found" in error.splitlines()[-1]


def test_ports_of_a_head_are_free_and_none_that_connections_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports = cluster.head_ports()
    assert tuple(ports) == cluster.PORTS and len(set(ports.values())) == len(ports)
    assert all(20000 <= number < 32768 for number in ports.values())
    low = min(ports.values())
    monkeypatch.setattr(cluster, "LOWEST_PORT", low)
    monkeypatch.setattr(cluster, "HIGHEST_PORT", low + 2)
    with socket.create_server(("127.0.0.1", low)):
        with pytest.raises(RayrecError, match=rf"free ports from {low} to {low + 2}, .* needs 9"):
            cluster.head_ports()
        monkeypatch.setattr(cluster, "PORTS", ("--port",))
        assert all(low < cluster.head_ports()["--port"] <= low + 2 for _ in range(10))


def test_a_run_that_is_struck_or_waits_as_announced_does_not_stand_still(tmp_path: Path) -> None:
    path = tmp_path / NAME
    stillness = Stillness(path, 100.0)

    def tell(event: str, step: int, **values: object) -> None:
        with path.open("ab") as file:
            file.write(EventLog._line(event, step, values))

    tell("start", 0)
    assert stillness.look(110.0) == 10.0
    tell("window", 1)
    assert stillness.look(120.0) == 0.0
    recovery = Recovery()
    for now, still_s in zip(range(121, 127), (1, 2, 3, 3, 2, 0), strict=True):
        failure = recovery.failed(Blame(rank=0, host="", cause="lost", kind="died"), 0.0)
        tell("failure", 1, rank=0, host="", cause="lost", pause_s=failure.pause_s)
        assert not stillness.is_spared and stillness.look(now) == still_s
    assert stillness.look(130.0) == 3.0, "the last three are followed by pauses of 1, 2 and 4"
    stillness.struck(130.0)
    assert stillness.look(136.0) == 0.0 and stillness.look(140.0) == 3.0
    for _ in range(MOST_WITHOUT_STEP - 1):
        assert not stillness.is_spared
        stillness.struck(140.0)
    assert stillness.is_spared
    tell("window", 2)
    assert stillness.look(150.0) == 0.0 and not stillness.is_spared
    assert stillness.look(151.0) == 1.0, "the pauses are over"
