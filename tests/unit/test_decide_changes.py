"""Changes of a number of ranks amid other trouble, on a simulated cluster."""

from __future__ import annotations

import random

from rayrec.driver.scaling import ScalingConfig
from rayrec.driver.states import Ended
from tests.unit.simulated_cluster import Node, Simulation


def elastic(most: int, **nodes: int) -> Simulation:
    """A run of 1 to `most` ranks that trains, on nodes with so many places."""
    scaling = ScalingConfig(num_workers=(1, most), grow_after_s=3.0, shrink_after_s=2.0)
    world = Simulation(random.Random(1), scaling, 0.0)
    world.nodes = {name: Node(slots=slots) for name, slots in nodes.items()}
    while world.run.progress.step < 3:
        world.look_once()
    return world


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
