"""Sync points on real ranks, whose memory a keeper process holds."""

from __future__ import annotations

import copy
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rayrec.comm.kept_memory import KeptMemory, end_keepers
from rayrec.distributed import DistributedModelParallel
from rayrec.optim import Adam, RowWiseAdagrad
from rayrec.shards.undo import Point
from rayrec.spec.schedule import WarmupPolicy, WarmupStage
from rayrec.train.config import SyncPoints
from rayrec.train.loop import RankTrainer
from rayrec.train.optimizer_config import OptimizerConfig
from rayrec.train.shaping import EvaluationConfig
from rayrec.train.step import train_step
from tests.clicks import write_clicks
from tests.gloo.small_dlrm import build, parts, plan_of
from tests.gloo.trainers import numbers, spec_of
from tests.ranks import RankPool


class Lost(Exception):
    """A rank fails."""


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def lives(rank: int, world_size: int, folder: Path, name: str, falls: list[int]):
    """Train until a step at which all ranks fail, and again; what each life began from."""
    stages = (WarmupStage(WarmupPolicy.LINEAR, max_iters=9, value=0.1),)
    spec = replace(
        spec_of(folder, world_size),
        dense_optimizer=OptimizerConfig(name="adam", lr=1e-2),
        sparse_schedule=stages,
        dense_schedule=(WarmupStage(WarmupPolicy.CONSTANT, max_iters=8, value=0.1),),
        evaluation=EvaluationConfig(every_n_steps=5),
        report_every_s=0.001,
    )
    spec = replace(spec, eval_data=spec.data)
    points = SyncPoints(every_n_steps=3, name=name) if name else None
    began, scores = [], []

    def heard(event) -> None:
        scores.extend([event.scores["ne"]] if hasattr(event, "final") else [])

    for life, fall in enumerate([*falls, None]):
        spec = replace(spec, sync_points=points, run_began=0 if life else None)

        def at_step(step: int, fall: int | None = fall) -> None:
            if step == fall:
                raise Lost

        trainer = RankTrainer(spec)
        told = trainer.begin()
        began.append((told.step, told.in_memory))
        try:
            trainer.run(on_event=heard, on_step=at_step)
            return began, numbers(trainer.model), trainer.rows, trainer.loss, scores[-1]
        except Lost:
            trainer.close(wait=False)
        finally:
            if fall is None:
                trainer.close()
                end_keepers()


def test_a_trainer_goes_on_from_the_last_sync_point(ranks: RankPool, tmp_path: Path) -> None:
    write_clicks(tmp_path)
    calm = ranks.run(2, lives, tmp_path, "", [])
    shaken = ranks.run(2, lives, tmp_path, uuid.uuid4().hex, [8, 7, 11])
    for (_, *expected), (began, *told) in zip(calm, shaken, strict=True):
        assert began == [(0, False), (6, True), (6, True), (9, True)]
        assert same(told[0], expected[0]) and told[1:] == expected[1:]


def in_groups(rank: int, world_size: int, every: int, name: str):
    """Ranks of two sharding groups go back to step 2 from step 5, in a new model."""
    memory, dense_of = KeptMemory(name, rank), {}

    def make(adopt: bool = False):
        model = DistributedModelParallel(
            build(),
            plan=plan_of(2),
            sparse_optimizer=Adam(lr=0.05) if every == 1 else RowWiseAdagrad(lr=0.05),
            sharding_group_size=2,
            sync_every=every,
            memory=memory,
            adopt=adopt,
            seed=3,
        )
        return model, torch.optim.SGD([p for _, p in model.dense_parameters()], lr=0.05)

    model, dense = make()
    for step in range(5):
        if step == 2:
            assert model.undo is not None
            dense_of = copy.deepcopy({n: p.detach() for n, p in model.dense_parameters()})
            model.undo.sync(Point(1, 2), b"two")
        train_step(model, dense, parts(step, rank, world_size), world_size)
    expected = numbers(model)
    model, dense = make(adopt=True)
    assert model.undo is not None and model.undo.go_back(Point(1, 2)) == b"two"
    with torch.no_grad():
        for parameter_name, parameter in model.dense_parameters():
            parameter.copy_(dense_of[parameter_name])
    model.go_on_from(2)
    for step in range(2, 5):
        train_step(model, dense, parts(step, rank, world_size), world_size)
    end_keepers()
    return same(numbers(model), expected)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
def test_replicas_of_sharding_groups_go_back_together(ranks: RankPool, every: int) -> None:
    assert ranks.run(4, in_groups, every, uuid.uuid4().hex) == [True] * 4
