"""Options of the sections of a run file that it leaves out."""

from __future__ import annotations

from dataclasses import replace

from rayrec.driver import RunConfig, ScalingConfig
from rayrec.next_item_recipe import NextItemModel
from rayrec.runs.next_item_options import run_options
from rayrec.runs.scaling import default_ranks
from rayrec.train.optimizer_config import DEFAULT_BATCH


def default_scaling() -> ScalingConfig:
    """Return the scaling of a file without the section."""
    return ScalingConfig(num_workers=default_ranks())


def default_run(in_steps: bool = False, model: object = None) -> RunConfig:
    """Return the run options of a file without the section, of one epoch.

    Args:
        in_steps: the file gives steps, so there are no epochs by default.
        model: the section model; next-item models have rates and batches of their own.
    """
    run = RunConfig(
        global_batch_size=DEFAULT_BATCH,
        steps=1 if in_steps else None,
        epochs=None if in_steps else 1,
    )
    return replace(run, **run_options(model)) if isinstance(model, NextItemModel) else run
