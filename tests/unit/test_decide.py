"""Thousands of random schedules of a simulated cluster, which drive the real `decide`."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from rayrec.driver.policies import GRACE_S
from rayrec.driver.replay import line, read_log, recording, replay
from rayrec.driver.scaling import ScalingConfig
from rayrec.driver.states import Ended, Gathering, Running, name_of
from rayrec.errors import (
    ClusterError,
    ConfigError,
    InputError,
    PlanError,
    RunInterrupted,
    TrainingFailed,
)
from rayrec.train.events import Noticed
from tests.unit.simulated_cluster import ROOM_S, STEPS, Node, Simulation

KINDS = ("fixed", "spares", "elastic", "preempted", "task")


def simulation(kind: str, draw: random.Random) -> Simulation:
    """A run of some kind on a cluster, with some chance of harm."""
    least = draw.randint(1, 3)
    elastic = kind in ("elastic", "preempted")
    scaling = ScalingConfig(
        num_workers=(least, draw.randint(least + 1, 5)) if elastic else least,
        placement_timeout_s=draw.choice([ROOM_S, None]),
        spares=draw.randint(1, 2) if kind == "spares" else 0,
        **({"grow_after_s": 3.0} if elastic else {}),
    )
    return Simulation(
        draw,
        scaling,
        draw.choice([0.0, 0.02, 0.05, 0.2]),
        max_failures=0 if kind == "task" else draw.choice([1, 3, -1, -1]),
        resizes=kind != "task",
        drains=kind in ("preempted", "fixed"),
        stops=draw.random() < 0.3,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.seeds(range(100))
def test_no_schedule_leads_astray(kind: str, seed: int) -> None:
    """Each seed is many schedules of one kind, which end for one of the reasons that there are.

    All seeds together are 10,000 of each kind.
    """
    for number in range(109 if 10 <= seed < 100 else 20):
        draw = random.Random(f"{kind} {1000 * seed + number}")
        check_end(simulation(kind, draw))


def check_end(world: Simulation) -> None:
    """Play a run to its end, and look at why it ended."""
    end, run = world.play(), world.run
    past, bound = run.recovery.past, run.rules.max_failures
    spent = sum(not old.needless and not old.preempted for old in past)
    assert bound < 0 or spent <= bound
    if end.error is None and end.blame is None:
        if not world.stops:
            assert all(world.processes[s.process].step == STEPS for s in run.roster.ranks)
        elif not run.has_result:
            assert all(world.processes[s.process].result for s in run.roster.ranks)
        assert not run.recovery.under_way
        return
    if isinstance(end.error, RunInterrupted):
        assert world.stops and not run.handed_over
    elif isinstance(end.error, TrainingFailed):
        assert world.stops, "it was asked to stop and did not"
    elif isinstance(end.error, PlanError):
        assert world.called_off, "the nodes that will go were left in any case"
    elif isinstance(end.error, ConfigError | ClusterError) or end.more:
        # spares may hold the room, too
        needed = run.rules.scaling.least + run.rules.scaling.spares
        is_silent = world.head_hears_at > world.now - 5.0
        assert world.room() < needed or is_silent or world.stops, "there is room"
    else:
        last = end.blame
        assert last is not None
        again = any((old.words, old.step) == (last.words, last.step) for old in past)
        reasons = last.final, 0 <= bound == spent, again and last.kind == "error", world.stops
        assert any(reasons), end
        assert not last.final or world.mistakes


@pytest.mark.parametrize("kind", KINDS)
def test_a_log_of_what_was_seen_leads_to_the_same_commands_again(kind: str, tmp_path: Path) -> None:
    """Nothing but the views decides: no clock, no chance, and no other word of the cluster."""
    for seed in range(4):
        world = simulation(kind, random.Random(f"{kind} again {seed}"))
        world.records = True
        world.play()
        path = write_log(world, tmp_path)
        rules, looks = read_log(str(path))
        # errors, as of a plan that was refused, are equal by what they say
        assert rules == world.run.rules and [*map(line, looks)] == [*map(line, world.log)]
        again = replay(str(path))
        assert name_of(again.state) == "ended"
        assert again.recovery.recoveries == world.run.recovery.recoveries
        assert [str(s.place) for s in again.roster.seats] == [
            str(s.place) for s in world.run.roster.seats
        ]


def write_log(world: Simulation, folder: Path) -> Path:
    """Write the log of a run that was played."""
    path = folder / "log.jsonl"
    path.write_text("".join(line(one) + "\n" for one in (world.run.rules, *world.log)))
    return path


def test_a_mistake_that_a_rank_tells_when_it_starts_ends_the_run_in_its_log_too(
    tmp_path: Path,
) -> None:
    world = Simulation(random.Random(1), ScalingConfig(num_workers=2), 0.0)
    world.records, world.nodes["n0"].slots = True, 6
    while not any(reply.verb == "take" for _, reply in world.pending):
        world.look_once()
    mistake, cause = InputError("bad id"), "InputError: bad id"
    world.pending = [
        (at, replace(reply, cause=cause, mistake=mistake, final=True))
        for at, reply in world.pending
    ]
    end = world.play()
    assert end.blame is not None and end.blame.mistake is mistake
    assert name_of(replay(str(write_log(world, tmp_path))).state) == "ended"


def test_a_log_that_was_changed_is_refused(tmp_path: Path) -> None:
    world = simulation("fixed", random.Random(3))
    world.records = True
    world.play()
    path = tmp_path / "log.jsonl"
    lines = list(map(line, (world.run.rules, *world.log)))
    (number,) = [n for n, text in enumerate(lines) if "StartProcess" in text][:1]
    changed = [*lines[:number], lines[number].replace("StartProcess", "End")]
    path.write_text("\n".join([*changed, "half a li"]))
    with pytest.raises(InputError, match=rf"log.jsonl, line {number + 1}: .*another version"):
        replay(str(path))
    path.write_text("\n".join([lines[0], lines[1].replace('"now"', '"then"'), ""]))
    with pytest.raises(InputError, match=r"log.jsonl, line 2: .*then"):
        replay(str(path))
    path.write_bytes(f"{lines[0]}\n".encode() + b'{"view\xff": 1}\n')
    with pytest.raises(InputError, match=r"log.jsonl, line 2: "):
        replay(str(path))


def test_a_log_that_finds_no_room_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayrec.driver.replay.time.strftime", lambda *_: "now")
    log = tmp_path / "logs" / f"decisions-now-{os.getpid()}.jsonl"
    log.parent.mkdir()
    log.symlink_to("/dev/full")
    rules = simulation("fixed", random.Random(3)).run.rules
    with recording(str(tmp_path)) as record:
        record(rules)
        record(rules)
    log.unlink()
    with recording(str(tmp_path)) as record:
        record(rules)
    assert read_log(str(log))[0] == rules


def test_a_failure_is_answered_in_bounded_time() -> None:
    """A killed rank costs the moment for an earlier cause; a frozen one the heartbeat timeout."""
    for freeze in (False, True):
        world = Simulation(random.Random(1), ScalingConfig(num_workers=3), 0.0)
        world.nodes["n0"].slots = 6
        while world.run.progress.step < 7:
            world.look_once()
        victim = world.processes[world.run.roster.ranks[1].process or 0]
        if freeze:
            victim.hears_at = 1e9
        else:
            world.kill(victim)
        since = world.now
        while isinstance(world.run.state, Running):
            world.look_once()
        bound = world.run.rules.heartbeat_s if freeze else GRACE_S + 1.0
        assert isinstance(world.run.state, Gathering) and world.now - since <= bound + 1.0
        assert world.play() == Ended() and world.run.recovery.past[0].rank == 1


def all_polled(world: Simulation) -> bool:
    return all(process.view.poll for process in world.processes.values())


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("stopped", [False, True])
def test_a_rank_that_freezes_while_it_starts_is_lost_soon_where_it_is_known(
    answered: bool, stopped: bool
) -> None:
    """A rank that is only silent then may be busy: it has longer, and keeps its process."""
    world = Simulation(random.Random(1), ScalingConfig(num_workers=3), 0.0)
    world.nodes["n0"].slots = 6
    while len(world.processes) < 3 or (answered and not all_polled(world)):
        world.look_once()
    first = world.run.roster.ranks[1].process or 0
    victim, heartbeat_s = world.processes[first], world.run.rules.heartbeat_s
    busy_s = heartbeat_s + 5.0
    if answered:
        victim.view = replace(victim.view, is_awake=False)
    victim.stopped, victim.hears_at = stopped, 1e9 if stopped else world.now + busy_s
    since = world.now
    while stopped and not world.run.recovery.past:
        world.look_once()
    # it is born within three seconds
    assert world.now - since < heartbeat_s + 4.0
    assert world.play() == Ended()
    blames = [(blame.rank, blame.kind) for blame in world.run.recovery.past]
    assert blames == ([(1, "stopped")] if stopped else [])


def test_a_rank_that_answers_and_never_has_its_task_gets_another_process() -> None:
    world = Simulation(random.Random(1), ScalingConfig(num_workers=2), 0.0)
    world.nodes["n0"].slots = 6
    while len(world.processes) < 2:
        world.look_once()
    first = world.run.roster.ranks[1].process or 0
    world.processes[first].hangs = True
    since = world.now
    while not world.run.recovery.past:
        world.look_once()
    assert world.now - since < world.run.rules.setup_timeout_s + 10.0
    assert world.play() == Ended() and first not in world.processes
    assert [(blame.rank, blame.kind) for blame in world.run.recovery.past] == [(1, "silent")]


def test_runs_that_lose_processes_alone_go_on_from_memory() -> None:
    """Otherwise the schedules above would say nothing about sync points."""
    worlds = []
    for seed in range(40):
        world = Simulation(random.Random(seed), ScalingConfig(num_workers=2), 0.05)
        world.loses_nodes, world.nodes["n0"].slots = False, 6
        world.play()
        worlds.append(world)
    failures = sum(len(world.run.recovery.past) for world in worlds)
    assert failures / 4 < sum(world.from_memory for world in worlds) <= failures


def test_runs_that_nothing_happens_to_finish_in_one_world() -> None:
    for kind in KINDS:
        draw = random.Random(7)
        world = simulation(kind, draw)
        world.hazard, world.nodes["n0"].slots = 0.0, 6
        end = world.play()
        assert end == Ended() and world.run.generation == 1 and world.from_memory == 0


def test_nodes_that_fewer_ranks_have_left_are_not_told_of_again() -> None:
    world = Simulation(random.Random(1), ScalingConfig(num_workers=(1, 3)), 0.0)
    world.nodes = {"stays": Node(slots=2), "goes": Node(slots=1)}
    while world.run.progress.step < 7:
        world.look_once()
    world.nodes["goes"].draining, world.nodes["goes"].goes_at = True, world.now + 40.0
    assert world.play() == Ended() and len(world.run.roster.ranks) == 2
    assert not world.run.sizing.leaving


@pytest.mark.parametrize("keeps", [True, False])
def test_a_run_of_one_number_of_ranks_is_told_of_a_node_that_will_go(keeps: bool) -> None:
    world = Simulation(random.Random(1), ScalingConfig(num_workers=2), 0.0)
    world.run.rules = replace(world.run.rules, keeps=keeps)
    world.nodes = {"goes": Node(slots=2)}
    while world.run.progress.step < 7:
        world.look_once()
    world.nodes["goes"].draining = True
    assert world.play() == Ended()
    notices = [event for event in world.told if isinstance(event, Noticed)]
    assert [(n.answer, n.ranks) for n in notices] == [("save" if keeps else "none", (0, 1))]
