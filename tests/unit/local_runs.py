"""A tiny run of the driver with one rank, inside this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from rayrec.data.synthetic import SyntheticPaths
from rayrec.driver import CheckpointConfig, Driver, RunConfig, ScalingConfig
from rayrec.recipe import ModelRecipe
from rayrec.runs.inputs import open_data

STEPS = 12


def small_recipe(schema: str) -> ModelRecipe:
    return ModelRecipe(model="dlrm", schema=schema, dense_layers=(8,), over_layers=(8,))


def driver(
    clicks: SyntheticPaths,
    storage: Path | None = None,
    *,
    model: Any = None,
    train: Path | None = None,
    held_out: Path | None = None,
    **run: Any,
) -> Driver:
    """A tiny run of `STEPS` steps that saves every 4 steps when it has a storage path."""
    schema = clicks.schema.read_text()
    options: dict[str, Any] = {"global_batch_size": 128, "steps": STEPS, "progress": "off"}
    if storage is not None:
        options |= {"storage_path": str(storage), "checkpoint": CheckpointConfig(every_n_steps=4)}
    return Driver(
        model or small_recipe(schema),
        open_data(str(train or clicks.train), schema),
        ScalingConfig(num_workers=0),
        RunConfig(**(options | run)),
        eval_data=open_data(str(held_out or clicks.eval), schema),
        plan="table_wise",
    )


def acting(clicks: SyntheticPaths, at: int, act: Callable[[], None]) -> Callable[[], nn.Module]:
    """The model of the run, which acts before a step of its training."""

    def model() -> nn.Module:
        module = small_recipe(clicks.schema.read_text())()
        steps = [0]

        def before(*_: object) -> None:
            # evaluations call the model, too, and not in training mode
            steps[0] += module.training
            if module.training and steps[0] == at:
                act()

        module.register_forward_pre_hook(before)
        return module

    return model
