"""One property over everything at once: any model, plan, optimizer, hosts and batches train as the
unsharded tables.

A draw is a function of its seed: 1 to 8 tables 4 to 64 columns wide in pooled and sequence
collections, sum and mean pooling, weighted bags, features shared by tables, a variable batch per
feature, all seven kinds and free grids mixed, each of the seven optimizers with its options, one to
six ranks on one to three hosts, ranks without rows and bags without ids. Three steps each: every
output of every step and every final rectangle of weights and optimizer state is compared. 500 draws
take 0.1 s each.
"""

from __future__ import annotations

import pytest

from rayrec.layout import KINDS, EmbeddingBagConfig, PoolingType, kind_of
from rayrec.optim import SPARSE_OPTIMIZERS
from tests.draws import HOSTS, WIDTHS, Draw, check, draw

DRAWS = 500


@pytest.mark.seeds(range(DRAWS))
def test_everything_at_once_equals_unsharded(seed: int) -> None:
    drawn = draw(seed)
    check(drawn.world, drawn.optimizers, meta=seed % 2 == 0)


def traits(drawn: Draw) -> set[str]:
    """What a draw exercises."""
    world = drawn.world
    found = {"x".join(str(len(host)) for host in world.hosts), f"{len(world.tables)} tables"}
    found |= {kind_of(placement.layout, world.hosts) for placement in world.plan.tables.values()}
    found |= {optimizer.name for optimizer in drawn.optimizers.values()}
    found |= {f"width {table.embedding_dim}" for table in world.tables}
    found |= {
        str(table.pooling) if isinstance(table, EmbeddingBagConfig) else "sequence"
        for table in world.tables
    }
    uses = [feature for table in world.tables for feature in table.feature_names]
    cases = {
        "weighted": any(world.weighted),
        "variable batch": world.varying,
        "shared feature": len(uses) > len(set(uses)),
        "several collections": len(world.collections) > 1,
        "optimizers of their own": len(set(drawn.optimizers.values())) > 1,
    }
    return found | {name for name, holds in cases.items() if holds}


def test_the_draws_hold_every_case_several_times() -> None:
    """Else the property could hold because a case never came."""
    times: dict[str, int] = {}
    for seed in range(DRAWS):
        for trait in traits(draw(seed)):
            times[trait] = times.get(trait, 0) + 1
    wanted = (
        {"x".join(map(str, sizes)) for sizes in HOSTS}
        | {f"{n} tables" for n in range(1, 9)}
        | {f"width {w}" for w in WIDTHS}
    )
    wanted |= set(KINDS)
    wanted |= {
        "product_grid",
        "weighted",
        "variable batch",
        "shared feature",
        "several collections",
        "optimizers of their own",
    }
    wanted |= {str(PoolingType.SUM), str(PoolingType.MEAN), "sequence", *SPARSE_OPTIMIZERS}
    assert {trait: times.get(trait, 0) for trait in wanted if times.get(trait, 0) < 20} == {}
