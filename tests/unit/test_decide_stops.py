"""A request to stop is obeyed wherever a run is, on a simulated cluster."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from rayrec.driver.commands import Plan
from rayrec.driver.scaling import ScalingConfig
from rayrec.driver.states import Ended, Filling, Planning, Running, Starting
from rayrec.driver.views import Planned
from rayrec.errors import PlanError, RunInterrupted
from tests.unit.simulated_cluster import TURN_S, Node, Simulation

LONG_S = 300.0  # longest wait for room


def run_of(ranks: int | tuple[int, int], **nodes: int) -> Simulation:
    """A run on a cluster that does not grow."""
    shrink_after_s = None if isinstance(ranks, int) else LONG_S
    scaling = ScalingConfig(
        num_workers=ranks, placement_timeout_s=LONG_S, shrink_after_s=shrink_after_s
    )
    world = Simulation(random.Random(1), scaling, 0.0)
    world.nodes = {name: Node(slots=slots) for name, slots in nodes.items()}
    world.poor = lambda: False  # type: ignore[method-assign]
    return world


def train(world: Simulation) -> None:
    while world.run.progress.step < 7:
        world.look_once()


def wait(world: Simulation, seconds: float = 20.0) -> None:
    """Let a run go on for a while."""
    until = world.now + seconds
    while world.now < until:
        world.look_once()


def ended(world: Simulation, within_s: float) -> Ended:
    """Ask a run to stop, and return its end, which comes soon."""
    world.stops, since = True, world.now
    end = world.play()
    assert world.now - since <= within_s
    return end


@pytest.mark.parametrize("silent", [False, True])
def test_a_run_without_room_ends(silent: bool) -> None:
    world = run_of(2, n0=1)
    if silent:
        world.head_hears_at = 1e9
    wait(world)
    end = ended(world, 2 * TURN_S)
    assert isinstance(end.error, RunInterrupted) and end.error.code == 143


@pytest.mark.parametrize("waits_s", [0.0, 20.0])
def test_room_that_comes_soon_is_enough_to_save(waits_s: float) -> None:
    """Otherwise a run that is stopped in its first second would have no result."""
    world = run_of(2, n0=1)
    wait(world, waits_s)
    if waits_s:
        world.nodes["n1"] = Node(slots=1)
    else:
        world.nodes["n0"].slots = 2
    assert ended(world, 30.0) == Ended() and world.saved == 1


def test_a_head_that_answers_a_moment_later_is_enough_to_save() -> None:
    """The first look mostly has its answer, and on a busy machine it has not."""
    world = run_of(2, n0=2)
    view = world.view
    world.view = lambda: replace(view(), resources=None)  # type: ignore[method-assign]
    world.stops = True
    wait(world, 1.0)
    world.view = view  # type: ignore[method-assign]
    assert world.play() == Ended() and world.saved == 1


def test_a_run_that_waits_to_recover_ends_with_its_failure() -> None:
    world = run_of(2, n0=1, n1=1)
    train(world)
    world.lose_node(world.run.roster.ranks[1].node)
    wait(world)
    end = ended(world, 2 * TURN_S)
    assert end.blame is not None and end.blame.rank == 1 and end.past == ()
    assert end.more == "the run was asked to stop while it waited for room"


def test_a_run_that_may_go_on_with_fewer_ranks_does_so_at_once_and_saves() -> None:
    world = run_of((1, 2), n0=1, n1=1)
    train(world)
    world.lose_node(world.run.roster.ranks[1].node)
    wait(world, 6.0)
    assert isinstance(world.run.state, Filling)
    assert ended(world, 10.0) == Ended() and len(world.run.roster.ranks) == 1


def paused(hands_over: bool) -> Simulation:
    """Two ranks of at least two that have paused to become three."""
    world = run_of((2, 3), n0=1, n1=1)
    train(world)
    world.draw.random = lambda: 0.5 if hands_over else 0.9  # type: ignore[method-assign]
    world.nodes["n2"] = Node(slots=1)
    world.wish = 3
    while not isinstance(world.run.state, Filling):
        world.look_once()
    assert world.run.handed_over == hands_over
    return world


def test_ranks_that_have_paused_and_saved_have_their_result() -> None:
    world = paused(hands_over=False)
    world.lose_node("n1")
    world.lose_node("n2")
    wait(world, 6.0)
    assert isinstance(world.run.state, Filling)
    assert ended(world, 2 * TURN_S) == Ended()
    assert all(seat.process in world.processes for seat in world.run.roster.ranks)


def test_ranks_that_saved_have_their_result_also_where_others_took_their_places() -> None:
    world = run_of((2, 3), n0=1, n1=1)
    train(world)
    world.nodes["n2"], world.nodes["n1"].draining = Node(slots=1), True
    while not (isinstance(world.run.state, Filling) and world.run.state.deadline):
        world.look_once()
    # the process that follows the rank there has not come up
    world.lose_node("n2")
    wait(world, 6.0)
    assert isinstance(world.run.state, Filling)
    assert ended(world, 2 * TURN_S) == Ended() and world.run.has_result


def test_a_signal_leaves_ranks_that_saved_their_result() -> None:
    world = paused(hands_over=False)
    while not isinstance(world.run.state, Starting):
        world.look_once()
    world.signal = 15
    assert ended(world, 2 * TURN_S) == Ended() and world.run.has_result


def test_a_stop_is_heard_while_the_plan_waits_for_the_head() -> None:
    """A signal and a call alike, and a failure before it is the end."""
    for begin in (starts, recovers):
        for signal in (None, 15):
            world = run_of(2, n0=3)
            begin(world)
            world.plan = lambda _: None  # type: ignore[method-assign]
            while not isinstance(world.run.state, Planning):
                world.look_once()
            # as `RayCluster` does
            world.planned, world.signal = Planned(given_up=True), signal
            end = ended(world, 2 * TURN_S)
            if begin is recovers and signal is None:
                assert end.blame is not None and end.more.endswith("to stop before it went on")
            else:
                assert isinstance(end.error, RunInterrupted) and end.error.code == 143


def test_tables_in_memory_that_were_lost_hold_up_no_stop() -> None:
    """Nobody can take them over, so there is nothing to wait for."""
    world = paused(hands_over=True)
    world.lose_node("n1")
    world.lose_node("n2")
    wait(world, 6.0)
    world.signal = 15
    end = ended(world, 2 * TURN_S)
    assert isinstance(end.error, RunInterrupted) and world.run.recovery.past[0].kind == "died"


def test_a_silent_head_holds_up_no_ranks_that_keep_tables_and_shall_save() -> None:
    world = paused(hands_over=True)
    world.head_hears_at = 1e9
    wait(world, 6.0)
    step = world.handed_at
    assert isinstance(world.run.state, Filling) and step is not None and world.saved < step
    assert ended(world, 15.0) == Ended() and world.saved > step


def test_ranks_that_no_smaller_plan_fits_are_together_again_to_save() -> None:
    """The one that was to leave keeps tables that nobody else has."""
    world = run_of((1, 3), n0=3)
    train(world)
    plan = world.plan

    def refuse(command: Plan) -> None:
        if len(command.processes) == 3:
            plan(command)
        else:
            world.planned = Planned(refused="no room", error=PlanError("no room"))
            world.stops = True

    world.plan, world.wish = refuse, 2  # type: ignore[method-assign]
    world.draw.random = lambda: 0.5  # type: ignore[method-assign]
    while not world.stops:
        world.look_once()
    step = world.handed_at
    assert step is not None and world.saved < step
    assert world.play() == Ended() and world.saved > step


def starts(world: Simulation) -> None:
    """A run that only starts."""


def recovers(world: Simulation) -> None:
    train(world)
    world.kill(world.processes[world.run.roster.ranks[1].process or 0])


def grows(world: Simulation) -> None:
    train(world)
    world.nodes["n2"] = Node(slots=1)
    world.wish = 3


def leaves(world: Simulation) -> None:
    train(world)
    world.nodes["n2"] = Node(slots=1)
    world.nodes["n1"].draining = True


@pytest.mark.parametrize("signal", [None, 15])
@pytest.mark.parametrize("begin", [starts, recovers, grows, leaves])
def test_a_stop_at_any_moment_ends_a_run_soon(
    begin: Callable[[Simulation], None], signal: int | None
) -> None:
    """It saves where it trains, and ranks restore, meet and hand tables over within seconds."""
    states = set[type]()
    for moment in range(60):
        world = run_of((1, 3), n0=1, n1=1)
        world.restores_s = lambda _: 5.0  # type: ignore[method-assign]
        begin(world)
        for _ in range(moment):
            world.look_once()
        states.add(type(world.run.state))
        world.signal = signal
        end = ended(world, 45.0)
        # a failure that is noticed after the request is the end
        fails = begin is recovers and end.blame is not None and moment < 10
        obeys = signal is not None and isinstance(end.error, RunInterrupted)
        assert end == Ended() or obeys or fails, moment
    assert {Filling, Running} <= states
