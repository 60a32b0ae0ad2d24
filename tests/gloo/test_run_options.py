"""Every option that shapes a run: it does what it says, a run that is resumed in its middle ends
with the same numbers bit for bit, and 1, 2 and 4 ranks agree.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rayrec.checkpoint import read_manifest
from rayrec.optim import Adam, schedule
from rayrec.train import CheckpointConfig, RankTrainer, TrainSpec
from rayrec.train.events import Evaluation
from rayrec.train.optimizer_config import OptimizerConfig
from rayrec.train.shaping import EvaluationConfig
from tests.gloo.shaped import many_of, trained, whole_numbers
from tests.gloo.trainers import spec_of
from tests.ranks import RankPool

STEPS, MIDDLE = 12, 6
OPTIONS: dict[str, dict[str, Any]] = {
    "schedules": {
        "sparse_schedule": schedule(10, warmup=3, decay="cosine", floor=0.1),
        "dense_schedule": schedule(12, warmup=4, decay="step", floor=0.5, every=5),
    },
    "clip_norm": {"clip_norm": 0.05},
    "clip_value": {"clip_value": 0.001},
    "accumulate": {"accumulate": 3},
    # small rates: what is rounded differs between numbers of ranks, and training amplifies it
    "bfloat16": {
        "dense_dtype": "bfloat16",
        "sparse_optimizer": OptimizerConfig(name="rowwise_adagrad", lr=0.05),
        "dense_optimizer": OptimizerConfig(name="adam", lr=1e-3),
    },
    "table_optimizers": {
        "table_optimizers": {
            "t_cat_0": Adam(lr=0.02),
            "t_cat_1": OptimizerConfig(name="sgd", lr=0.3),
        }
    },
    "tasks": {},
    "evaluation": {
        "evaluation": EvaluationConfig(every_n_steps=3, rows=128, score="click/ne", keep_best=True)
    },
}


def spec_with(name: str, folder: Path, world_size: int) -> TrainSpec:
    make = many_of if name in ("tasks", "evaluation") else spec_of
    return replace(make(folder, world_size), steps=STEPS, **OPTIONS[name])


def halves(rank: int, world_size: int, name: str, folder: Path, out: Path) -> Any:
    """The run in one go, and in two."""
    spec = spec_with(name, folder, world_size)
    keep = CheckpointConfig(every_n_steps=MIDDLE, at_end=False)
    run = out / f"{name}-{world_size}"
    whole, told = trained(replace(spec, run_path=str(run), checkpoint=keep))
    path = str(run / f"step-{MIDDLE:08d}")
    rest, after = trained(replace(spec, run_path=str(run), resume_from=(path,)))
    assert not [key for key in whole if not torch.equal(whole[key], rest[key])]
    scored = [(e.step, e.scores) for e in told if isinstance(e, Evaluation)]
    again = [(e.step, e.scores) for e in after if isinstance(e, Evaluation)]
    assert again == [pair for pair in scored if pair[0] > MIDDLE]
    return whole, scored


ALL = pytest.param((1, 2, 4), marks=pytest.mark.slow, id="all")
# the default tier takes these; `make test-all` takes all
QUICK = ("evaluation", "accumulate", "tasks", "table_optimizers")


@pytest.mark.parametrize("worlds", [pytest.param((1, 2), id="two"), ALL])
@pytest.mark.parametrize(
    "name", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in OPTIONS]
)
def test_resuming_changes_nothing_and_ranks_agree(
    ranks: RankPool, shaped: Path, tmp_path: Path, name: str, worlds: tuple[int, ...]
) -> None:
    results = {w: ranks.run(w, halves, name, shaped, tmp_path)[0] for w in worlds}
    plain = {"bfloat16": 2e-2}
    one, scores = results[1]
    for world_size in worlds[1:]:
        other, others = results[world_size]
        assert other.keys() == one.keys()
        for key, wanted in one.items():
            torch.testing.assert_close(
                other[key], wanted, atol=plain.get(name, 2e-5), rtol=plain.get(name, 1e-4)
            )
        assert [step for step, _ in others] == [step for step, _ in scores]
        for (_, own), (_, wanted_scores) in zip(others, scores, strict=True):
            assert own == pytest.approx(wanted_scores, abs=1e-4, nan_ok=True)


def grouped(rank: int, world_size: int, sync_every: int, folder: Path, out: Path) -> Any:
    """Two groups of half the ranks: the run in one go, and in two."""
    size = world_size // 2
    plan = spec_of(folder, size).plan
    spec = replace(
        spec_of(folder, world_size),
        plan=plan,
        steps=STEPS,
        sharding_group_size=size,
        sync_every=sync_every,
        run_path=str(out / f"{sync_every}"),
        checkpoint=CheckpointConfig(every_n_steps=4, at_end=False),
    )
    whole, _ = trained(spec)
    path = f"{spec.run_path}/step-{4:08d}"
    rest, _ = trained(replace(spec, resume_from=(path,)))
    assert not [key for key in whole if not torch.equal(whole[key], rest[key])]
    manifest = read_manifest(path)
    return manifest.plan["world_size"]


@pytest.mark.parametrize(
    "sync_every", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))]
)
def test_groups_of_ranks_are_saved_once_and_resume(
    ranks: RankPool, shaped: Path, tmp_path: Path, sync_every: int
) -> None:
    assert ranks.run(4, grouped, sync_every, shaped, tmp_path) == [2] * 4


def one_world(rank: int, world_size: int, folder: Path, size: int | None) -> Any:
    """Final tables of the first group, or of one world."""
    plan = spec_of(folder, size or world_size).plan
    spec = replace(spec_of(folder, world_size), plan=plan, sharding_group_size=size)
    with RankTrainer(spec) as trainer:
        trainer.run()
        return whole_numbers(trainer)


@pytest.mark.slow
def test_two_groups_that_sync_in_every_step_are_one_world(ranks: RankPool, shaped: Path) -> None:
    one = ranks.run(2, one_world, shaped, None)[0]
    two = ranks.run(4, one_world, shaped, 2)[0]
    for name, wanted in one.items():
        # `whole_numbers` joins the shards of both groups where they lie at the same rows
        torch.testing.assert_close(two[name], wanted, atol=2e-5, rtol=1e-4)
