"""The job of the walk with an autoscaler: an elastic run on planted clicks.

`python walk_job.py FOLDER LEAST MOST` trains on FOLDER/train and keeps the run in FOLDER/walk.
While FOLDER/slow exists, every step takes half a second longer, so that nodes can come and
go meanwhile. MOST 0 trains in this process alone, in FOLDER/calm.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from rayrec import (
    CheckpointConfig,
    Driver,
    FailureConfig,
    OptimizerConfig,
    RunConfig,
    ScalingConfig,
)
from rayrec.recipe import ModelRecipe
from rayrec.runs.inputs import open_data

STEPS = 600


def main(folder: Path, least: int, most: int) -> None:
    """Train, and say how the run went."""
    schema = (folder / "schema.json").read_text()
    build = ModelRecipe(model="dlrm", schema=schema, dense_layers=(16,), over_layers=(16,))
    slow = str(folder / "slow")

    def model() -> Any:
        module = build()
        module.register_forward_pre_hook(
            lambda _module, _inputs: time.sleep(0.5) if os.path.exists(slow) else None
        )
        return module

    scaling = ScalingConfig(num_workers=0)
    if most:
        scaling = ScalingConfig(num_workers=(least, most), shrink_after_s=2.0, grow_after_s=2.0)
    run = RunConfig(
        global_batch_size=128,
        steps=STEPS,
        storage_path=str(folder),
        name="walk" if most else "calm",
        checkpoint=CheckpointConfig(every_n_steps=50, num_to_keep=2),
        failure=FailureConfig(max_failures=5 if most else 0),
        resume_from="auto",
        sparse_optimizer=OptimizerConfig(name="rowwise_adagrad", lr=0.05),
        dense_optimizer=OptimizerConfig(name="adagrad", lr=0.01),
        progress="plain",
        report_every_s=1.0,
    )
    result = Driver(
        model, open_data(str(folder / "train"), schema), scaling, run, plan="row_wise"
    ).fit()
    print(
        f"done: step {result.steps}, {result.failures} failures, {result.resizes} resizes, "
        f"{result.plan.world_size} ranks; {result.checkpoint}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
