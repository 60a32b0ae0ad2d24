"""What the tests of `RankTrainer` train, and every number of the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from rayrec.distributed import DistributedModelParallel
from rayrec.driver.planning import find_tables
from rayrec.layout import Topology
from rayrec.planner import manual_plan
from rayrec.recipe import ModelRecipe
from rayrec.runs.inputs import open_data
from rayrec.train import RankTrainer, TrainSpec
from rayrec.train.progress import ProgressLog
from rayrec.train.seat import RankContext, Seat
from rayrec.train.tasks import FitOutcome, FitTask


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


def begin_and_run(spec: TrainSpec) -> None:
    """Train to the end, from where the spec says."""
    with RankTrainer(spec) as trainer:
        trainer.begin()
        trainer.run()


def context_of(rank: int, world_size: int, **asks: Callable[[], bool]) -> RankContext:
    """What a task of a rank is given; `asks` are its `should_stop` and `save_asked`."""
    seat = Seat(rank=rank, world_size=world_size, host="", store_host="", store_port=0)
    return RankContext(seat=seat, log=ProgressLog(), **{"should_stop": lambda: False, **asks})


def run_task(rank: int, world_size: int, task: FitTask) -> FitOutcome:
    """What a run tells in the end, without its seconds."""
    return replace(task.run(context_of(rank, world_size)), seconds=0.0, times=())


def numbers(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    found = {
        f"{s.shard}.{name}": t.clone()
        for s in model.shard_states()
        for name, t in s.tensors().items()
    }
    return found | {name: p.detach().clone() for name, p in model.dense_parameters()}
