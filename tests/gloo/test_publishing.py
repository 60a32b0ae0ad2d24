"""Runs that publish: training is as without, and what a server follows is what an export gives."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.layout import (
    ShardingPlan,
    TablePlacement,
    column_wise,
    data_parallel,
    grid_shard,
    row_wise,
    table_wise,
)
from rayrec.serve import Predictor, export
from rayrec.serve.chain.folder import ChainFolder
from rayrec.serve.chain.publication import ChainPlace
from rayrec.serve.chain.version_policy import Verdict
from rayrec.train import CheckpointConfig, PublishConfig, RankTrainer, TrainSpec
from tests.clicks import write_clicks
from tests.gloo.shaped import whole_numbers
from tests.gloo.trainers import WithDropout, begin_and_run, spec_of
from tests.ranks import RankPool
from tests.unit.published_worlds import bytes_of
from tests.unit.served_processes import Answers, following, said, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS, EVERY = 500, 20


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clicks")
    write_clicks(folder, rows_eval=301)
    return folder


def mixed_plan(spec: TrainSpec, world_size: int) -> ShardingPlan:
    """Tables by table, by row, by column, as a grid, and replicated, in turn."""
    ranks, half = list(range(world_size)), world_size // 2
    placements = {}
    for number, table in enumerate(spec.plan.tables):
        config = next(t for t in tables_of(spec) if t.name == table)
        layouts = [table_wise(config, number % world_size), row_wise(config, ranks)]
        layouts += [column_wise(config, ranks[:2]), data_parallel(config, ranks)]
        if world_size > 2:
            layouts.append(grid_shard(config, (ranks[:half], ranks[half:])))
        placements[table] = TablePlacement(layouts[number % len(layouts)])
    return ShardingPlan(world_size=world_size, tables=placements)


def tables_of(spec: TrainSpec):
    from rayrec.distributed import table_configs

    with torch.device("meta"):
        return table_configs(spec.model())


def spec_with(folder: Path, world_size: int, run: Path, **options) -> TrainSpec:
    spec = spec_of(folder, world_size)
    spec = replace(spec, plan=mixed_plan(spec, world_size), extras=spec.model.to_extras())
    return replace(spec, run_path=str(run), **options)


def assert_published(run: Path, checkpoint: Path, out: Path, types="int8") -> Predictor:
    """What follows a run has the tables of an export of a checkpoint, byte for byte."""
    export(checkpoint, out, types=types)
    fresh, predictor = Predictor.load(out), Predictor.follow(run)
    assert predictor.verdict is Verdict.CURRENT, predictor.trouble
    assert bytes_of(predictor) == bytes_of(fresh) and predictor.step == fresh.step
    return fresh


def with_and_without(rank: int, world_size: int, folder: Path, out: Path) -> None:
    """The same run with publications and without; then from a checkpoint in its middle on."""
    found = []
    publish = PublishConfig(
        every_n_steps=3, dtype="int4", tables={"t_cat_0": "fp16"}, signing_key=str(out / "key")
    )
    for name, config in (("without", None), ("with", publish)):
        spec = spec_with(folder, world_size, out / name, steps=11, publish=config)
        spec = replace(spec, model=WithDropout(spec.model))
        spec = replace(spec, checkpoint=CheckpointConfig(every_n_steps=5))
        with RankTrainer(spec) as trainer:
            trainer.begin()
            trainer.run()
            found.append(whole_numbers(trainer))
    assert not [key for key in found[0] if not torch.equal(found[0][key], found[1][key])]
    resumed = replace(spec, resume_from=(str(out / "with" / "step-00000005"),), steps=7)
    begin_and_run(resumed)


def test_training_is_as_without_and_a_resumed_run_goes_on_with_a_base(
    data: Path, ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("0f" * 32)
    ranks.run(2, with_and_without, data, tmp_path)
    run = tmp_path / "with"
    names = [f"{kind}-{seq}" for seq, kind in ChainFolder.of_run(run).places()]
    assert names == ["base-1", "delta-2", "delta-3", "delta-4", "base-5", "delta-6"]
    head = ChainFolder.of_run(run).head()
    assert (head.from_step, head.to_step) == (6, 7)
    key = str(tmp_path / "key")
    assert Predictor.follow(run, signing_key=key).weights.name == head.version
    base = Predictor.load(run / "published" / "base-00000005", signing_key=key)
    assert base.step == ChainFolder.of_run(run).read(ChainPlace(5, "base")).to_step


def publishing(rank: int, world_size: int, folder: Path, run: Path) -> None:
    config = PublishConfig(every_n_steps=EVERY, full_every=12, num_to_keep=2)
    spec = spec_with(folder, world_size, run, steps=STEPS, publish=config, report_every_s=0.5)
    with RankTrainer(spec) as trainer:
        trainer.begin()
        trainer.run(on_step=lambda step: time.sleep(0.08))  # so that the server keeps up


def test_a_server_follows_four_ranks_of_a_mixed_plan_for_500_steps(
    data: Path, ranks: RankPool, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    training = threading.Thread(
        target=ranks.run, args=(4, publishing, data, run), kwargs={"timeout_s": 1200}
    )
    training.start()
    wait_for(lambda: ChainFolder.of_run(run).places())
    asked = pq.read_table(data / "eval").slice(0, 9).drop_columns(["label"])
    own = Predictor.follow(run)
    wanted = {own.weights.name: own.predict(asked).numpy()}

    def note_versions() -> bool:
        while (version := own.follower.look()) is not None:
            own.take(version)
            wanted[version.name] = own.predict(asked).numpy()
        return not training.is_alive()

    with following(run) as server, Answers(server, asked) as load:
        wait_for(note_versions, 1200)
        training.join()
        note_versions()
        wait_for(lambda: said(server)["version"] == own.weights.name)
        seen = len(load.told)
        wait_for(lambda: len(load.told) > seen + 100)
    assert not load.errors
    for version, step, scores in load.told:
        assert version.startswith(f"{step}-")
        np.testing.assert_allclose(scores, wanted[version], rtol=1e-5, atol=1e-6)
    assert len({version for version, _, _ in load.told}) > 5
    fresh = assert_published(run, run / f"step-{STEPS:08d}", tmp_path / "fresh")
    assert bytes_of(own) == bytes_of(fresh)
    assert load.told[-1][1] == STEPS
    np.testing.assert_array_equal(own.predict(asked).numpy(), fresh.predict(asked).numpy())
