"""Every optimizer under any plan equals the unsharded tables with the formula written out, also
with one optimizer per table.
"""

from __future__ import annotations

import random

import pytest

from rayrec.optim import SPARSE_OPTIMIZERS
from tests.draws import check, options_of
from tests.worlds import random_world


@pytest.mark.seeds(range(12))
@pytest.mark.parametrize("name", sorted(SPARSE_OPTIMIZERS))
def test_sharded_equals_unsharded(name: str, seed: int) -> None:
    rng = random.Random(f"{name}{seed}")
    world = random_world(rng.randrange(10_000), sequences=True)
    optimizer = options_of(name, rng)
    check(world, {t.name: optimizer for t in world.tables}, meta=seed % 2 == 0)


@pytest.mark.seeds(range(30))
def test_tables_train_with_optimizers_of_their_own(seed: int) -> None:
    rng = random.Random(seed)
    world = random_world(seed, sequences=True)
    check(
        world,
        {t.name: options_of(rng.choice(sorted(SPARSE_OPTIMIZERS)), rng) for t in world.tables},
        meta=True,
    )
