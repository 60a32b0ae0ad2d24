"""Several tasks through the driver: labels are checked as their own task needs them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.driver import Driver, RunConfig, ScalingConfig
from rayrec.driver.specs import check_values
from rayrec.errors import InputError
from rayrec.runs.inputs import open_data
from rayrec.spec.task import Task
from tests.gloo.shaped import TASKS, ManyTasks, write_shaped


def driver_of(folder: Path) -> Driver:
    schema = (folder / "many.json").read_text()
    run = RunConfig(global_batch_size=128, steps=3, tasks=TASKS, progress="off")
    return Driver(
        ManyTasks(schema),
        open_data(str(folder / "train"), schema),
        ScalingConfig(num_workers=0),
        run,
        eval_data=open_data(str(folder / "eval"), schema),
    )


def test_a_rating_need_not_be_0_or_1(shaped: Path) -> None:
    scores = driver_of(shaped).fit().metrics
    assert {"click/auc", "genre/cross_entropy", "rating/rmse"} <= set(scores)


def test_the_label_of_a_binary_task_is_checked_by_its_place(shaped: Path, tmp_path: Path) -> None:
    """The task is called "click" and its column is not: they go together by their places."""
    write_shaped(tmp_path)
    label = json.loads((shaped / "many.json").read_text())["label"][0]
    assert label != TASKS[0].name
    file = sorted((tmp_path / "eval").glob("*.parquet"))[0]
    table = pq.read_table(file)
    spoiled = pa.array([2.0] + [1.0] * (table.num_rows - 1), pa.float32())
    place = table.column_names.index(label)
    pq.write_table(table.set_column(place, label, spoiled), file)
    with pytest.raises(InputError, match=rf"label column '{label}' holds 2 in row 0"):
        driver_of(tmp_path).fit()


def test_the_column_of_a_metric_is_missed_before_ranks_start(shaped: Path) -> None:
    schema = (shaped / "many.json").read_text()
    data = open_data(str(shaped / "train"), schema)
    feature = data.schema.feature_names()[0]
    check_values(data, [Task(name="click", metrics=(f"gauc@{feature}",)), *TASKS[1:]])
    with pytest.raises(InputError, match="Gauc reads column 'usr'; the schema has the groups"):
        check_values(data, [Task(name="click", metrics=("gauc@usr",)), *TASKS[1:]])
