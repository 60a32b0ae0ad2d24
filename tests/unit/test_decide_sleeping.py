"""A driver that slept, or was held up by a callback, ends no healthy run for it."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rayrec.driver import rank_group
from rayrec.driver.rank_group import RankGroup
from rayrec.driver.run import Rules, Run
from rayrec.driver.scaling import ScalingConfig
from rayrec.driver.states import Ended, Starting
from tests.unit.simulated_cluster import TURN_S, Node, Simulation

ASLEEP_S = 600.0  # longer than any deadline


def run_of(**nodes: int) -> Simulation:
    scaling = ScalingConfig(num_workers=2, placement_timeout_s=60.0)
    world = Simulation(random.Random(1), scaling, 0.0, max_failures=0)
    world.nodes = {name: Node(slots=slots) for name, slots in nodes.items()}
    return world


def sleep(world: Simulation, seconds: float = ASLEEP_S) -> None:
    """Let all but the driver go on; its first look afterwards hears nothing that is new."""
    for _ in range(int(seconds / TURN_S)):
        world.pass_time(TURN_S)
    show, answers, head = world.show, world.answers, world.head_hears_at
    world.show = lambda process: None  # type: ignore[method-assign]
    world.answers = lambda reply: False  # type: ignore[method-assign]
    world.head_hears_at = world.now + 2 * TURN_S
    world.look_once()
    world.show, world.answers, world.head_hears_at = show, answers, head  # type: ignore[method-assign]


def test_ranks_that_were_asked_to_stop_and_have_saved_are_not_late() -> None:
    world = run_of(n0=2)
    while world.run.progress.step < 7:
        world.look_once()
    world.stops = True
    world.look_once()
    sleep(world)
    assert world.play() == Ended()


@pytest.mark.parametrize("kind", [Starting, None])
def test_ranks_that_started_meanwhile_are_not_late(kind: type[Any] | None) -> None:
    world = run_of(n0=2)
    while not (isinstance(world.run.state, kind) if kind is not None else world.processes):
        world.look_once()
    sleep(world)
    assert world.play() == Ended()


def test_room_that_came_meanwhile_is_taken() -> None:
    world = run_of(n0=1)
    world.poor = lambda: False  # type: ignore[method-assign]
    for _ in range(50):
        world.look_once()
    world.nodes["n1"] = Node(slots=1)
    sleep(world)
    assert world.play() == Ended()


def test_a_wait_for_answers_of_ranks_counts_no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers are read after the look in which the driver woke."""
    now, waits = [100.0], [0]

    def wait(asked: Sequence[str], **_: object) -> tuple[list[str], list[str]]:
        waits[0] += 1
        now[0] += ASLEEP_S if waits[0] == 1 else 0.1
        return ([], [*asked]) if waits[0] == 1 else ([*asked], [])

    errors = SimpleNamespace(RayTaskError=ValueError, RayError=OSError)
    fake = SimpleNamespace(wait=wait, get=lambda one: f"of {one}", exceptions=errors)
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(rank_group.time, "monotonic", lambda: now[0])
    processes: Any = SimpleNamespace(look=lambda timeout_s: None, views={})
    run = Run.of(Rules(scaling=ScalingConfig(num_workers=1)))
    group = RankGroup(run, processes, lambda: None)
    assert group._replies({0: "a", 1: "b"}, "look at its GPU") == {0: "of a", 1: "of b"}
