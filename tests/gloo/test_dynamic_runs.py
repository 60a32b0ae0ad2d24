"""Runs with a dynamic table on real ranks: saved, resumed on other ranks, evaluated, and refused
where their tables do not fit.
"""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.checkpoint import CheckpointManager, load_table, read_manifest
from rayrec.comm.kept_memory import end_keepers
from rayrec.driver.planning import find_tables
from rayrec.errors import CheckpointError
from rayrec.layout import table_wise
from rayrec.runs.inputs import open_data
from rayrec.train import CheckpointConfig, RankTrainer
from rayrec.train.config import SyncPoints
from tests.dynamic_clicks import RULE, TABLE, TIMED, write
from tests.gloo.dynamic_spec import HALF, STEPS, check_same, known, spec, table_of
from tests.gloo.trainers import begin_and_run
from tests.ranks import RankPool
from tests.worlds import plan_for

# one worker process makes the runs that several tests look at
pytestmark = pytest.mark.xdist_group("dynamic runs")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("users") / "data", TABLE | {"dynamic": RULE})


@pytest.fixture(scope="module", params=[RULE, TIMED], ids=["steps", "time"])
def aged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same clicks, whose ids grow old by steps or by time."""
    return write(tmp_path_factory.mktemp("aged") / "data", TABLE | {"dynamic": request.param})


def run(rank: int, world_size: int, data: Path, folder: Path) -> None:
    begin_and_run(spec(data, world_size, folder))


@pytest.fixture(scope="module")
def on_two(ranks: RankPool, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `data` on two ranks; no test writes to it."""
    folder = tmp_path_factory.mktemp("on-two") / "run"
    ranks.run(2, run, data, folder)
    return folder


