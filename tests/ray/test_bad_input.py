"""Every kind of bad input, given to jobs.train_dlrm on two real ranks: a typed error that names the
place, and never a hang.

Where each check is made, and every variant of it, is tested beside the code: data/test_convert,
data/test_schema, data/test_files, unit/test_layout_*, unit/test_planner_*. Here each kind goes the
whole way that a user's mistake goes, once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import train_dlrm
from rayrec.data import FeatureSchema
from rayrec.data.synthetic import SyntheticPaths
from rayrec.errors import ConfigError, InputError, PlanError
from rayrec.layout import ShardingPlan, TablePlacement, table_wise
from tests.ray.worlds import CLUSTER_CPUS, some
from tests.words import sets

pytestmark = pytest.mark.usefixtures("cluster")
BAD_ROW = 4321
SMALL = sets("run.global_batch_size=512", "model.dense_layers=[16]", "model.over_layers=[16]")


class Given(NamedTuple):
    """Copies of good data, to be spoilt: one Parquet file and a schema."""

    train: Path
    file: Path
    schema: Path


@pytest.fixture
def given(clicks: SyntheticPaths, tmp_path: Path) -> Given:
    (source,) = clicks.train.glob("*.parquet")
    train = tmp_path / "train"
    train.mkdir()
    (train / "part-00000.parquet").write_bytes(source.read_bytes())
    (tmp_path / "schema.json").write_text(clicks.schema.read_text())
    return Given(train, train / "part-00000.parquet", tmp_path / "schema.json")


def run(given: Given, *options: str) -> None:
    """Train two epochs of the spoilt data."""
    paths = sets(f"data.train={given.train}", f"data.schema={given.schema}")
    train_dlrm.main([*paths, *SMALL, "--ranks", "2", *sets("run.epochs=2"), *options])


def spoil_rows(
    given: Given, column: str, spoil: Callable[[list[Any]], None], kind: pa.DataType | None = None
) -> None:
    """Change a column's values.

    Row groups become small, so that rows must be counted across them. They have no statistics, by
    which the driver would find most of this before training.
    """
    table = pq.read_table(given.file)
    values = table[column].to_pylist()
    spoil(values)
    array = pa.array(values, kind or table[column].type)
    pq.write_table(
        table.set_column(table.column_names.index(column), column, array),
        given.file,
        row_group_size=1000,
        write_statistics=False,
    )


def put(value: Any) -> Callable[[list[Any]], None]:
    """Write a value into the bad row."""

    def spoil(values: list[Any]) -> None:
        values[BAD_ROW] = [value] if isinstance(values[BAD_ROW], list) else value

    return spoil


ROWS = {
    "id out of range": (
        "cat_1",
        put(200),
        None,
        r"'cat_1' \(column 'cat_1'\) holds id 200 in row 4321 of "
        r"'.*part-00000\.parquet'.*\[0, 200\)",
    ),
    "id out of range in a list": (
        "cat_5",
        put(10**6),
        None,
        r"'cat_5' .*holds id 1000000 in row 4321 of '.*part-00000\.parquet'",
    ),
    "negative id": (
        "cat_0",
        put(-7),
        None,
        r"'cat_0' .*holds id -7 in row 4321 of '.*part-00000\.parquet'",
    ),
    "nan label": (
        "label",
        put(math.nan),
        pa.float32(),
        r"label column 'label' holds nan in row 4321 of '.*part-00000\.parquet'",
    ),
    "label 2": (
        "label",
        put(2),
        None,
        r"label column 'label' holds 2 in row 4321 of '.*part-00000\.parquet'",
    ),
    "nan dense": (
        "d_0",
        put(math.nan),
        None,
        r"dense column 'd_0' holds nan in row 4321 of '.*part-00000\.parquet'",
    ),
}


@pytest.mark.parametrize("case", some(ROWS, []))
def test_a_bad_row_in_mid_training_is_the_cause_on_the_rank_that_read_it(
    given: Given, case: str
) -> None:
    column, spoil, kind, words = ROWS[case]
    spoil_rows(given, column, spoil, kind)
    with pytest.raises(InputError, match=rf"{words}.*found by rank [01] of 2 on "):
        run(given)


def without_column(given: Given) -> tuple[str, ...]:
    pq.write_table(pq.read_table(given.file).drop_columns(["cat_2"]), given.file)
    return ()


def words_for_ids(given: Given) -> tuple[str, ...]:
    table = pq.read_table(given.file)
    words = pa.array([f"w{i}" for i in range(table.num_rows)])
    pq.write_table(table.set_column(table.column_names.index("cat_2"), "cat_2", words), given.file)
    return ()


def empty_folder(given: Given) -> tuple[str, ...]:
    given.file.unlink()
    return ()


def truncated(given: Given) -> tuple[str, ...]:
    given.file.write_bytes(given.file.read_bytes()[:-100])
    return ()


def changed_schema(change: Callable[[dict[str, Any]], None]) -> Callable[[Given], tuple[str, ...]]:
    def spoil(given: Given) -> tuple[str, ...]:
        raw = json.loads(given.schema.read_text())
        change(raw)
        given.schema.write_text(json.dumps(raw))
        return ()

    return spoil


def table_twice(raw: dict[str, Any]) -> None:
    raw["tables"][1]["name"] = raw["tables"][0]["name"]


def giant_table(raw: dict[str, Any]) -> None:
    raw["tables"][3]["num_embeddings"] = 10**12


def changed_plan(
    change: Callable[[dict[str, Any]], None], ranks: int = 2
) -> Callable[[Given], tuple[str, ...]]:
    def spoil(given: Given) -> tuple[str, ...]:
        tables = FeatureSchema.load(given.schema).embedding_bag_configs()
        plan = ShardingPlan(
            world_size=ranks,
            tables={t.name: TablePlacement(table_wise(t, i % ranks)) for i, t in enumerate(tables)},
        )
        raw = json.loads(plan.to_json())
        change(raw)
        path = given.schema.parent / "plan.json"
        path.write_text(json.dumps(raw))
        return ("--plan", str(path))

    return spoil


def gap_in_rows(raw: dict[str, Any]) -> None:
    raw["tables"]["t_cat_0"]["row_cuts"] = [5, 200]


def short_of_rows(raw: dict[str, Any]) -> None:
    raw["tables"]["t_cat_0"]["row_cuts"] = [0, 150]


def table_left_out(raw: dict[str, Any]) -> None:
    del raw["tables"]["t_cat_4"]


def as_it_is(raw: dict[str, Any]) -> None:
    """A sound plan."""


FILES: dict[str, tuple[Callable[[Given], tuple[str, ...]], type[Exception], str]] = {
    "missing column": (without_column, InputError, r"'cat_2' is missing.*part-00000"),
    "wrong type": (words_for_ids, InputError, r"'cat_2' .*string\. Set hash_buckets"),
    "empty directory": (empty_folder, InputError, r"train.* holds 0 files"),
    "truncated Parquet": (truncated, InputError, r"part-00000.*write it again"),
    "table named twice": (
        changed_schema(table_twice),
        ConfigError,
        "table 't_cat_0' is named twice",
    ),
    "plan with a gap": (changed_plan(gap_in_rows), PlanError, r"plan\.json.*t_cat_0.*start at 0"),
    "plan short of rows": (
        changed_plan(short_of_rows),
        PlanError,
        r"'t_cat_0' as 150 x 8, the model has 200 x 8",
    ),
    "plan without a table": (changed_plan(table_left_out), PlanError, "no table 't_cat_4'"),
    "plan for other ranks": (
        changed_plan(as_it_is, ranks=3),
        PlanError,
        "plan is for 3 ranks, the world has 2",
    ),
    "table that fits nowhere": (
        changed_schema(giant_table),
        PlanError,
        r"'t_cat_3'.*1000000000000 x 8.*32\.0 TB",
    ),
    "more ranks than CPUs": (
        lambda given: ("--ranks", str(CLUSTER_CPUS + 1)),
        ConfigError,
        rf"{CLUSTER_CPUS + 1} ranks .*has {CLUSTER_CPUS}\. Use num_workers={CLUSTER_CPUS}",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_what_is_wrong_before_training_is_refused_before_it(given: Given, case: str) -> None:
    spoil, error, words = FILES[case]
    options = spoil(given)
    with pytest.raises(error, match=f"(?s){words}"):
        run(given, *options)


@pytest.mark.slow
def test_the_data_as_given_trains(given: Given) -> None:
    """Else any of the above could be refused for another reason."""
    run(given, *changed_plan(as_it_is)(given))
