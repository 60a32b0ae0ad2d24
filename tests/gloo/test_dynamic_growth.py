"""Runs whose dynamic table grows, on real ranks: resumed, handed over, published, evaluated."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rayrec.checkpoint import CheckpointManager, load_table, read_manifest
from rayrec.data import FeatureSchema
from rayrec.driver.planning import find_tables
from rayrec.layout import column_wise
from rayrec.optim import WarmupPolicy, WarmupStage
from rayrec.runs.inputs import open_data
from rayrec.serve import Predictor, export
from rayrec.serve.chain.folder import ChainFolder
from rayrec.serve.chain.version_policy import Verdict
from rayrec.train import CheckpointConfig, LoopContext, RankTrainer, hand_over, saver
from rayrec.train.config import TrainSpec
from rayrec.train.hand_over import HandOverTask
from rayrec.train.own_loop import LoopTask
from tests.dynamic_clicks import RULE, TABLE, write
from tests.gloo.dynamic_spec import HALF, STEPS, check_same, known, publishing, spec
from tests.gloo.trainers import begin_and_run, context_of
from tests.ranks import RankPool
from tests.unit.published_worlds import bytes_of, without_programs
from tests.worlds import plan_for

# one worker process makes the runs that several tests look at
pytestmark = pytest.mark.xdist_group("dynamic growth")
GROWTH = {"max_num_embeddings": 100, "every_n_steps": 2}
SMALL = TABLE | {"num_embeddings": 16, "dynamic": RULE | {"growth": GROWTH}}
GROWN = {1: 16, 2: 32, 3: 32, 4: 64, HALF: 64, STEPS: 64}  # by step; 128 are more than the bound


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("users") / "data", SMALL)


def saving(data: Path, world_size: int, folder: Path | None, **saves: Any) -> TrainSpec:
    """A run that saves at every step, and whose windows are of a step or two."""
    whole = replace(spec(data, world_size, folder), report_every_s=0.001)
    if folder is None:
        return whole
    return replace(whole, checkpoint=CheckpointConfig(every_n_steps=1, **saves))


def run(
    rank: int, world_size: int, data: Path, folder: Path, saves: dict[str, Any], until: int = 0
) -> list[str]:
    """Train, to the end or to a step; the lines that the run told."""
    lines: list[str] = []
    with RankTrainer(saving(data, world_size, folder, **saves)) as trainer:
        trainer.begin(lines.append)
        trainer.run(lambda: bool(until) and trainer.step >= until)
    return lines


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one rank, saved at every step; no test writes to it."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert "table 't_user' has 64 rows after step 4" in run(0, 1, data, folder, {})
    return folder


@pytest.fixture(scope="module")
def on_two(ranks: RankPool, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same on two ranks."""
    folder = tmp_path_factory.mktemp("on-two") / "run"
    ranks.run(2, run, data, folder, {})
    return folder


def goes_on(rank: int, world_size: int, data: Path, path: str, out: Path) -> None:
    whole = replace(saving(data, world_size, out), resume_from=(path,))
    begin_and_run(whole)


def step_of(folder: Path, step: int) -> str:
    return CheckpointManager(str(folder)).path(step)


def rows_of(folder: Path, step: int) -> int:
    (table,) = read_manifest(step_of(folder, step)).tables
    return table.num_embeddings


def check_runs(found: Path, wanted: Path) -> None:
    """Two runs end alike, up to the order of sums."""
    assert rows_of(found, STEPS) == rows_of(wanted, STEPS) == GROWN[STEPS]
    check_same(known(found), known(wanted))


def test_a_table_grows_alike_on_any_ranks_and_in_a_run_that_was_killed(
    ranks: RankPool, data: Path, alone: Path, on_two: Path, tmp_path: Path
) -> None:
    assert {step: rows_of(alone, step) for step in GROWN} == GROWN
    check_runs(on_two, alone)
    for step in (1, 3, 4):
        out = tmp_path / f"from-{step}"
        goes_on(0, 1, data, step_of(alone, step), out)
        ours, theirs = (load_table(step_of(at, STEPS), "t_user") for at in (out, alone))
        assert ours.equals(theirs), "the same ranks make the same sums"
    ranks.run(3, goes_on, data, step_of(on_two, 4), tmp_path / "three")
    check_runs(tmp_path / "three", alone)


