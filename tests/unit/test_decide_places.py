"""Places that are lost, or known too late, and who takes them then, on a simulated cluster."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rayrec.driver.roster import Role, Stage
from rayrec.driver.scaling import ScalingConfig
from rayrec.driver.states import Ended, Filling, Gathering, Running
from tests.unit.simulated_cluster import Node, Simulation


def run_of(spares: int = 0, max_failures: int = 1, **nodes: int) -> Simulation:
    """A run of two ranks that train, with its spares."""
    scaling = ScalingConfig(num_workers=2, spares=spares, placement_timeout_s=300.0)
    world = Simulation(random.Random(1), scaling, 0.0, max_failures=max_failures)
    world.nodes = {name: Node(slots=slots) for name, slots in nodes.items()}
    world.poor = lambda: False  # type: ignore[method-assign]
    while world.run.progress.step < 7:
        world.look_once()
    while [s.stage for s in world.run.roster.of(Role.SPARE)] != [Stage.READY] * spares:
        world.look_once()
        world.worlds[-1].next_step_at += 0.15
    return world


@pytest.mark.parametrize("spares", [0, 1])
def test_a_node_whose_loss_the_head_learns_late_costs_one_failure(spares: int) -> None:
    """The processes of a machine that ends are missed before the machine is."""
    world = run_of(spares, n0=1, n1=1, n2=spares)
    world.lose_node(world.run.roster.ranks[1].node, 10.0)
    until = world.now + 150.0
    while world.now < until and not world.run.has_ended:
        world.look_once()
    if not spares:
        # longer than a process may take to come up
        assert not world.run.has_ended
        world.nodes["new"] = Node(slots=1)
    assert world.play() == Ended() and len(world.run.recovery.past) == 1


@pytest.mark.parametrize("busy", ["head", "spare"])
def test_a_spare_takes_the_place_of_a_lost_node_also_later(busy: str) -> None:
    """No other room is left, since the spare itself holds it."""
    world = run_of(1, n0=1, n1=1, n2=1)
    (spare,) = world.run.roster.of(Role.SPARE)
    world.lose_node(world.run.roster.ranks[1].node)
    if busy == "head":
        world.head_hears_at = world.now + 10.0
    else:
        world.processes[spare.process or 0].hears_at = world.now + 5.0
    process = spare.process
    assert world.play() == Ended() and len(world.run.recovery.past) == 1
    assert world.run.roster.ranks[1].process == process


@pytest.mark.parametrize("leaves", [False, True])
def test_ranks_stay_on_a_node_that_will_go_while_too_few_have_a_place_elsewhere(
    leaves: bool,
) -> None:
    """Also when another rank is lost, or the place that they were to go to."""
    scaling = ScalingConfig(num_workers=(2, 3), placement_timeout_s=60.0, grow_after_s=1000.0)
    world = Simulation(random.Random(1), scaling, 0.0, max_failures=1)
    world.nodes = {"stays": Node(slots=1), "goes": Node(slots=1)}
    world.poor = lambda: False  # type: ignore[method-assign]
    while world.run.progress.step < 7:
        world.look_once()
    if leaves:
        world.nodes["new"] = Node(slots=1)
    world.nodes["goes"].draining = True
    if leaves:
        while not isinstance(world.run.state, Filling):
            world.look_once()
        world.lose_node("new")
    else:
        (lost,) = (seat for seat in world.run.roster.ranks if seat.node == "stays")
        world.kill(world.processes[lost.process or 0])
    until = world.now + 20.0
    while world.now < until:
        world.look_once()
    assert isinstance(world.run.state, Running | Ended)
    assert world.play() == Ended() and len(world.run.roster.ranks) == 2
    assert not [event for event in world.told if "go on elsewhere" in str(event)]


def test_a_spare_that_answers_takes_a_place_though_another_one_is_mute() -> None:
    world = run_of(2, n0=4)
    first, second = (seat.process for seat in world.run.roster.of(Role.SPARE))
    world.processes[first or 0].hears_at = world.now + 5.0
    world.kill(world.processes[world.run.roster.ranks[1].process or 0])
    assert world.play() == Ended() and world.run.roster.ranks[1].process == second


def test_a_spare_that_was_busy_takes_a_place_also_while_the_head_is_silent() -> None:
    world = run_of(1, n0=3)
    (spare,) = (seat.process for seat in world.run.roster.of(Role.SPARE))
    world.head_hears_at, world.processes[spare or 0].hears_at = 1e9, world.now + 8.0
    world.kill(world.processes[world.run.roster.ranks[1].process or 0])
    until = world.now + 15.0
    while world.now < until:
        world.look_once()
    assert isinstance(world.run.state, Running)
    assert world.run.roster.ranks[1].process == spare


def test_the_room_of_a_spare_that_died_is_taken() -> None:
    """Nobody looks after spares while ranks are lost, and no other room is left."""
    world = run_of(1, n0=1, n1=1, n2=1)
    world.lose_node(world.run.roster.ranks[1].node)
    while not isinstance(world.run.state, Gathering):
        world.look_once()
    (spare,) = world.run.roster.of(Role.SPARE)
    world.kill(world.processes[spare.process or 0])
    assert world.play() == Ended() and len(world.run.recovery.past) == 1
    assert world.node_of(world.run.roster.ranks[1].place) == "n2"


def test_room_that_was_asked_for_by_a_spare_is_taken() -> None:
    """It came before the head knew of the lost node, whose place is asked for behind that one."""
    world = run_of(0, n0=1, n1=1)
    world.run.rules = replace(world.run.rules, scaling=replace(world.run.rules.scaling, spares=1))
    while not world.run.roster.of(Role.SPARE):
        world.look_once()
    world.lose_node(world.run.roster.ranks[1].node, 10.0)
    while not isinstance(world.run.state, Gathering):
        world.look_once()
    world.nodes["new"] = Node(slots=1)
    assert world.play() == Ended() and len(world.run.recovery.past) == 1
