"""Runs with a dynamic table on real ranks: saved, resumed on other ranks, evaluated, and refused
where their tables do not fit.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.checkpoint import CheckpointManager, load_table
from rayrec.cli.main import main
from rayrec.driver.planning import find_tables
from rayrec.errors import CheckpointError, ConfigError
from rayrec.layout import ShardingPlan, TablePlacement, table_wise
from rayrec.runs.inputs import open_data
from rayrec.train import CheckpointConfig, RankTrainer, TrainSpec
from tests.gloo.trainers import spec_of
from tests.ranks import RankPool

ROWS, STEPS, HALF = 1500, 12, 6
RULE = {"blocks": 4, "admission_threshold": 2, "ttl_steps": 5}
TABLE = {"name": "t_user", "num_embeddings": 64, "embedding_dim": 8, "features": ["user"]}


def write(folder: Path, table: dict[str, Any]) -> Path:
    """Clicks of users with numbers of 64 bits, whose favourites move on."""
    rng = np.random.default_rng(0)
    names = rng.integers(-(2**63), 2**63 - 1, 400)
    at = (np.arange(ROWS) // 10 + rng.zipf(1.5, ROWS)) % 400
    label = (names[at] % 3 == 0).astype(np.int8)
    rows = pa.table({"label": label, "d": rng.random(ROWS), "user": names[at]})
    for part in ("train", "eval"):
        (folder / part).mkdir(parents=True)
        pq.write_table(rows, folder / part / "part.parquet")
    features = [{"name": "user", "column": "user"}]
    schema = {"label": "label", "dense": ["d"], "features": features, "tables": [table]}
    (folder / "schema.json").write_text(json.dumps(schema))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("users") / "data", TABLE | {"dynamic": RULE})


def spec(data: Path, world_size: int, run: Path | None) -> TrainSpec:
    saves = CheckpointConfig(every_n_steps=HALF) if run else CheckpointConfig(at_end=False)
    return replace(
        spec_of(data, world_size),
        steps=STEPS,
        shuffle=False,
        run_path=str(run) if run else None,
        checkpoint=saves,
    )


def run(rank: int, world_size: int, data: Path, folder: Path) -> None:
    with RankTrainer(spec(data, world_size, folder)) as trainer:
        trainer.begin()
        trainer.run()


def run_on_the_last(rank: int, world_size: int, data: Path, folder: Path) -> None:
    """Rank 0, which writes the manifest, has no row of the table."""
    whole = spec(data, world_size, folder)
    layout = table_wise(find_tables(whole.model)[0], world_size - 1)
    plan = ShardingPlan(world_size=world_size, tables={"t_user": TablePlacement(layout)})
    with RankTrainer(replace(whole, plan=plan)) as trainer:
        trainer.begin()
        trainer.run()


def goes_on(rank: int, world_size: int, data: Path, folder: Path, out: Path) -> None:
    path = CheckpointManager(str(folder)).path(HALF)
    with RankTrainer(replace(spec(data, world_size, out), resume_from=(path,))) as trainer:
        trainer.begin()
        assert trainer.step == HALF
        trainer.run()


def scores(rank: int, world_size: int, data: Path, folder: Path) -> dict[str, float]:
    with RankTrainer(spec(data, world_size, None)) as trainer:
        trainer.restore(CheckpointManager(str(folder)).path(STEPS), weights_only=True)
        schema = (data / "schema.json").read_text()
        found = trainer.evaluate(open_data(str(data / "eval"), schema))
        assert found is not None
        return found


def known(folder: Path, step: int = STEPS) -> dict[int, tuple[Any, ...]]:
    """What a checkpoint says of every id that has a row: steps, counts, row, state."""
    columns = load_table(CheckpointManager(str(folder)).path(step), "t_user").to_pydict()
    names = ("id_key", "id_seen", "id_hits", "weight", "momentum1")
    rows = zip(*(columns[name] for name in names), strict=True)
    return {key: rest for key, *rest in rows if key != -1}  # type: ignore[misc]


def check_same(found: dict[int, tuple[Any, ...]], wanted: dict[int, tuple[Any, ...]]) -> None:
    assert found.keys() == wanted.keys() and len(wanted) > 20
    for key, (seen, count, row, state) in wanted.items():
        assert found[key][:2] == [seen, count]
        assert found[key][2] == pytest.approx(row, rel=1e-4, abs=1e-6)
        assert found[key][3] == pytest.approx(state, rel=1e-3, abs=1e-9)


def test_a_run_is_the_same_on_any_ranks_and_goes_on_on_others(
    ranks: RankPool, data: Path, tmp_path: Path
) -> None:
    run(0, 1, data, tmp_path / "one")
    ranks.run(2, run, data, tmp_path / "two")
    wanted = known(tmp_path / "one")
    assert wanted.keys() != known(tmp_path / "one", HALF).keys(), "ids come and go"
    check_same(known(tmp_path / "two"), wanted)
    goes_on(0, 1, data, tmp_path / "two", tmp_path / "two-one")
    check_same(known(tmp_path / "two-one"), wanted)
    ranks.run(3, goes_on, data, tmp_path / "one", tmp_path / "one-three")
    check_same(known(tmp_path / "one-three"), wanted)
    ranks.run(2, run_on_the_last, data, tmp_path / "last")
    goes_on(0, 1, data, tmp_path / "last", tmp_path / "last-one")
    check_same(known(tmp_path / "last-one"), wanted)
    alone = scores(0, 1, data, tmp_path / "one")
    assert alone["auc"] > 0.6
    assert ranks.run(2, scores, data, tmp_path / "two")[0] == pytest.approx(alone, abs=1e-4)


def test_other_blocks_or_a_static_table_are_refused(data: Path, tmp_path: Path) -> None:
    run(0, 1, data, tmp_path / "run")
    path = CheckpointManager(str(tmp_path / "run")).path(STEPS)
    for name, table, error, says in (
        ("blocks", TABLE | {"dynamic": RULE | {"blocks": 8}}, ConfigError, "other blocks than 8"),
        ("static", TABLE, CheckpointError, "saved as one that is dynamic, and the model's is not"),
    ):
        check_refused(write(tmp_path / name, table), path, error, says)


def check_refused(data: Path, path: str, error: type[Exception], says: str) -> None:
    chosen = replace(spec(data, 1, None), init_from=path)
    with RankTrainer(chosen) as trainer, pytest.raises(error, match=says):
        trainer.begin()
        trainer.run()


def test_counts_of_candidates_that_a_checkpoint_lacks_are_told_as_such(
    data: Path, tmp_path: Path
) -> None:
    once = write(tmp_path / "once", TABLE | {"dynamic": RULE | {"admission_threshold": 1}})
    run(0, 1, once, tmp_path / "run")
    path = CheckpointManager(str(tmp_path / "run")).path(STEPS)
    check_refused(data, path, CheckpointError, "saved with admission_threshold=1, without counts")


def test_what_is_not_there_yet_is_said_in_one_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--set", "model.dense_layers=[8]", "--set", "run.steps=2"]
    line = ["train", "--data", str(data), "--local", "--checkpoint-dir", str(tmp_path / "run")]
    assert main([*line, *small]) == 0
    assert "table 't_user': " in capsys.readouterr().out
    capsys.readouterr()
    incremental = ["--set", "run.checkpoint.incremental=true"]
    other = [*line[:-1], str(tmp_path / "other"), *small, *incremental]
    export = ["export", f"{tmp_path}/run@latest", str(tmp_path / "served"), "--data", str(data)]
    for words, says in (
        (other, "save whole checkpoints, without incremental=True"),
        (export, "is dynamic, and such tables are not packed or served yet"),
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1
