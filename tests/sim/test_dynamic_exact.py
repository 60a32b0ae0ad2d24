"""Dynamic tables in exact worlds: the same bits on any ranks and plans, and the ids and counters of
plain Python.
"""

from __future__ import annotations

import pytest

from rayrec.layout import EmbeddingConfig
from tests.sim.exact_worlds import check_twins, exact_world
from tests.sim.known_ids import check_same_bits


@pytest.mark.seeds(range(300))
def test_all_that_is_known_of_ids_is_the_same_bit_for_bit(seed: int) -> None:
    world = exact_world(seed)
    known = world.known()
    check_same_bits(known, world.known_to_one())
    check_twins(world, known)


def test_worlds_have_growth_hosts_and_weights_among_them() -> None:
    worlds = [exact_world(seed) for seed in range(30)]  # as a run draws unless told otherwise
    for has in (
        lambda world: world.grows and world.in_place,
        lambda world: len(world.model.plan.hosts) == 2 and not world.in_place,
        lambda world: world.model.weighted,
        lambda world: world.plans and world.model.plan.world_size > 2,
        lambda world: isinstance(world.model.tables[0], EmbeddingConfig),
    ):
        assert sum(map(bool, map(has, worlds))) > 1
