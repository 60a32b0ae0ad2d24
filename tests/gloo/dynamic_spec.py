"""The run of the tests of dynamic tables on real ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rayrec.train import CheckpointConfig, PublishConfig, TrainSpec
from tests.gloo.trainers import spec_of

STEPS, HALF = 12, 6


def spec(data: Path, world_size: int, run: Path | None) -> TrainSpec:
    saves = CheckpointConfig(every_n_steps=HALF) if run else CheckpointConfig(at_end=False)
    return replace(
        spec_of(data, world_size),
        steps=STEPS,
        shuffle=False,
        run_path=str(run) if run else None,
        checkpoint=saves,
    )


def publishing(data: Path, world_size: int, run: Path) -> TrainSpec:
    """The run that publishes and saves at every step."""
    whole = spec(data, world_size, run)
    return replace(
        whole,
        extras=whole.model.to_extras(),
        checkpoint=CheckpointConfig(every_n_steps=1),
        publish=PublishConfig(every_n_steps=1, dtype="int8"),
    )
