"""A small run of a DLRM on clicks that are made up, for the trainer's tests."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from rayrec.distributed import DistributedModelParallel
from rayrec.driver.planning import find_tables
from rayrec.layout import Topology
from rayrec.planner import manual_plan
from rayrec.recipe import ModelRecipe
from rayrec.runs.inputs import open_data
from rayrec.train import OptimizerConfig, TrainSpec
from tests import clicks

ROWS, BATCH = 523, 64  # nine steps an epoch, the last of eleven rows


def write_clicks(folder: Path) -> None:
    """Files of clicks, one feature with lists among them."""
    clicks.write_clicks(folder, rows_train=ROWS, rows_eval=200, dim=8)


def spec_of(
    folder: Path, world_size: int = 1, kind: str = "table_wise", **options: object
) -> TrainSpec:
    """Eleven steps: an epoch and two of the next."""
    recipe = ModelRecipe(
        model="dlrm",
        schema=(folder / "schema.json").read_text(),
        dense_layers=(8,),
        over_layers=(8,),
    )
    wanted = {"steps": 11, "dense_optimizer": OptimizerConfig(name="sgd", lr=0.05)}
    return TrainSpec(
        model=recipe,
        data=open_data(str(folder / "train"), recipe.schema),
        eval_data=open_data(str(folder / "eval"), recipe.schema),
        plan=manual_plan(find_tables(recipe), kind, Topology.local(world_size)),
        global_batch_size=BATCH,
        **wanted | options,  # type: ignore[arg-type]
    )


def numbers(model: DistributedModelParallel) -> dict[str, Tensor]:
    """Every number that training changes, on the CPU."""
    found = {name: p.detach().cpu() for name, p in model.dense_parameters()}
    for state in model.shard_states():
        for name, tensor in state.tensors().items():
            found[f"{state.shard}.{name}"] = tensor.detach().cpu()
    return found
