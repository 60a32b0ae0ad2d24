"""A profile of a real run: its parts lie within the step, its traces name them, and training goes
on as if there were none.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rayrec.observe.profile_summary import Profile
from rayrec.observe.times import STEP_PARTS
from rayrec.train import CheckpointConfig, ProfileConfig, RankTrainer
from tests.clicks import write_clicks
from tests.gloo.trainers import numbers, spec_of
from tests.ranks import RankPool

WORLD = 2


def train(rank: int, world_size: int, folder: Path, share_tables: bool) -> Profile:
    """13 steps with checkpoints within the profile of steps 3 to 10, and without either."""
    plain = replace(spec_of(folder, world_size), share_tables=share_tables)
    with RankTrainer(plain) as trainer:
        trainer.run()
        wanted, timer = numbers(trainer.model), trainer.model.timer
        assert timer is not None and trainer.profile is None
    saved = CheckpointConfig(every_n_steps=5, at_end=False)
    profiled = replace(
        plain,
        profile=ProfileConfig(path=str(folder / "profile"), skip_steps=2, steps=4),
        run_path=str(folder / "run"),
        checkpoint=saved,
    )
    with RankTrainer(profiled) as trainer:
        timer = trainer.model.timer
        trainer.run()
        assert trainer.model.timer is timer and trainer.profile is not None
        got = numbers(trainer.model)
        assert len(trainer.times()) == world_size
    assert not [name for name in wanted if not torch.equal(got[name], wanted[name])]
    return trainer.profile


@pytest.mark.parametrize(
    "share_tables",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["in-place", "exchanged"],
)
def test_two_ranks_are_profiled_and_train_as_without(
    ranks: RankPool, tmp_path: Path, share_tables: bool
) -> None:
    write_clicks(tmp_path)
    profile, other = ranks.run(WORLD, train, tmp_path, share_tables)
    # rows read in place need no way home
    passed = [part for part in STEP_PARTS if not share_tables or part != "output"]
    assert profile == other and (profile.first_step, profile.steps, len(profile.ranks)) == (
        3,
        4,
        WORLD,
    )
    for times in profile.ranks:
        assert set(times.parts) == set(STEP_PARTS) and times.ahead
        assert all(
            0 <= part.waited <= part.seconds and 0 <= part.ahead_waited <= part.ahead
            for part in times.parts.values()
        )
        assert [part for part in STEP_PARTS if times.parts[part].seconds > 0] == passed
        # parts never overlap, so that what they leave of the step is never negative
        assert 0 < times.rest_s < times.step_s
        # prefetched ids, rows home or the meeting before they are read, gradients of rows, dense
        # gradients
        assert times.waits == 4
        assert times.cpu_s > 0
    assert [path.name for path in sorted((tmp_path / "run").iterdir())] == [
        "step-00000005",
        "step-00000010",
    ]

    folder = tmp_path / "profile"
    assert (folder / "summary.txt").read_text() == profile.text() + "\n"
    written = json.loads((folder / "profile.json").read_text())
    assert [rank["step"] for rank in written["ranks"]] == [times.step_s for times in profile.ranks]
    assert written["operators"][0]["self"] >= written["operators"][-1]["self"] > 0
    inside = [f"rayrec::{part}" for part in STEP_PARTS]
    for rank in range(WORLD):
        events = json.loads(gzip.decompress((folder / f"rank{rank}.trace.json.gz").read_bytes()))[
            "traceEvents"
        ]
        count = {
            name: sum(event.get("name") == name and event.get("ph") == "X" for event in events)
            for name in [*inside, "rayrec::wait"]
        }
        assert (
            all(count[f"rayrec::{part}"] >= profile.steps for part in passed)
            and count["rayrec::dense"] == profile.steps
        )
        assert count["rayrec::wait"] >= 4 * profile.steps
        assert any(event.get("name") == "rayrec::input ahead" for event in events)
