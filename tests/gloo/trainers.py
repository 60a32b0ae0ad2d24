"""What the tests of `RankTrainer` train, and every number of the result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from rayrec.distributed import DistributedModelParallel
from rayrec.driver.planning import find_tables
from rayrec.layout import Topology
from rayrec.planner import manual_plan
from rayrec.recipe import ModelRecipe
from rayrec.runs.inputs import open_data
from rayrec.train import TrainSpec


class WithDropout:
    """A model whose first dense layer drops half of what it gives."""

    def __init__(self, make: Callable[[], torch.nn.Module]) -> None:
        self.make = make

    def __call__(self) -> torch.nn.Module:
        module = self.make()
        path, layer = next(
            (path, m) for path, m in module.named_modules() if isinstance(m, torch.nn.Linear)
        )
        parent, _, name = path.rpartition(".")
        dropped = torch.nn.Sequential(layer, torch.nn.Dropout(0.5))
        setattr(module.get_submodule(parent), name, dropped)
        return module


def spec_of(folder: Path, world_size: int) -> TrainSpec:
    """Eight steps an epoch, the last ragged, and five of the next."""
    recipe = ModelRecipe(
        model="dlrm",
        schema=(folder / "schema.json").read_text(),
        dense_layers=(8,),
        over_layers=(8,),
    )
    plan = manual_plan(find_tables(recipe), "row_wise", Topology.local(world_size))
    return TrainSpec(
        model=recipe,
        data=open_data(str(folder / "train"), recipe.schema),
        plan=plan,
        global_batch_size=128,
        steps=13,
    )


def numbers(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    found = {
        f"{s.shard}.{name}": t.clone()
        for s in model.shard_states()
        for name, t in s.tensors().items()
    }
    return found | {name: p.detach().clone() for name, p in model.dense_parameters()}