@pytest.fixture(scope="module")
def aged_on_two(ranks: RankPool, aged: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `aged` on two ranks; no test writes to it."""
    folder = tmp_path_factory.mktemp("aged-on-two") / "run"
    ranks.run(2, run, aged, folder)
    return folder


def run_on_the_last(rank: int, world_size: int, data: Path, folder: Path) -> None:
    """Rank 0, which writes the manifest, has no row of the table."""
    whole = spec(data, world_size, folder)
    layout = table_wise(find_tables(whole.model)[0], world_size - 1)
    plan = plan_for(world_size, {"t_user": layout})
    begin_and_run(replace(whole, plan=plan))


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


def places_of(folder: Path) -> list[list[Any]]:
    """Whose every row is, and whose every place of a candidate, after a run."""
    columns = load_table(CheckpointManager(str(folder)).path(STEPS), "t_user")
    return [columns[name].to_pylist() for name in columns.column_names if name.endswith("_key")]


def test_a_run_is_the_same_on_any_ranks_and_goes_on_on_others(
    ranks: RankPool, aged: Path, aged_on_two: Path, tmp_path: Path
) -> None:
    run(0, 1, aged, tmp_path / "one")
    wanted = known(tmp_path / "one")
    assert wanted.keys() != known(tmp_path / "one", HALF).keys(), "ids come and go"
    check_same(known(aged_on_two), wanted)
    goes_on(0, 1, aged, aged_on_two, tmp_path / "two-one")
    check_same(known(tmp_path / "two-one"), wanted)
    ranks.run(3, goes_on, aged, tmp_path / "one", tmp_path / "one-three")
    check_same(known(tmp_path / "one-three"), wanted)
    ranks.run(2, run_on_the_last, aged, tmp_path / "last")
    goes_on(0, 1, aged, tmp_path / "last", tmp_path / "last-one")
    check_same(known(tmp_path / "last-one"), wanted)
    folders = "one", "two-one", "one-three", "last-one"
    places = [places_of(folder) for folder in (aged_on_two, *map(tmp_path.joinpath, folders))]
    assert places.count(places[0]) == len(places)
    alone = scores(0, 1, aged, tmp_path / "one")
    assert alone["auc"] > 0.6
    assert ranks.run(2, scores, aged, aged_on_two)[0] == pytest.approx(alone, abs=1e-4)


def test_a_static_table_is_refused(on_two: Path, tmp_path: Path) -> None:
    path = CheckpointManager(str(on_two)).path(STEPS)
    says = "saved as one that is dynamic, and the model's is not"
    check_refused(write(tmp_path / "static", TABLE), path, CheckpointError, says)


def resumed(rank: int, world_size: int, data: Path, path: str, out: Path, steps: int) -> list[str]:
    """Go on from a checkpoint, and save at its end; the lines that it told."""
    lines: list[str] = []
    whole = replace(spec(data, world_size, out), resume_from=(path,), steps=steps)
    whole = replace(whole, checkpoint=CheckpointConfig(every_n_steps=1))
    with RankTrainer(whole) as trainer:
        trainer.begin(lines.append)
        trainer.save(str(out / "begun"))
        trainer.run()
    return lines


@pytest.mark.parametrize(("rows", "blocks"), [(256, 4), (512, 32), (64, 1), (32, 8), (16, 2)])
def test_a_table_goes_on_with_other_rows_and_blocks(
    ranks: RankPool, on_two: Path, tmp_path: Path, rows: int, blocks: int
) -> None:
    path = CheckpointManager(str(on_two)).path(HALF)
    other = TABLE | {"num_embeddings": rows, "dynamic": RULE | {"blocks": blocks}}
    clicks = write(tmp_path / "other", other)
    before = known(on_two, HALF)
    told = resumed(0, 1, clicks, path, tmp_path / "one", HALF + 2)
    kept = table_of(tmp_path / "one" / "begun")
    assert kept.items() <= before.items() and len(kept) <= rows
    fresh = {key for key, (seen, *_) in before.items() if seen + 5 >= HALF}
    assert kept.keys() <= fresh
    lost = fresh - kept.keys()
    assert bool(lost) == (rows < 64)
    line = f"table 't_user': {len(lost)} ids of the checkpoint have no row, since blocks are full"
    assert (line in told) == bool(lost)
    ranks.run(3, resumed, clicks, path, tmp_path / "three", HALF + 2)
    assert table_of(tmp_path / "three" / "begun") == kept
    check_same(known(tmp_path / "three", HALF + 2), known(tmp_path / "one", HALF + 2), least=3)


def clocks_of(path: str | Path) -> dict[str, dict[str, int]]:
    extras = read_manifest(str(path)).extras
    return {name: extras[name] for name in ("id_steps", "id_times") if name in extras}


@pytest.mark.parametrize("size", [64, 256])
def test_a_table_that_counted_steps_goes_on_by_time_and_back(
    ranks: RankPool, data: Path, on_two: Path, tmp_path: Path, size: int
) -> None:
    path = CheckpointManager(str(on_two)).path(HALF)
    clicks = write(tmp_path / "timed", TABLE | {"num_embeddings": size, "dynamic": TIMED})
    before = known(on_two, HALF)
    ranks.run(2, resumed, clicks, path, tmp_path / "two", HALF + 3)
    begun = table_of(tmp_path / "two" / "begun")
    assert {key: told[:4] for key, told in begun.items()} == before
    assert {told[4] for told in begun.values()} == {-1}, "no time was told yet"
    rows = open_data(str(clicks / "train"), (clicks / "schema.json").read_text())
    told = [batch.sparse_features.time for batch in rows.loader(0, 1, 128, shuffle=False)]
    assert told != sorted(told), "some batches are late"
    times = list(accumulate(told[HALF : HALF + 3], max))
    end = CheckpointManager(str(tmp_path / "two")).path(HALF + 3)
    assert clocks_of(end) == {"id_steps": {"t_user": HALF + 3}, "id_times": {"t_user": times[-1]}}
    after = table_of(end)
    stayed = {key for key, (*told, _) in after.items() if told[0] <= HALF}
    assert stayed and {after[key][4] for key in stayed} == {times[0]}
    assert all(told[4] == times[max(told[0] - HALF, 1) - 1] for told in after.values())
    resumed(0, 1, clicks, path, tmp_path / "one", HALF + 3)
    check_same(known(tmp_path / "one", HALF + 3), after)
    # and back to steps, in another size for one of the two
    resumed(0, 1, data, end, tmp_path / "back", HALF + 4)
    again = table_of(tmp_path / "back" / "begun")
    assert len(again) > 20 and again.keys() <= after.keys()
    assert all(told == after[key][:4] for key, told in again.items())
    assert "id_times" not in clocks_of(tmp_path / "back" / "begun")


def check_refused(data: Path, path: str, error: type[Exception], says: str) -> None:
    chosen = replace(spec(data, 1, None), init_from=path)
    with RankTrainer(chosen) as trainer, pytest.raises(error, match=says):
        trainer.begin()
        trainer.run()


def test_counts_of_candidates_that_a_checkpoint_lacks_are_told_as_such(
    data: Path, tmp_path: Path
) -> None:
    at_once = {"admission_threshold": 1, "counter_capacity": None}
    once = write(tmp_path / "once", TABLE | {"dynamic": RULE | at_once})
    run(0, 1, once, tmp_path / "run")
    path = CheckpointManager(str(tmp_path / "run")).path(STEPS)
    check_refused(data, path, CheckpointError, "saved with admission_threshold=1, without counts")


def run_with_increments(rank: int, world_size: int, data: Path, folder: Path) -> None:
    whole = spec(data, world_size, folder)
    saves = CheckpointConfig(every_n_steps=2, incremental=True)
    begin_and_run(replace(whole, checkpoint=saves))


def test_increments_hold_all_that_whole_checkpoints_do(
    ranks: RankPool, aged: Path, aged_on_two: Path, tmp_path: Path
) -> None:
    ranks.run(2, run_with_increments, aged, tmp_path / "parts")
    for step in (HALF, STEPS):
        folders = aged_on_two, tmp_path / "parts"
        paths = [CheckpointManager(str(folder)).path(step) for folder in folders]
        whole, parts = (load_table(path, "t_user") for path in paths)
        assert parts.equals(whole)
    ranks.run(3, goes_on, aged, tmp_path / "parts", tmp_path / "three")
    check_same(known(tmp_path / "three"), known(aged_on_two))


class Lost(Exception):
    """A rank fails."""


def falls(
    rank: int, world_size: int, data: Path, folder: Path, name: str, steps: list[int]
) -> list[int]:
    """Train until a step at which all ranks fail, and again; the steps at which it went on."""
    points, began = SyncPoints(every_n_steps=2, name=name), []
    for life, fall in enumerate([*steps, None]):
        whole = spec(data, world_size, folder)
        whole = replace(whole, checkpoint=CheckpointConfig(), sync_points=points)

        def at_step(step: int, fall: int | None = fall) -> None:
            if step == fall:
                raise Lost

        trainer = RankTrainer(replace(whole, run_began=0 if life else None))
        began.append(trainer.begin().step)
        try:
            trainer.run(on_step=at_step)
        except Lost:
            trainer.close(wait=False)
        finally:
            if fall is None:
                trainer.close()
                end_keepers()
    return began


def test_sync_points_put_ids_back(
    ranks: RankPool, aged: Path, aged_on_two: Path, tmp_path: Path
) -> None:
    name = uuid.uuid4().hex
    (began, _) = ranks.run(2, falls, aged, tmp_path / "shaken", name, [1, 5, 7, 11])
    assert began == [0, 0, 4, 6, 10]
    calm, shaken = (
        load_table(CheckpointManager(str(folder)).path(STEPS), "t_user")
        for folder in (aged_on_two, tmp_path / "shaken")
    )
    assert shaken.equals(calm)


def two_tables(folder: Path, data: Path, second: dict[str, Any]) -> Path:
    """The same clicks, with a second table of which the first is not the last."""
    shutil.copytree(data, folder)
    schema = json.loads((data / "schema.json").read_text())
    place = {"name": "day", "column": "day"}
    schema["features"].append(place)
    table = {"name": "t_day", "num_embeddings": 40, "embedding_dim": 8, "features": ["day"]}
    schema["tables"].insert(0, table | second)
    (folder / "schema.json").write_text(json.dumps(schema))
    for part in ("train", "eval"):
        rows = pq.read_table(folder / part / "part.parquet")
        days = pa.array(np.arange(len(rows)) // 10 % 40)
        pq.write_table(rows.append_column("day", days), folder / part / "part.parquet")
    return folder


@pytest.mark.parametrize("first", [True, False])
def test_a_second_table_becomes_dynamic_and_the_clock_goes_on(
    data: Path, tmp_path: Path, first: bool
) -> None:
    static = two_tables(tmp_path / "static", data, {})
    rule = {"blocks": 1, "ttl_steps": 3}
    dynamic = two_tables(tmp_path / "dynamic", data, {"dynamic": rule})
    if not first:
        for folder in (static, dynamic):
            path = folder / "schema.json"
            schema = json.loads(path.read_text())
            path.write_text(json.dumps(schema | {"tables": schema["tables"][::-1]}))
    run(0, 1, static, tmp_path / "run")
    path = CheckpointManager(str(tmp_path / "run")).path(HALF)
    resumed(0, 1, dynamic, path, tmp_path / "on", HALF + 1)
    saved = read_manifest(CheckpointManager(str(tmp_path / "on")).path(HALF + 1))
    assert saved.extras["id_steps"] == {"t_user": HALF + 1, "t_day": HALF + 1}
    begun = load_table(str(tmp_path / "on" / "begun"), "t_day").to_pydict()
    before = load_table(path, "t_day").to_pydict()
    assert set(begun["id_seen"]) == {HALF} and set(begun["id_hits"]) == {0}
    weights = dict(zip(begun["id_key"], begun["weight"], strict=True))
    assert weights == dict(zip(before["row"], before["weight"], strict=True))
    after = load_table(CheckpointManager(str(tmp_path / "on")).path(HALF + 1), "t_day").to_pydict()
    known = dict(zip(after["id_key"], after["weight"], strict=True))
    assert len(known) == 40 and sum(known[key] == weights[key] for key in known) > 10
