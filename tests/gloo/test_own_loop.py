"""A loop of the user's own is given the same pieces as the ready-made one: the same steps give the
same numbers bit for bit, also when the run is resumed in its middle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rayrec.checkpoint import CheckpointManager, check_whole, read_manifest
from rayrec.errors import ConfigError
from rayrec.layout import TableLayout, TablePlacement
from rayrec.train import CheckpointConfig, LoopContext, RankTrainer, TrainSpec
from rayrec.train.events import Evaluation, ProgressReport, Saved
from rayrec.train.own_loop import LoopTask
from rayrec.train.shaping import EvaluationConfig
from tests.gloo.shaped import many_of, whole_numbers
from tests.gloo.trainers import context_of, spec_of
from tests.ranks import RankPool


def loop(context: LoopContext) -> None:
    model = context.shard(context.build())
    parameters = [p for _, p in model.dense_parameters()]
    optimizer = torch.optim.Adam(parameters, lr=context.spec.dense_optimizer.lr, fused=True)
    context.track(optimizer)
    for batch in context.batches():
        loss, (_, logits, labels) = model(batch)
        optimizer.zero_grad()
        (loss * context.loss_weight(batch)).backward()
        optimizer.step()
        context.report(loss, logits, labels, {"mine": 1.5})
    NUMBERS.append(whole_numbers(context))  # type: ignore[arg-type]


NUMBERS: list[dict[str, torch.Tensor]] = []


def run(rank: int, world_size: int, spec: TrainSpec, body: Any = loop, **asks: Any) -> Any:
    context = context_of(rank, world_size, **asks)
    return LoopTask(spec=spec, loop=body).run(context), context.log.events


@dataclass(frozen=True)
class CountsClicks:
    """A model that says its loss is the mean over clicks."""

    make: Callable[[], torch.nn.Module]

    def __call__(self) -> torch.nn.Module:
        module = self.make()
        module.loss_count = lambda batch: batch.labels.sum()  # type: ignore[assignment]
        return module


def both(rank: int, world_size: int, folder: Path, out: Path) -> None:
    spec = spec_of(folder, world_size)
    spec = replace(
        spec,
        # on several ranks a count of the model's own takes the place of rows
        model=CountsClicks(spec.model) if world_size > 1 else spec.model,
        report_every_s=3600.0,
        run_path=str(out / str(world_size)),
        checkpoint=CheckpointConfig(every_n_steps=6, at_end=False),
    )
    told: list[Any] = []
    with RankTrainer(spec) as trainer:
        trainer.run(on_event=told.append)
        wanted = whole_numbers(trainer)
    spec = replace(spec, run_path=f"{spec.run_path}-own")
    outcome, events = run(rank, world_size, spec)
    path = f"{spec.run_path}/step-00000006"
    assert read_manifest(path).step == 6 and outcome.steps == 13
    run(rank, world_size, replace(spec, resume_from=(path,)))
    for got in NUMBERS[-2:]:
        assert not [name for name in wanted if not torch.equal(got[name], wanted[name])]
    if rank == 0:
        mine, theirs = (
            [e.loss for e in found if isinstance(e, ProgressReport)] for found in (events, told)
        )
        assert mine == theirs
        last = [e for e in events if isinstance(e, ProgressReport)][-1]
        assert last.step == 13 and last.scores["mine"] == 1.5
        assert last.auc is not None and outcome.rows == trainer.rows


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_own_loop_equals_the_ready_made_one(
    ranks: RankPool, shaped: Path, tmp_path: Path, world_size: int
) -> None:
    ranks.run(world_size, both, shaped, tmp_path)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_increments_after_a_new_plan_add_to_a_checkpoint_of_that_plan(
    shaped: Path, tmp_path: Path, asynchronous: bool
) -> None:
    def replanning(context: LoopContext) -> None:
        model = context.shard(context.build())
        context.track(torch.optim.Adam([p for _, p in model.dense_parameters()]))
        for batch in context.batches():
            if context.step == 5:
                halved = {
                    name: TablePlacement(TableLayout((0, rows // 2, rows), (0, 4), ((0,), (0,))))
                    for name, rows in model.plan.rows.items()
                }
                model.reshard(replace(model.plan, tables=halved))
            loss, _ = model(batch)
            (loss * context.loss_weight(batch)).backward()

    config = CheckpointConfig(every_n_steps=2, incremental=True, asynchronous=asynchronous)
    spec = replace(spec_of(shaped, 1), steps=8, run_path=str(tmp_path), checkpoint=config)
    run(0, 1, spec, replanning)
    manager, added = CheckpointManager(str(tmp_path)), {}
    for step in manager.steps():
        manifest = read_manifest(manager.path(step))
        check_whole(manager.path(step), manifest)
        added[step] = manifest.parent is not None
    assert added == {2: False, 4: True, 6: False, 8: True}


def test_an_own_loop_evaluates_and_gives_scores(shaped: Path) -> None:
    evaluation = EvaluationConfig(every_n_steps=5, rows=128)
    outcome, events = run(0, 1, many_of(shaped, 1, evaluation=evaluation))
    scored = [(e.step, e.final) for e in events if isinstance(e, Evaluation)]
    assert scored == [(5, False), (10, False), (13, True)]
    assert outcome.metrics["click/rows"] == 301

    def own(context: LoopContext) -> dict[str, float]:
        loop(context)
        return {"custom": 0.25}

    outcome, _ = run(0, 1, many_of(shaped, 1), own)
    assert outcome.metrics == {"custom": 0.25}


def test_an_own_loop_stops_when_it_is_asked_to(shaped: Path, tmp_path: Path) -> None:
    steps: list[int] = []

    def own(context: LoopContext) -> None:
        context.shard(context.build())
        context.track()
        for _ in context.batches():
            steps.append(context.step)

    spec = replace(spec_of(shaped, 1), steps=10_000, run_path=str(tmp_path))
    outcome, _ = run(0, 1, spec, own, should_stop=lambda: len(steps) >= 4)
    assert outcome.stopped and 4 <= outcome.steps < 10_000
    assert outcome.checkpoint is not None and outcome.checkpoint.endswith(f"{outcome.steps:08d}")


def test_an_own_loop_saves_when_it_is_asked_to_and_goes_on(shaped: Path, tmp_path: Path) -> None:
    steps: list[int] = []
    wishes = [True]

    def own(context: LoopContext) -> None:
        context.shard(context.build())
        context.track()
        for _ in context.batches():
            steps.append(context.step)

    config = CheckpointConfig(at_end=False)
    spec = replace(spec_of(shaped, 1), run_path=str(tmp_path), checkpoint=config)
    outcome, events = run(
        0, 1, spec, own, save_asked=lambda: len(steps) >= 2 and bool(wishes) and wishes.pop()
    )
    (saved,) = [event for event in events if isinstance(event, Saved)]
    assert not outcome.stopped and 2 <= saved.step < outcome.steps == spec.steps


def test_mistakes_in_an_own_loop_are_named(shaped: Path, tmp_path: Path) -> None:
    spec = replace(spec_of(shaped, 1), run_path=str(tmp_path))

    def untracked(context: LoopContext) -> None:
        context.shard(context.build())
        next(iter(context.batches()))

    with pytest.raises(ConfigError, match=r"call context\.track"):
        run(0, 1, spec, untracked)

    def unsharded(context: LoopContext) -> None:
        context.track()

    with pytest.raises(ConfigError, match=r"after context\.shard"):
        run(0, 1, spec, unsharded)

    def early(context: LoopContext) -> None:
        next(iter(context.batches()))

    with pytest.raises(ConfigError, match=r"before context\.batches"):
        run(0, 1, replace(spec, run_path=None), early)
