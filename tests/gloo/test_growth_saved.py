"""What a callback saves at a step in which a table grows has all rows, like a checkpoint that is
due.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rayrec.checkpoint import CheckpointManager, load_table, read_manifest
from rayrec.train import CheckpointConfig
from rayrec.train.callbacks import Callback
from rayrec.train.events import ProgressReport
from tests.dynamic_clicks import TABLE, write
from tests.gloo.dynamic_spec import spec
from tests.gloo.trainers import begin_and_run

GROWTH = {"max_num_embeddings": 64, "max_load_factor": 0.3, "every_n_steps": 4}
SMALL = TABLE | {"num_embeddings": 16, "dynamic": {"blocks": 4, "growth": GROWTH}}
GROWS, STEPS = 4, 6


@dataclass(frozen=True)
class Saves(Callback):
    """Saves at a step, or when its window is over."""

    moment: str

    def on_step(self, step: int, trainer: Any = None) -> None:
        if self.moment == "step" and step == GROWS:
            trainer.save()

    def on_window(self, report: ProgressReport, trainer: Any = None) -> None:
        if self.moment == "window" and report.step == GROWS:
            trainer.save()


def table_at(folder: Path, step: int) -> Any:
    return load_table(CheckpointManager(str(folder)).path(step), "t_user")


@pytest.mark.parametrize("moment", ["step", "window"])
def test_a_table_grows_before_a_callback_saves(tmp_path: Path, moment: str) -> None:
    data = write(tmp_path / "data", SMALL)
    whole = replace(spec(data, 1, None), steps=STEPS)
    config = CheckpointConfig(every_n_steps=2)
    saved = str(tmp_path / "saved" / f"step-{GROWS:08d}")
    lives: dict[str, dict[str, Any]] = {
        "calm": {},
        "saved": {"rank_callbacks": (Saves(moment),)},
        "resumed": {"resume_from": (saved,)},
    }
    for name, options in lives.items():
        life = replace(whole, run_path=str(tmp_path / name), checkpoint=config, **options)
        begin_and_run(life)
    # a second look at this step would double the rows once more
    assert read_manifest(saved).tables[0].num_embeddings == 32
    for name in ("saved", "resumed"):
        assert table_at(tmp_path / name, STEPS).equals(table_at(tmp_path / "calm", STEPS))
    assert table_at(tmp_path / "saved", GROWS).equals(table_at(tmp_path / "calm", GROWS))
