"""`RankTrainer` over real ranks equals a plain loop over `train_step`, bit for bit, and leaves no thread behind."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from jobs.options import open_data
from jobs.recipe import ModelRecipe
from rayrec.data.synthetic import SyntheticConfig, write_synthetic
from rayrec.distributed import DistributedModelParallel
from rayrec.driver.planning import find_tables
from rayrec.layout import Topology
from rayrec.optim import sparse_optimizer
from rayrec.planner import manual_plan
from rayrec.train import RankTrainer, TrainSpec, train_step
from tests.ranks import RankPool


def spec_of(folder: Path, world_size: int) -> TrainSpec:
    """Eight steps an epoch, the last ragged, and five of the next."""
    recipe = ModelRecipe(model="dlrm", schema=(folder / "schema.json").read_text(), dense_layers=(8,), over_layers=(8,))
    plan = manual_plan(find_tables(recipe), "row_wise", Topology.local(world_size))
    return TrainSpec(model=recipe, data=open_data(str(folder / "train"), recipe.schema), plan=plan, global_batch_size=128, steps=13)


def numbers(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    found = {f"{s.shard}.{name}": t.clone() for s in model.shard_states() for name, t in s.tensors().items()}
    return found | {name: p.detach().clone() for name, p in model.dense_parameters()}


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
