"""Bad input, given to jobs.train_dlrm on two real ranks: a typed error that names the place, and
never a hang.

Where each check is made, and every variant of it, is tested beside the code: data/test_convert,
data/test_schema, data/test_files, unit/test_layout_*, unit/test_planner_*. Every kind goes the
whole way of a user's mistake on one rank in tests/mistakes. Here are those that need several ranks,
or a cluster, and one of each moment at which the others are found.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import train_dlrm
from rayrec.data.synthetic import SyntheticPaths
from rayrec.errors import InputError
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


def run(given: Given) -> None:
    """Train two epochs of the spoilt data."""
    paths = sets(f"data.train={given.train}", f"data.schema={given.schema}")
    train_dlrm.main([*paths, *SMALL, "--ranks", "2", *sets("run.epochs=2")])


def spoil_row(given: Given, column: str, value: Any) -> None:
    """Change a value of the bad row.

    Row groups become small, so that rows must be counted across them. They have no statistics, by
    which the driver would find most of this before training.
    """
    table = pq.read_table(given.file)
    values = table[column].to_pylist()
    values[BAD_ROW] = value
    spoilt = pa.array(values, table[column].type)
    table = table.set_column(table.column_names.index(column), column, spoilt)
    pq.write_table(table, given.file, row_group_size=1000, write_statistics=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        (
            "cat_1",
            200,
            r"'cat_1' \(column 'cat_1'\) holds id 200 in row 4321 of "
            r"'.*part-00000\.parquet'.*\[0, 200\)",
        ),
        ("d_0", math.nan, r"dense column 'd_0' holds nan in row 4321 of '.*part-00000\.parquet'"),
    ],
)
def test_a_bad_row_in_mid_training_is_the_cause_on_the_rank_that_read_it(
    given: Given, column: str, value: Any, words: str
) -> None:
    spoil_row(given, column, value)
    with pytest.raises(InputError, match=rf"{words}.*found by rank [01] of 2 on "):
        run(given)


def test_what_is_wrong_before_training_is_refused_before_it(given: Given) -> None:
    table = pq.read_table(given.file)
    words = pa.array([f"w{i}" for i in range(table.num_rows)])
    pq.write_table(table.set_column(table.column_names.index("cat_2"), "cat_2", words), given.file)
    with pytest.raises(InputError, match=r"(?s)'cat_2' .*string\. Set hash_buckets"):
        run(given)


@pytest.mark.slow
def test_the_data_as_given_trains(given: Given) -> None:
    """Else any of the above could be refused for another reason."""
    run(given)
