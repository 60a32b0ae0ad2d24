"""`RankTrainer` over real ranks equals a plain loop over `train_step`, bit for bit, and leaves no thread behind."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from rayrec.data.synthetic import SyntheticConfig, write_synthetic
from rayrec.distributed import DistributedModelParallel
from rayrec.optim import sparse_optimizer
from rayrec.train import RankTrainer, train_step
from tests.gloo.trainers import numbers, spec_of
from tests.ranks import RankPool


def both_loops(rank: int, world_size: int, folder: Path) -> None:
    spec = spec_of(folder, world_size)
    with RankTrainer(spec) as trainer:
        trainer.run()
        assert (trainer._place.epoch, trainer._place.batch) == (1, 5)
        got = numbers(trainer.model)
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("prefetch", "rayrec-"))]
    torch.manual_seed(spec.seed)
    sparse = sparse_optimizer(spec.sparse_optimizer.name, spec.sparse_optimizer.lr)
    model = DistributedModelParallel(spec.model(), plan=spec.plan, sparse_optimizer=sparse, seed=spec.seed)
    dense = torch.optim.Adam(model.parameters(), lr=spec.dense_optimizer.lr)
    done = 0
    for epoch in range(2):
        for batch in spec.data.loader(rank, world_size, spec.global_batch_size, seed=spec.seed, epoch=epoch):  # type: ignore[union-attr]
            if done < spec.steps:
                train_step(model, dense, batch, world_size)
                done += 1
    wanted = numbers(model)
    assert got.keys() == wanted.keys()
    assert not [name for name in wanted if not torch.equal(got[name], wanted[name])]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_loop_equals_plain_steps_bit_for_bit(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    config = SyntheticConfig(rows_train=1003, rows_eval=10, num_features=5, num_lists=1, num_dense=2, dim=4, cap=50, seed=1)
    write_synthetic(tmp_path, config)
    ranks.run(world_size, both_loops, tmp_path)
