"""The property over everything at once (tests/sim/test_everything.py) over real gloo groups of four
ranks as two hosts of two.
"""

from __future__ import annotations

import pytest
import torch

from rayrec.distributed import DistributedModelParallel
from tests.draws import STEPS, TOLERANCE, Draw, RowReference, draw
from tests.ranks import RankPool
from tests.simulation import batches_of, targets_of
from tests.worlds import build_collections, output_of

TWO_BY_TWO = ((0, 1), (2, 3))


def train_draw(rank: int, world_size: int, drawn: Draw, meta: bool):
    """One rank's outputs by step and final rectangles."""
    world = drawn.world
    batches = batches_of(world, STEPS)
    targets = targets_of(world, batches)
    torch.manual_seed(world.seed)
    model = DistributedModelParallel(
        build_collections(world, "meta" if meta else "cpu"),
        plan=world.plan,
        sparse_optimizer=drawn.optimizers,
        seed=world.seed,
        share_tables=world.seed % 2 == 0,
    )
    outputs = []
    for step in range(STEPS):
        out = [output_of(module, batches[step][rank]) for module in model.module]
        sum((o * t).sum() for o, t in zip(out, targets[step][rank], strict=True)).backward()
        outputs.append([o.detach() for o in out])
    return outputs, [(s.shard, s.weight.detach().clone()) for s in model.shard_states()]


@pytest.mark.seeds(range(12))
def test_everything_at_once_equals_unsharded_over_gloo(ranks: RankPool, seed: int) -> None:
    drawn = draw(10_000 + seed, TWO_BY_TWO)
    results = ranks.run(4, train_draw, drawn, seed % 2 == 0)
    batches, reference = batches_of(drawn.world, STEPS), RowReference(drawn.world, drawn.optimizers)
    targets = targets_of(drawn.world, batches)
    for step in range(STEPS):
        wanted = reference.step(batches[step], targets[step])
        for rank in range(4):
            for got, want in zip(results[rank][0][step], wanted[rank], strict=True):
                torch.testing.assert_close(got, want, **TOLERANCE)
    weights, seen = reference.weights(), set()
    for _, states in results:
        for shard, weight in states:
            part = weights[shard.table].detach()[
                shard.rows.start : shard.rows.stop, shard.cols.start : shard.cols.stop
            ]
            torch.testing.assert_close(weight, part, **TOLERANCE)
            seen.add(shard.table)
    assert seen == set(weights)
