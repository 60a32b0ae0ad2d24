"""The table doctor on runs that trained: its counts are those of the data and of the driver."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.checkpoint import CheckpointManager, load_table, read_manifest
from rayrec.cli.main import main
from rayrec.doctor import TableHealth, examine
from rayrec.dynamic.columns import NO_KEY
from tests.clicks import write_clicks
from tests.dynamic_clicks import RULE, TABLE, write

SMALL = ["--set", "model.dense_layers=[8]", "--set", "run.global_batch_size=100"]


def train(folder: Path, *words: str) -> str:
    """Train on the data of a folder; returns the run."""
    run = str(folder / "run")
    words = ("--data", str(folder / "data"), "--checkpoint-dir", run, *SMALL, *words)
    assert main(["train", "--local", *words]) == 0
    return run


def keys_at(run: str, step: int) -> set[int]:
    table = load_table(CheckpointManager(run).path(step), "t_user")
    return set(table["id_key"].to_pylist()) - {NO_KEY}


def test_rows_of_ids_that_never_came_are_as_they_began(tmp_path: Path) -> None:
    write_clicks(tmp_path / "data")
    run = train(tmp_path, "--set", "run.epochs=1", "--set", "model.init_bound=0.3")
    report = examine(run)
    rows = pq.read_table(tmp_path / "data" / "train")
    assert report.kind == "checkpoint" and len(report.tables) == 5
    for table in report.tables:
        column = rows[table.name.removeprefix("t_")].combine_chunks()
        values = column.flatten() if pa.types.is_list(column.type) else column
        unseen = table.rows - len(values.unique())
        assert table.dead_rows == table.first_rows == unseen, table.name
        assert table.unmoved_rows == 0 and table.heat == "squared gradients"
    assert any(table.dead_rows for table in report.tables)


def test_another_seed_is_found_out(tmp_path: Path) -> None:
    write_clicks(tmp_path / "data")
    run = train(tmp_path, "--set", "run.epochs=1", "--set", "run.seed=1")
    other = tmp_path / "other"
    words = ["--data", str(tmp_path / "data"), "--checkpoint-dir", str(other), *SMALL]
    words += ["--set", f"run.init_from={run}@latest", "--set", "run.steps=1"]
    assert main(["train", "--local", *words]) == 0
    found = [table for table in examine(str(other)).tables if table.dead_rows]
    assert found and all(table.first_rows is None for table in found)
    assert all("init_from" in table.not_told["first values"] for table in found)


def test_a_hot_id_of_a_third_of_the_rows_is_named(tmp_path: Path) -> None:
    write(tmp_path / "data", TABLE | {"num_embeddings": 4096, "dynamic": {}})
    file = tmp_path / "data" / "train" / "part.parquet"
    rows = pq.read_table(file)
    users = rows["user"].to_numpy().copy()
    users[np.arange(len(users)) % 10 < 3] = 77
    place = rows.column_names.index("user")
    pq.write_table(rows.set_column(place, "user", pa.array(users)), file)
    report = examine(train(tmp_path, "--set", "run.epochs=2"))
    (table,) = report.tables
    assert table.hottest_id == 77 and table.hottest_1 == pytest.approx(0.3)
    assert table.in_use == len(set(users.tolist())) and table.heat == "look-ups"
    counts = np.sort(np.unique(users, return_counts=True)[1])[::-1]
    assert table.hottest_10 == pytest.approx(counts[:10].sum() / len(users))
    found = {one.kind: one.says for one in report.findings}
    assert found["hot id"] == "id 77 has 30% of all look-ups"
    assert "refused ids" not in found and table.refused == 0 and table.unmoved_rows == 0


@pytest.fixture(scope="module")
def drifting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a small dynamic table, with checkpoints at steps 5, 10 and 15."""
    folder = tmp_path_factory.mktemp("drift")
    write(folder / "data", TABLE | {"dynamic": {"blocks": 4}})
    train(
        folder,
        "--set", "run.epochs=1", "--set", "run.checkpoint.every_n_steps=5",
        "--set", "run.checkpoint.num_to_keep=3",
    )  # fmt: skip
    return folder


def test_ids_that_came_back_after_they_lost_their_row(drifting: Path) -> None:
    run = str(drifting / "run")
    (table,) = examine(run).tables
    first, second, third = (keys_at(run, step) for step in (5, 10, 15))
    assert table.lost_ids == len(first - second) > 0
    assert table.returned_ids == len((first - second) & third)
    (earlier,) = examine(CheckpointManager(run).path(10)).tables
    assert earlier.lost_ids is None and "three checkpoints" in earlier.not_told["eviction regret"]


def test_fill_and_ages_are_those_of_the_ids(drifting: Path) -> None:
    run = str(drifting / "run")
    path = CheckpointManager(run).path(15)
    (found,), whole = examine(path).tables, load_table(path, "t_user")
    key, seen = whole["id_key"].to_numpy(), whole["id_seen"].to_numpy()
    now = read_manifest(path).extras["id_steps"]["t_user"]
    used = key != NO_KEY
    ages = now - seen[used]
    assert found.in_use == used.sum() and found.blocks == 4
    assert found.full_blocks == (used.reshape(4, 16).sum(1) == 16).sum()
    assert found.idle_rows == (2 * ages > now).sum()
    assert found.age_median is not None
    assert found.age_median <= np.sort(ages)[len(ages) // 2] < found.age_median * 1.126 + 1e-9


@pytest.mark.parametrize("eviction", ["none", "step"])
def test_counts_of_ids_are_those_that_the_run_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], eviction: str
) -> None:
    write(tmp_path / "data", TABLE | {"dynamic": {"blocks": 4, "eviction": eviction}})
    run = train(tmp_path, "--set", "run.epochs=1")
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if "for want of room" in line]
    admitted, evicted, refused, unknown, looked_up = (
        int(text.replace(",", ""))
        for text in re.findall(r"([\d,]+) (?:were|evicted|refused|of|look)", line)
    )
    report = examine(run)
    (table,) = report.tables
    got = table.admitted, table.evicted, table.refused, table.unknown, table.looked_up
    assert got == (admitted, evicted, refused, unknown, looked_up)
    kinds = {one.kind for one in report.findings}
    assert "refused ids" in kinds and refused > 0
    assert (evicted > 0) == (eviction == "step") and admitted - evicted == table.in_use
    # a copy of the checkpoint is no part of the run
    copy = tmp_path / "copy"
    Path(report.path).rename(copy)
    (alone,) = examine(copy).tables
    assert alone.refused is None and "no events" in alone.not_told["refused ids"]


def test_an_artifact_of_a_dynamic_table_has_the_rows_of_its_ids(tmp_path: Path) -> None:
    write(tmp_path / "data", TABLE | {"dynamic": RULE | {"ttl_steps": 1}})
    run = train(tmp_path, "--set", "run.epochs=1")
    assert main(["export", f"{run}@latest", str(tmp_path / "served"), "--dtype", "fp32"]) == 0
    (packed,), (trained,) = examine(tmp_path / "served").tables, examine(run).tables
    assert isinstance(packed, TableHealth) and packed.zero_rows == 0 and packed.rows == 64
    # rows of ids whose time is over are not in use, though they still lie there
    newest = CheckpointManager(run).steps()[-1]
    assert 0 < packed.in_use == trained.in_use < len(keys_at(run, newest))
    assert trained.full_blocks is not None and trained.full_blocks < 4
