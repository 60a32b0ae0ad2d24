"""The run of the tests of dynamic tables on real ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayrec.checkpoint import CheckpointManager, load_table
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


def known(folder: Path, step: int = STEPS) -> dict[int, tuple[Any, ...]]:
    """What a step of a run says of its ids; see `table_of`."""
    return table_of(CheckpointManager(str(folder)).path(step))


def table_of(path: str | Path) -> dict[int, tuple[Any, ...]]:
    """What a checkpoint says of every id that has a row: step, count, row, state, maybe time."""
    columns = load_table(str(path), "t_user").to_pydict()
    names = ("id_key", "id_seen", "id_hits", "weight", "momentum1", "id_time")
    rows = zip(*(columns[name] for name in names if name in columns), strict=True)
    return {key: rest for key, *rest in rows if key != -1}  # type: ignore[misc]


def check_same(
    found: dict[int, tuple[Any, ...]], wanted: dict[int, tuple[Any, ...]], least: int = 20
) -> None:
    """Ids have the same rows, up to the order of sums."""
    assert found.keys() == wanted.keys() and len(wanted) > least
    for key, (seen, count, row, state, *time) in wanted.items():
        assert found[key][:2] == [seen, count] and found[key][4:] == time
        assert found[key][2] == pytest.approx(row, rel=1e-4, abs=1e-6)
        assert found[key][3] == pytest.approx(state, rel=1e-3, abs=1e-9)
