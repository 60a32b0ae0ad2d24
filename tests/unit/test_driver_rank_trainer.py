"""`RankTrainer` in this process, without Ray and without a process group: a world of one rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rayrec.checkpoint import CheckpointManager
from rayrec.driver.planning import find_tables
from rayrec.errors import CheckpointError, ConfigError, SaveError
from rayrec.layout import Topology
from rayrec.planner import manual_plan
from rayrec.recipe import INIT_BOUND, ModelRecipe
from rayrec.runs.inputs import open_data
from rayrec.serve.chain.folder import ChainFolder
from rayrec.train import CheckpointConfig, OptimizerConfig, ProgressReport, RankTrainer, TrainSpec
from rayrec.train.publish_config import PublishConfig
from rayrec.train.world_mark import WorldMark
from tests.clicks import write_clicks
from tests.gloo.trainers import numbers


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainSpec]:
    """A tiny run: 1003 rows in batches of 128, so 8 steps an epoch, the last one ragged."""
    paths = write_clicks(tmp_path_factory.mktemp("data"), rows_eval=300)
    recipe = ModelRecipe(
        model="dcn", schema=paths.schema.read_text(), dense_layers=(8,), over_layers=(8,)
    )
    yield TrainSpec(
        model=recipe,
        data=open_data(str(paths.train), recipe.schema),
        eval_data=open_data(str(paths.eval), recipe.schema),
        plan=manual_plan(find_tables(recipe), "table_wise", Topology.local(1)),
        global_batch_size=128,
        steps=13,
        sparse_optimizer=OptimizerConfig(name="rowwise_adagrad", lr=0.1),
        report_every_s=0.01,
    )


@pytest.mark.parametrize("bound", [INIT_BOUND, 3.0, None])
def test_rows_start_within_the_bound_of_the_recipe(spec: TrainSpec, bound: float | None) -> None:
    """Those of tables to which the schema gives bounds start within these."""
    body = json.loads(spec.model.schema)
    body["tables"][0] |= {"weight_init_min": 7.0, "weight_init_max": 8.0}
    said = replace(spec.model, schema=json.dumps(body), init_bound=bound)
    with RankTrainer(replace(spec, model=said)) as trainer:
        first, *others = (state.weight for state in trainer.model.shard_states())
    assert first.min() >= 7 and first.max() <= 8
    for rows in others:
        limit = len(rows) ** -0.5 if bound is None else bound
        assert 0.9 * limit < rows.abs().max() <= limit


@pytest.mark.parametrize("cut", [3, 8, 9])
def test_resume_repeats_the_run_bit_for_bit(spec: TrainSpec, tmp_path: Path, cut: int) -> None:
    whole = RankTrainer(spec)
    whole.run()
    first = RankTrainer(replace(spec, steps=cut))
    first.run()
    first.save(str(tmp_path / "ck"))
    second = RankTrainer(replace(spec, seed=spec.seed))
    second.restore(str(tmp_path / "ck"))
    assert second.step == cut
    second.run()
    assert second.step == whole.step == 13 and first.rows + second.rows == whole.rows
    expected, got = numbers(whole.model), numbers(second.model)
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        assert torch.equal(value, got[name]), name
    assert whole.evaluate(spec.eval_data) == second.evaluate(spec.eval_data)  # type: ignore[arg-type]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("asked", range(4))
def test_ranks_that_others_have_followed_leave_no_checkpoint(
    spec: TrainSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int, asynchronous: bool
) -> None:
    """They train on where their node is cut off, and notice it when they save."""

    mark, check = WorldMark(str(tmp_path / "mark"), 1), WorldMark.check
    looks: list[None] = []

    def look(own: WorldMark) -> None:
        """Another world follows before it is asked for the last time."""
        Path(own.path).write_text("1" if len(looks) < asked else "2")
        looks.append(None)
        check(own)

    monkeypatch.setattr(WorldMark, "check", look)
    config = CheckpointConfig(every_n_steps=5, asynchronous=asynchronous)
    cut_off = replace(spec, run_path=str(tmp_path), checkpoint=config, mark=mark)
    with (
        RankTrainer(cut_off) as trainer,
        pytest.raises(SaveError, match="world 2 of the run has followed"),
    ):
        trainer.run()
    # each save asks twice
    assert CheckpointManager(str(tmp_path)).steps() == (5, 10)[: asked // 2]


@pytest.mark.parametrize("asked", range(4))
def test_ranks_that_others_have_followed_publish_nothing(
    spec: TrainSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int
) -> None:
    """Nor do they remove what the others are writing."""
    mark, check = WorldMark(str(tmp_path / "mark"), 1), WorldMark.check
    others = tmp_path / "chain" / ".rayrec-base-00000009"
    looks: list[None] = []

    def look(own: WorldMark) -> None:
        """Another world follows before it is asked for the last time."""
        Path(own.path).write_text("1" if len(looks) < asked else "2")
        if len(looks) == asked:
            others.mkdir(parents=True, exist_ok=True)
        looks.append(None)
        check(own)

    monkeypatch.setattr(WorldMark, "check", look)
    publish = PublishConfig(every_n_steps=5, path=str(tmp_path / "chain"))
    cut_off = replace(spec, publish=publish, mark=mark)
    with (
        RankTrainer(cut_off) as trainer,
        pytest.raises(SaveError, match="world 2 of the run has followed"),
    ):
        trainer.run()
    # a base asks twice, a delta once
    assert len(ChainFolder(tmp_path / "chain").places()) == max(asked - 1, 0)
    assert others.is_dir()


@pytest.mark.parametrize("hinders", [OSError("gone"), SaveError("world 2 has followed")])
def test_a_publication_that_failed_is_told_though_its_remains_stay(
    spec: TrainSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hinders: Exception
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        monkeypatch.setattr(WorldMark, "check", stop)
        raise CheckpointError("a row cannot be packed")

    def stop(own: WorldMark) -> None:
        raise hinders

    mark = WorldMark(str(tmp_path / "mark"), 1)
    Path(mark.path).write_text("1")
    monkeypatch.setattr("rayrec.train.publisher.export", refuse)
    publish = PublishConfig(every_n_steps=5, path=str(tmp_path / "chain"))
    with (
        RankTrainer(replace(spec, publish=publish, mark=mark)) as trainer,
        pytest.raises(CheckpointError, match="a row cannot be packed"),
    ):
        trainer.run()


def test_reports_cover_every_row_once(spec: TrainSpec) -> None:
    trainer, reports = RankTrainer(spec), list[ProgressReport]()
    assert trainer.run(on_event=lambda event: reports.append(event)) is False
    assert [r.step for r in reports] == sorted({r.step for r in reports}) and reports[-1].step == 13
    assert reports[-1].rows == trainer.rows == 1003 + 5 * 128
    assert all(r.loss > 0 and r.rows_per_s > 0 for r in reports)


def test_the_last_window_is_not_what_the_others_left(spec: TrainSpec) -> None:
    """Windows double at first: 8 steps are 1, 2, and 5, where 1, 2, 4 would leave one step."""
    reports = list[ProgressReport]()
    trainer = RankTrainer(replace(spec, steps=8, report_every_s=60.0))
    trainer.run(on_event=lambda event: reports.append(event))
    assert [r.step for r in reports] == [1, 3, 8] and trainer.loss == reports[-1].loss


def test_a_stop_takes_effect_at_the_end_of_a_window_and_saves(
    spec: TrainSpec, tmp_path: Path
) -> None:
    trainer = RankTrainer(replace(spec, steps=10_000, run_path=str(tmp_path)))
    assert trainer.run(should_stop=lambda: trainer.step >= 4) is True
    assert 4 <= trainer.step < 10_000
    assert CheckpointManager(str(tmp_path)).steps() == (trainer.step,)


def test_a_checkpoint_of_another_run_is_refused(spec: TrainSpec, tmp_path: Path) -> None:
    trainer = RankTrainer(replace(spec, steps=2))
    trainer.run()
    path = trainer.save(str(tmp_path / "ck"))
    with pytest.raises(ConfigError, match=r"global_batch_size=128, the run has 64"):
        RankTrainer(replace(spec, global_batch_size=64)).restore(path)
    with pytest.raises(ConfigError, match=r"dense optimizer 'adam'.*'sgd'"):
        RankTrainer(replace(spec, dense_optimizer=OptimizerConfig(name="sgd", lr=0.1))).restore(
            path
        )
    wider = replace(spec.model, over_layers=(16,))  # type: ignore[type-var]
    with pytest.raises(CheckpointError, match="the model wants"):
        RankTrainer(replace(spec, model=wider)).restore(path)


def test_checkpoints_come_at_their_steps(spec: TrainSpec, tmp_path: Path) -> None:
    RankTrainer(
        replace(
            spec, run_path=str(tmp_path), checkpoint=CheckpointConfig(every_n_steps=5, at_end=False)
        )
    ).run()
    assert CheckpointManager(str(tmp_path)).steps() == (5, 10)


def test_a_save_that_is_asked_for_comes_at_the_end_of_a_window_and_changes_nothing(
    spec: TrainSpec, tmp_path: Path
) -> None:
    calm = RankTrainer(spec)
    calm.run()
    wishes = [True]
    trainer = RankTrainer(
        replace(spec, run_path=str(tmp_path), checkpoint=CheckpointConfig(at_end=False))
    )
    trainer.save_asked = lambda: trainer.step >= 4 and bool(wishes) and wishes.pop()
    assert trainer.run() is False
    (step,) = CheckpointManager(str(tmp_path)).steps()
    assert 4 <= step < 13 and trainer.step == 13
    after = numbers(trainer.model)
    assert all(torch.equal(value, after[name]) for name, value in numbers(calm.model).items())
    keeps_none = RankTrainer(spec)
    keeps_none.save_asked = lambda: True
    assert keeps_none.run() is False


@pytest.mark.parametrize("name", ["adam", "adagrad", "sgd"])
def test_dense_parameters_may_lie_in_memory_in_any_order(name: str) -> None:
    """Their gradients may lie in another one, and numbers between theirs are not touched."""
    whole = torch.ones(6, 4)
    several = torch.nn.Parameter(whole[:, ::2].detach())
    plain = torch.nn.Parameter(torch.ones(6, 2))
    of_complex = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    grad = torch.arange(12.0).view(6, 2)
    for parameters in ([several, of_complex], [plain]):
        optimizer = OptimizerConfig(name=name, lr=0.1).make_dense(parameters)
        for one in parameters:
            one.grad = grad.clone() if one.dim() == 2 else torch.ones_like(one)
        optimizer.step()
    torch.testing.assert_close(several, plain)
    assert bool((whole[:, 1::2] == 1).all())


@pytest.mark.parametrize("name", ["adagrad", "sgd"])
def test_layers_of_a_model_may_have_sparse_gradients(spec: TrainSpec, name: str) -> None:
    def model() -> torch.nn.Module:
        module = spec.model()
        module.extra = torch.nn.Embedding(3, 2, sparse=True)
        forward = module.forward

        def with_extra(batch: Any) -> Any:
            loss, told = forward(batch)
            return loss + module.extra(torch.tensor([1])).sum(), told

        module.forward = with_extra
        return module

    optimizer = OptimizerConfig(name=name, lr=0.1)
    with RankTrainer(replace(spec, model=model, dense_optimizer=optimizer, steps=2)) as trainer:
        before = trainer.model.module.extra.weight.detach().clone()
        trainer.run()
        moved = trainer.model.module.extra.weight != before
    assert moved.any(1).tolist() == [False, True, False]
