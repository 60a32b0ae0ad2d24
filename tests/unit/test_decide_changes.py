"""Changes of a number of ranks and callbacks amid other trouble, on a simulated cluster."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from rayrec.driver.commands import Ask, Command, GiveBack, Plan, Save, Tell
from rayrec.driver.policies import LEAVE_S
from rayrec.driver.preemption import LAST_S
from rayrec.driver.roster import Role
from rayrec.driver.scaling import ScalingConfig
from rayrec.driver.states import Ended, Gathering, Planning, Running
from rayrec.driver.views import Planned, Verb
from rayrec.errors import PlanError
from rayrec.train.events import Failure
from tests.unit.simulated_cluster import STEPS, TURN_S, Node, Process, Simulation


def elastic(most: int, **nodes: int) -> Simulation:
    """A run of 1 to `most` ranks that trains, on nodes with so many places."""
    scaling = ScalingConfig(num_workers=(1, most), grow_after_s=3.0, shrink_after_s=2.0)
    world = Simulation(random.Random(1), scaling, 0.0)
    world.nodes = {name: Node(slots=slots) for name, slots in nodes.items()}
    while world.run.progress.step < 3:
        world.look_once()
    return world


def look_for(world: Simulation, seconds: float) -> list[Command]:
    """Let a run go on for a while, and return the commands about places."""
    asked: list[Command] = []
    do = world.do

    def record(commands: list[Command]) -> None:
        asked.extend(c for c in commands if isinstance(c, Ask | GiveBack))
        do(commands)

    world.do, until = record, world.now + seconds  # type: ignore[method-assign, assignment]
    while world.now < until and not world.run.has_ended:
        world.look_once()
    world.do = do  # type: ignore[method-assign]
    return asked


def test_a_place_that_is_given_back_gets_no_process() -> None:
    """The head has told of it in the very look in which fewer ranks are wished for."""
    world = elastic(3, a=1)
    world.nodes["b"] = Node(slots=1)
    # the later of the two places that are asked for comes first
    world.groups[2].nodes[0] = "b"
    while world.rooms is None or "b" not in world.rooms.nodes.values():
        world.look_once()
    world.wish = 2
    assert world.play() == Ended() and len(world.run.roster.ranks) == 2


def test_a_run_grows_while_a_node_that_it_has_left_is_still_there() -> None:
    """The first place lies there, and another one stands in for it."""
    world = elastic(3, goes=1, stays=1)
    world.nodes["goes"].draining = True
    while len(world.run.roster.ranks) > 1:
        world.look_once()
    world.nodes["new"] = Node(slots=3)
    assert world.play() == Ended() and len(world.run.roster.ranks) == 3


def test_a_place_for_a_rank_that_will_leave_is_asked_for_once() -> None:
    """An autoscaler takes a while to answer, and a run that looks for more ranks must not wait."""
    world = elastic(3, goes=1, stays=1)
    world.nodes["goes"].draining, world.nodes["goes"].goes_at = True, world.now + 300.0
    assert [type(command) for command in look_for(world, 12.0)] == [Ask]


def growing(**rules: int) -> Simulation:
    """A run of one rank beside which a second one starts."""
    world = elastic(2, a=1)
    world.run.rules = replace(world.run.rules, **rules)
    world.nodes["b"] = Node(slots=1)
    while not world.run.roster.of(Role.NEWCOMER):
        world.look_once()
    return world


def test_a_new_rank_that_dies_beside_the_others_is_no_failure() -> None:
    """No rank has paused for it, so no step is lost, and the run grows a little later."""
    world = growing(max_failures=0)
    (newcomer,) = world.run.roster.of(Role.NEWCOMER)
    world.kill(world.processes[newcomer.process or 0])
    assert world.play() == Ended() and len(world.run.roster.ranks) == 2
    assert world.run.recovery.past == [] and world.run.sizing.resizes == 1
    assert [t for t in world.told if "goes on without it: its process died" in str(t)]


def test_a_new_rank_that_dies_while_the_others_pause_for_it_is_no_failure() -> None:
    world = growing(max_failures=0)
    (newcomer,) = world.run.roster.of(Role.NEWCOMER)
    while world.run.sizing.paused_since is None:
        world.look_once()
    world.kill(world.processes[newcomer.process or 0])
    while isinstance(world.run.state, Running):
        world.worlds[-1].next_step_at += 2.0 * (
            not world.processes[newcomer.process or 0].view.death
        )
        world.look_once()
    assert world.play() == Ended() and len(world.run.roster.ranks) == 2
    assert world.run.recovery.past == [] and world.run.sizing.resizes == 1


def test_a_new_rank_that_dies_amid_a_recovery_is_no_second_failure() -> None:
    world = growing(max_failures=1)
    (newcomer,) = world.run.roster.of(Role.NEWCOMER)
    world.kill(world.processes[world.run.roster.ranks[0].process or 0])
    while not isinstance(world.run.state, Gathering):
        world.look_once()
    world.kill(world.processes[newcomer.process or 0])
    world.pass_time(1.0)
    assert world.play() == Ended() and len(world.run.roster.ranks) == 2
    assert len(world.run.recovery.past) == 1


def test_a_new_rank_that_hangs_beside_the_others_is_no_failure() -> None:
    """It answers, and never has what it needs; the others do not pause for it."""
    world = growing(max_failures=0)
    (newcomer,) = world.run.roster.of(Role.NEWCOMER)
    world.processes[newcomer.process or 0].hangs = True
    while not world.run.sizing.resizes and not world.run.has_ended:
        world.look_once()
        world.worlds[-1].next_step_at += 0.19
    assert world.play() == Ended() and len(world.run.roster.ranks) == 2
    assert world.run.recovery.past == [] and world.run.generation == 3
    assert [t for t in world.told if "goes on without it: it was not ready in 240 s" in str(t)]


def test_a_new_rank_that_cannot_tell_its_address_is_given_up_at_once() -> None:
    world = growing(max_failures=0)
    (newcomer,) = world.run.roster.of(Role.NEWCOMER)
    ((at, reply),) = world.pending
    world.pending = [(at, replace(reply, cause="OSError: no host"))]
    look_for(world, 5.0)
    assert newcomer.process is None
    assert [t for t in world.told if "goes on without it: OSError: no host" in str(t)]
    assert world.play() == Ended() and world.run.recovery.past == []


def test_new_ranks_that_cannot_import_leave_the_others_alone() -> None:
    """A node that lacks a package is tried less and less often."""
    world = growing(max_failures=-1)
    call, warmed = world.call, []

    def imports(process: int, number: int, verb: Verb) -> None:
        call(process, number, verb)
        if verb == "warm":
            at, reply = world.pending[-1]
            world.pending[-1] = (at, replace(reply, cause="ModuleNotFoundError: x"))
            warmed.append(world.now)

    world.call = imports  # type: ignore[method-assign]
    while world.run.progress.step < STEPS - 1:
        world.look_once()
        world.worlds[-1].next_step_at += 0.15
    assert world.play() == Ended() and len(world.run.roster.ranks) == 1
    assert world.run.recovery.past == [] and world.run.generation == 1
    pauses = [later - sooner for sooner, later in pairwise(warmed)]
    assert len(pauses) > 1 and pauses == sorted(pauses) and pauses[-1] > 1.5 * pauses[0]


def test_ranks_that_have_stopped_and_saved_are_not_late_while_the_driver_slept() -> None:
    world = elastic(2, a=2)
    world.stops = True
    world.look_once()
    for _ in range(int(2 * world.run.rules.stop_timeout_s / TURN_S)):
        world.pass_time(TURN_S)
    world.draw.random = lambda: 1.0  # type: ignore[method-assign]
    world.look_once()
    assert world.run.state == Ended()


def test_a_change_is_called_off_also_where_it_was_taken_back_meanwhile() -> None:
    """No plan fits two ranks, and one is wished for again before that is known."""
    world = growing()
    plan = world.plan

    def refuse(command: Plan) -> None:
        if len(command.processes) == 1:
            plan(command)
        else:
            error = PlanError("the tables do not fit")
            world.planned = Planned(refused=str(error), error=error)

    world.plan = refuse  # type: ignore[method-assign]
    while not isinstance(world.run.state, Planning) or len(world.run.roster.ranks) == 1:
        world.look_once()
    world.wish = 1
    assert world.play() == Ended() and len(world.run.roster.ranks) == 1


@pytest.mark.parametrize("fits", [False, True])
@pytest.mark.parametrize("hands_over", [False, True])
def test_a_smaller_number_that_no_plan_fits_leaves_the_ranks_as_they_were(
    hands_over: bool, fits: bool
) -> None:
    """Their places stay theirs until there is a plan, and no plan fits the smaller number later."""
    world = elastic(3, a=3)
    while len(world.run.roster.ranks) < 3 or not isinstance(world.run.state, Running):
        world.look_once()
    plan, refused = world.plan, list[int]()

    def refuse(command: Plan) -> None:
        assert len(world.groups) == 3
        if len(command.processes) == 3 or fits:
            plan(command)
        else:
            refused.append(len(command.processes))
            world.planned = Planned(refused="they do not fit", error=PlanError("they do not fit"))

    world.plan, world.wish = refuse, 2  # type: ignore[method-assign]
    # tables are handed over below 0.7, and an answer comes late below 0.2
    chance = world.draw.random
    world.draw.random = lambda: (0.3 if hands_over else 0.9) if refused == [] else chance()  # type: ignore[method-assign]
    assert world.play() == Ended()
    assert refused == ([] if fits else [2]) and world.run.recovery.past == []
    assert len(world.run.roster.ranks) == len(world.groups) == (2 if fits else 3)


def test_a_deadline_that_moves_away_is_saved_before_again() -> None:
    world = Simulation(random.Random(1), ScalingConfig(num_workers=1), 0.0)
    world.nodes = {"goes": Node(slots=1)}
    saves: list[float] = []
    do = world.do

    def record(commands: Sequence[Command]) -> None:
        saves.extend(world.now for c in commands if isinstance(c, Save))
        do(commands)

    world.do = record  # type: ignore[method-assign]
    while world.run.progress.step < 3:
        world.look_once()
    node = world.nodes["goes"]
    node.draining, node.goes_at = True, world.now + LAST_S
    for until in (world.now + 2.0, world.now + LAST_S - 1.0):
        while world.now < until:
            world.look_once()
        if len(saves) == 1:
            node.goes_at += 10.0
    assert len(saves) == 2 and node.goes_at - LAST_S <= saves[1] < node.goes_at - LAST_S + 2.0


def test_a_lost_node_of_a_run_that_goes_on_is_asked_for_once() -> None:
    """Ray asks for the first place anew; with a single one beside it two nodes would come."""
    world = elastic(2, goes=1, stays=1)
    world.lose_node("goes")
    while len(world.run.roster.ranks) > 1 or not isinstance(world.run.state, Running):
        world.look_once()
    look_for(world, 5.0)
    pending = [g for g in world.groups.values() if len(g.nodes) < g.ask.bundles]
    assert len(world.groups) == 2 and len(pending) == 1 and not pending[0].nodes
    world.nodes["new"] = Node(slots=1)
    assert world.play() == Ended() and len(world.run.roster.ranks) == 2


def test_a_callback_that_takes_long_costs_no_survivor_its_process() -> None:
    """The time to leave the failed world begins with the first look after it."""
    world = Simulation(random.Random(1), ScalingConfig(num_workers=2), 0.0)
    world.nodes["n0"].slots = 6
    while world.run.progress.step < 7:
        world.look_once()
    survivor, victim = (seat.process for seat in world.run.roster.ranks)
    do, show, missed = world.do, world.show, list[int]()

    def call_back(commands: Sequence[Command]) -> None:
        do(commands)
        if any(isinstance(c, Tell) and isinstance(c.event, Failure) for c in commands):
            world.now += 2 * LEAVE_S
            missed.append(0)

    def show_late(process: Process) -> None:
        if missed == [0] and process.number == survivor:
            missed[0] = 1
        else:
            show(process)

    world.do, world.show = call_back, show_late  # type: ignore[method-assign]
    # it hangs until its connections are cut
    world.processes[survivor or 0].fails_at = 1e12
    world.kill(world.processes[victim or 0])
    assert world.play() == Ended() and missed == [1]
    assert world.run.roster.ranks[0].process == survivor
