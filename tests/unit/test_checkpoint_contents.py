"""`inspect_checkpoint`: what a manifest says, beside what was saved and what lies on disk."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from rayrec.checkpoint import inspect_checkpoint
from rayrec.errors import CheckpointError
from tests.unit.checkpoint_worlds import random_plan, random_truths, save_world

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@pytest.mark.seeds(range(10))
def test_a_report_is_what_was_saved(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    truths = random_truths(rng)
    plan, path = random_plan(rng, truths, rng.randint(1, 3)), str(tmp_path / "step-7")
    trained = truths[0].config.name
    save_world(
        path,
        truths,
        plan,
        optimizers={trained: {"name": "adagrad", "lr": 0.5}},
        cursor={"epoch": 1, "batch": 4},
        extras={"dense_optimizer": "adam"},
    )
    report = inspect_checkpoint(path)
    assert (report.step, report.world_size, report.path) == (7, plan.world_size, path)
    assert report.cursor == {"epoch": 1, "batch": 4}
    assert report.settings == {"dense_optimizer": "adam"}
    files = [f for f in Path(path).rglob("*") if f.is_file() and f.name != "manifest.json"]
    assert report.num_bytes == sum(f.stat().st_size for f in files)
    lines = {line.split()[0]: line for line in report.to_text().splitlines() if line.strip()}
    for table, truth in zip(report.tables, truths, strict=True):
        rows, width = truth.weight.shape
        assert (table.name, table.rows, table.width) == (truth.config.name, rows, width)
        assert table.weight_bytes == rows * width * BYTES[table.data_type]
        own = [f for f in files if f.parent.name == table.name]
        assert (table.files, table.file_bytes) == (len(own), sum(f.stat().st_size for f in own))
        assert table.state == (() if truth.state == "none" else ("momentum1",))
        assert table.kind == plan.kind(table.name)
        assert table.optimizer == (
            {"name": "adagrad", "lr": 0.5} if table.name == trained else None
        )
        assert ("adagrad(lr=0.5)" in lines[table.name]) == (table.name == trained)
    assert json.loads(report.to_json())["tables"][0]["name"] == trained
    assert 'dense_optimizer = "adam"' in report.to_text()


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step-9"):
        inspect_checkpoint(str(tmp_path / "step-9"))
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"format=None\. Name a checkpoint"):
        inspect_checkpoint(str(tmp_path))
