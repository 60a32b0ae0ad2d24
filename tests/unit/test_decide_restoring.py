"""Trouble between the start of ranks and the first step of theirs, on a simulated cluster."""

from __future__ import annotations

import random

import pytest

from rayrec.driver.roster import Seat
from rayrec.driver.scaling import ScalingConfig
from rayrec.driver.states import Ended, Running, Starting
from rayrec.errors import RunInterrupted, TrainingFailed
from rayrec.train.events import Noticed
from tests.unit.simulated_cluster import STEPS, Node, Simulation, World


class Restoring(Simulation):
    """Ranks of some worlds need some seconds before they train.

    Attributes:
        slow: generations of the worlds that restore.
        restore_s: seconds of each.
    """

    slow: range = range(0)
    restore_s = 0.0

    def restores_s(self, world: World) -> float:
        return self.restore_s if world.generation in self.slow and not world.first else 0.0


def run_of(scaling: ScalingConfig, max_failures: int = -1, **nodes: int) -> Restoring:
    world = Restoring(random.Random(1), scaling, 0.0, max_failures=max_failures)
    world.nodes = {name: Node(slots=slots) for name, slots in nodes.items()}
    return world


def steps_of(world: Simulation, seat: Seat) -> int:
    assert seat.process is not None
    return world.processes[seat.process].step


@pytest.mark.parametrize("again", [False, True])
def test_a_notice_before_the_ranks_train_does_not_end_the_run(again: bool) -> None:
    """They are asked to leave, and begin: at the end of that window they change, and go on."""
    for number in range(20):
        scaling = ScalingConfig(num_workers=(1, 2), placement_timeout_s=60.0)
        world = run_of(scaling, n0=1, goes=2)
        world.slow, world.restore_s = range(1 + again, 2 + again), 5 + number * 0.1
        if again:
            while world.run.progress.step < 7:
                world.look_once()
            seat = next(seat for seat in world.run.roster.ranks if seat.node == "goes")
            assert seat.process is not None
            world.kill(world.processes[seat.process])
        while not (isinstance(world.run.state, Running) and world.run.generation in world.slow):
            world.look_once()
        world.look_once()
        world.nodes["goes"].draining, world.nodes["goes"].goes_at = True, world.now + 25
        assert world.play() == Ended()
        assert {steps_of(world, seat) for seat in world.run.roster.ranks} == {STEPS}


def test_a_node_that_goes_while_ranks_restore_after_a_change_is_noticed() -> None:
    scaling = ScalingConfig(num_workers=(1, 3), placement_timeout_s=60.0, grow_after_s=1000.0)
    world = run_of(scaling, 1, n0=1, a=1, b=1)
    while world.run.progress.step < 5:
        world.look_once()
    world.wish, world.restore_s = 2, 10.0
    world.slow = range(world.run.generation + 1, world.run.generation + 2)
    while len(world.run.roster.ranks) == 3 or not isinstance(world.run.state, Running):
        world.look_once()
    for _ in range(5):
        world.look_once()
    (gone,) = (seat.node for seat in world.run.roster.ranks if seat.node != "n0")
    assert gone is not None
    world.nodes[gone].draining, world.nodes[gone].goes_at = True, world.now + 3
    assert world.play() == Ended()
    assert any(isinstance(event, Noticed) for event in world.told)
    assert all(blame.preempted for blame in world.run.recovery.past)


@pytest.mark.parametrize("signal", [None, 2])
def test_ranks_that_restore_for_long_lose_nothing_by_a_stop(signal: int | None) -> None:
    world = run_of(ScalingConfig(num_workers=2), n0=2)
    world.slow, world.restore_s = range(1, 2), 1e9
    while not isinstance(world.run.state, Running):
        world.look_once()
    world.stops, world.signal, since = True, signal, world.now
    end = world.play()
    assert isinstance(end.error, RunInterrupted) and end.error.code == 128 + (signal or 15)
    assert world.now - since < world.run.rules.stop_timeout_s + 1.0


def test_ranks_that_take_tables_over_for_long_lose_them_by_a_stop() -> None:
    world = run_of(ScalingConfig(num_workers=(1, 2), grow_after_s=1.0), n0=1)
    while world.run.progress.step < 7:
        world.look_once()
    world.draw.random = lambda: 0.5  # type: ignore[method-assign]
    world.nodes["n1"] = Node(slots=1)
    while not world.run.handed_over:
        world.look_once()
    world.slow, world.restore_s = range(world.run.generation + 2, world.run.generation + 3), 1e9
    while not isinstance(world.run.state, Running):
        world.look_once()
    world.stops, world.signal = True, 15
    assert isinstance(world.play().error, TrainingFailed)


@pytest.mark.parametrize("apart_s", [0.02, 0.05, 0.1])
def test_ranks_that_are_lost_together_in_their_start_are_one_failure(apart_s: float) -> None:
    for number in range(10):
        world = run_of(ScalingConfig(num_workers=3, placement_timeout_s=60.0), 1, n0=1, n1=2, n2=2)
        while not (isinstance(world.run.state, Starting) and world.run.state.calls):
            world.look_once()
        world.look_once()
        lost = [process for process in world.processes.values() if process.node == "n1"]
        if len(lost) < 2:
            lost = [process for process in world.processes.values() if process.node == "n2"]
        assert len(lost) == 2
        world.nodes[lost[0].node].alive = False
        for place, process in enumerate(lost):
            process.alive = False
            process.died_at = world.now + 0.1 * number + place * apart_s
        assert world.play() == Ended() and len(world.run.recovery.past) == 1