@pytest.mark.parametrize("saves", [{"incremental": True}, {"asynchronous": True}])
def test_increments_begin_with_a_new_base_after_growth(
    ranks: RankPool, data: Path, on_two: Path, tmp_path: Path, saves: dict[str, Any]
) -> None:
    saves = {"incremental": True, "full_every": 100} | saves
    ranks.run(2, run, data, tmp_path, saves)
    bases = []
    for step in range(1, STEPS + 1):
        whole, parts = (load_table(step_of(at, step), "t_user") for at in (on_two, tmp_path))
        assert parts.equals(whole)
        if read_manifest(step_of(tmp_path, step)).parent is None:
            bases.append(step)
    assert bases == [1, 2, 4]


def test_a_checkpoint_that_is_written_during_growth_is_no_parent(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown, save, rebase = threading.Event(), saver.save_checkpoint, saver.Saver.rebase

    def waiting(*given: Any, **options: Any) -> Any:
        assert grown.wait(60)
        return save(*given, **options)

    def rebased(self: saver.Saver) -> None:
        rebase(self)
        grown.set()

    monkeypatch.setattr(saver, "save_checkpoint", waiting)
    monkeypatch.setattr(saver.Saver, "rebase", rebased)
    saves = {"incremental": True, "full_every": 100, "asynchronous": True}
    run(0, 1, data, tmp_path / "run", saves, until=3)
    parents = [read_manifest(step_of(tmp_path / "run", step)).parent for step in (1, 2, 3)]
    assert [parent is None for parent in parents] == [True, True, False]


def test_a_grown_table_has_the_rows_of_its_checkpoint_within_the_bound(
    data: Path, alone: Path, tmp_path: Path
) -> None:
    """More than the config begins with, and no more than it allows."""
    path, before = step_of(alone, 5), known(alone, 5)
    for bound, rows in ((1000, 64), (40, 32), (16, 16)):
        own = {**GROWTH, "max_num_embeddings": bound, "every_n_steps": 1000}
        other = write(tmp_path / f"{bound}", SMALL | {"dynamic": RULE | {"growth": own}})
        goes_on(0, 1, other, path, tmp_path / f"out-{bound}")
        assert rows_of(tmp_path / f"out-{bound}", 6) == rows
        with RankTrainer(saving(other, 1, None)) as trainer:
            trainer.restore(path, weights_only=True)
            (state,) = trainer.model.shard_states()
            kept = set(state.ids["id_key"].tolist()) - {-1}
            assert len(state.weight) == rows and kept <= before.keys()
            assert (kept == before.keys()) == (rows == 64)


def scores(rank: int, world_size: int, data: Path, path: str) -> dict[str, float]:
    with RankTrainer(saving(data, world_size, None)) as trainer:
        trainer.restore(path, weights_only=True)
        schema = (data / "schema.json").read_text()
        found = trainer.evaluate(open_data(str(data / "eval"), schema))
        assert found is not None
        # and back to a step before it grew
        trainer.restore(step_of(Path(path).parent, 1), weights_only=True)
        assert trainer.model.plan.rows == {"t_user": GROWN[1]}
        return found


def test_a_grown_checkpoint_is_scored_and_served(
    ranks: RankPool, data: Path, alone: Path, tmp_path: Path
) -> None:
    path = step_of(alone, STEPS)
    wanted = scores(0, 1, data, path)
    assert wanted["auc"] > 0.6
    assert ranks.run(2, scores, data, path)[0] == pytest.approx(wanted, abs=1e-4)
    recipe = spec(data, 1, None).model
    schema = FeatureSchema.from_json(recipe.schema, "the data")
    (table,) = export(path, tmp_path / "out", model=recipe, schema=schema).tables
    assert table.packed.rows == GROWN[STEPS]
    collection = next(iter(Predictor.load(tmp_path / "out").collections.values()))
    assert len(set(collection.packed.ids_of(0).keys.tolist()) - {-1}) > 20


@without_programs()
def publish(rank: int, world_size: int, data: Path, folder: Path) -> None:
    whole = publishing(data, world_size, folder)
    (table,) = find_tables(whole.model)
    plan = plan_for(world_size, {"t_user": column_wise(table, list(range(world_size)))})
    begin_and_run(replace(whole, plan=plan))


@pytest.mark.slow
@without_programs()
def test_servers_follow_a_table_that_grows(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    ranks.run(2, publish, data, tmp_path / "run")
    chain = ChainFolder.of_run(tmp_path / "run")
    places, copied, following = chain.places(), tmp_path / "copied", None
    kinds = [place.kind for place in places]
    assert kinds[1] == kinds[3] == "base" and kinds.count("delta") > 4
    for step, place in enumerate(places, 1):
        shutil.copytree(chain.folder(place), copied / place.name)
        if following is not None and step in (2, 4):
            before = bytes_of(following)
            assert following.refresh() == 0 and following.verdict is Verdict.OTHER
            assert "other tables" in following.trouble and bytes_of(following) == before
            following = None
        if following is None:
            following = Predictor.follow(copied)
        else:
            assert following.refresh() == 1, following.trouble
        export(step_of(tmp_path / "run", step), tmp_path / f"{step}", types="int8")
        assert bytes_of(following) == bytes_of(Predictor.load(tmp_path / f"{step}"))


def until(rank: int, ranks: int, data: Path, going_to: int) -> None:
    """Train to a step after growth, and keep the tables for so many ranks."""
    with RankTrainer(saving(data, ranks, None)) as trainer:
        trainer.going_to = lambda: going_to
        trainer.begin()
        assert trainer.run(lambda: trainer.step >= 5) and trainer.handed_over


def pass_on(rank: int, world_size: int, data: Path, ranks: int) -> int:
    task = HandOverTask(plan=saving(data, ranks, None).plan, ranks=ranks)
    return task.run(context_of(rank, world_size))


def after(rank: int, ranks: int, data: Path, out: Path) -> None:
    whole = saving(data, ranks, out)
    with RankTrainer(replace(whole, handed_over=True, run_began=0)) as trainer:
        assert trainer.begin().in_memory and trainer.model.plan.rows == {"t_user": 64}
        trainer.run()
        assert hand_over._held is None


@pytest.mark.parametrize(("before", "then"), [(2, 3), (3, 1)])
def test_a_grown_table_is_handed_over(
    ranks: RankPool, data: Path, alone: Path, tmp_path: Path, before: int, then: int
) -> None:
    ranks.run(before, until, data, then)
    ranks.run(max(before, then), pass_on, data, then)
    ranks.run(then, after, data, tmp_path / "on")
    check_runs(tmp_path / "on", alone)


def own_loop(context: LoopContext) -> None:
    model = context.shard(context.build())
    optimizer = torch.optim.SGD([p for _, p in model.dense_parameters()], lr=0.1)
    context.track(optimizer)
    for batch in context.batches():
        loss, (_, logits, labels) = model(batch)
        optimizer.zero_grad()
        (loss * context.loss_weight(batch)).backward()
        optimizer.step()
        context.report(loss, logits, labels)


def test_tables_grow_in_a_loop_of_ones_own(data: Path, tmp_path: Path) -> None:
    LoopTask(spec=saving(data, 1, tmp_path / "run"), loop=own_loop).run(context_of(0, 1))
    assert {step: rows_of(tmp_path / "run", step) for step in GROWN} == GROWN


def test_no_table_grows_amid_a_sum_of_gradients(data: Path, tmp_path: Path) -> None:
    whole = saving(data, 1, tmp_path / "run")
    whole = replace(whole, accumulate=3, checkpoint=CheckpointConfig(every_n_steps=3))
    begin_and_run(whole)
    assert [rows_of(tmp_path / "run", step) for step in (3, 6, 9, 12)] == [16, 32, 32, 64]


def test_the_rate_of_a_table_that_has_grown_follows_its_schedule(
    data: Path, tmp_path: Path
) -> None:
    still = (WarmupStage(policy=WarmupPolicy.CONSTANT, value=0.0, max_iters=STEPS),)
    whole = replace(saving(data, 1, tmp_path / "one"), sparse_schedule=still)
    resumed = replace(
        saving(data, 1, tmp_path / "two"),
        sparse_schedule=still,
        resume_from=(step_of(tmp_path / "one", 4),),
    )
    for spec_of_life in (whole, resumed):
        begin_and_run(spec_of_life)
    before = known(tmp_path / "one", 1)
    for run_path in (tmp_path / "one", tmp_path / "two"):
        assert rows_of(run_path, STEPS) == GROWN[STEPS]
        after = known(run_path)
        same = before.keys() & after.keys()
        assert same and all(after[key][2] == before[key][2] for key in same)
