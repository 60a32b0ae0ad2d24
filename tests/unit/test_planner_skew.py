"""Skewed ids: expected rows against sums over every row and against draws, exponents found again in
data, and what prices make of them.
"""

from __future__ import annotations

import csv
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from rayrec.cli.profile import measure
from rayrec.errors import ConfigError
from rayrec.layout import EmbeddingBagConfig, TableLayout, Topology
from rayrec.layout.schema import FeatureSchema
from rayrec.layout.schema_columns import Feature
from rayrec.planner import ParameterConstraints
from rayrec.planner.costs import CostModel
from rayrec.planner.work import table_work
from rayrec.planner.zipf import distinct_rows, fit_skew


def law(rows: int, skew: float) -> np.ndarray:
    chances = np.arange(1, rows + 1, dtype=float) ** -skew
    return chances / chances.sum()


@pytest.mark.seeds(range(60))
def test_distinct_rows_are_the_sum_over_every_row(seed: int) -> None:
    rng = random.Random(seed)
    rows, skew, ids = (
        int(10 ** rng.uniform(0, 6)),
        rng.choice([0.0, 0.3, 0.9, 1.0, 1.1, 2.0, 4.0]),
        10 ** rng.uniform(0, 7),
    )
    first = rng.choice([None, rng.randint(1, rows)])
    wanted = -np.expm1(-ids * law(rows, skew)[:first]).sum()
    assert distinct_rows(rows, ids, skew, first) == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("skew", [0.0, 0.6, 1.05, 1.6])
def test_distinct_rows_are_those_of_draws_and_the_exponent_is_found_again(skew: float) -> None:
    rng, rows = np.random.default_rng(1), 50_000
    for ids in (1000, 20_000, 400_000):
        seen = len(np.unique(rng.choice(rows, ids, p=law(rows, skew))))
        # the noise of counting
        assert distinct_rows(rows, ids, skew) == pytest.approx(seen, abs=4 * seen**0.5)
        # at skews near 0, distinct rows barely depend on it, so that noise of a thousandth is a
        # tenth of an exponent
        assert fit_skew(rows, ids, seen) == pytest.approx(skew, abs=0.25 if skew < 0.5 else 0.1)


def bag(name: str, rows: int, *features: str) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(rows, 16, name, feature_names=list(features))


def write(folder: Path, **columns: object) -> Path:
    parquet.write_table(pa.table(columns), folder / "part.parquet")
    return folder


def reading(*tables: EmbeddingBagConfig) -> FeatureSchema:
    """A schema whose features are columns of the same names."""
    names = [name for table in tables for name in table.feature_names]
    features = tuple(Feature(name=name, column=name) for name in names)
    return FeatureSchema(label="label", features=features, tables=tables)


def test_a_profile_finds_the_law_of_every_table_and_joins_features(tmp_path: Path) -> None:
    rng, count = np.random.default_rng(2), 40_000
    tables = (bag("flat", 5000, "a"), bag("steep", 5000, "b"), bag("both", 5000, "c", "d"))
    order = rng.permutation(5000)
    data = {
        name: order[rng.choice(5000, count, p=law(5000, skew))]
        for name, skew in zip("abcd", (0.0, 1.2, 1.2, 1.2), strict=True)
    }
    data["d"] = data["d"].astype(np.int32)
    found = measure(reading(*tables), write(tmp_path, **data), step_rows=8192)
    assert found["flat"]["skew"] < 0.15 and found["steep"]["skew"] == pytest.approx(1.2, abs=0.1)
    # the same rows are frequent in both features
    assert found["both"]["skew"] == pytest.approx(1.2, abs=0.1)
    assert [m["pooling_factor"] for m in found.values()] == [1.0] * 3


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()], ids=str)
@pytest.mark.parametrize("lists", [False, True])
def test_a_profile_reads_views_of_text(kind: pa.DataType, lists: bool, tmp_path: Path) -> None:
    words = [f"a longer word {n % 50}" for n in range(1000)]
    column = pa.array(
        [[word] for word in words] if lists else words, pa.list_(kind) if lists else kind
    )
    tables = bag("t", 50, "f"), bag("u", 50, "g")
    plain = [[n % 50] for n in range(1000)]
    views = pa.array(plain, pa.list_view(pa.int64()))
    found = measure(reading(*tables), write(tmp_path, f=column, g=views), step_rows=1000)
    assert found["t"] == found["u"] and found["t"]["pooling_factor"] == 1.0


def shuffled_columns(real_data: Path) -> dict[str, tuple[int, list[str]]]:
    """Column -> (rows of its table, values), shuffled as a loader does; of Criteo and MovieLens."""
    rng = random.Random(0)
    with (real_data / "criteo-tiny" / "train.tiny.csv").open() as file:
        criteo = list(csv.DictReader(file))
    movies = [
        line.split("\t")
        for line in (real_data / "ml-100k" / "ml-100k.inter").read_text().splitlines()[1:]
    ]
    found = {
        f"C{i}": (2000, [row[f"C{i}"] for row in criteo if row[f"C{i}"]]) for i in range(1, 27)
    }
    found |= {
        name: (rows, [row[i] for row in movies])
        for i, (name, rows) in enumerate((("user", 944), ("item", 1683)))
    }
    for _, values in found.values():
        rng.shuffle(values)
    return found


def test_real_ids_of_a_step_are_foretold_from_a_sample(real_data: Path, tmp_path: Path) -> None:
    """The skew of one half of the data says how many rows a step of the other half touches, where
    uniform ids are far off.
    """
    near, far, total = 0, 0, 0
    for name, (rows, values) in shuffled_columns(real_data).items():
        step = 512 if len(values) <= 2000 else 4096
        half = len(values) // 2
        if half < step:
            continue
        data = write(tmp_path, **{name: pa.array(values[:half])})
        skew = measure(reading(bag("t", rows, name)), data, step_rows=step)["t"]["skew"]
        seen = len(set(values[half : half + step]))
        near += abs(distinct_rows(rows, step, skew) / seen - 1) < 0.25
        far += abs(distinct_rows(rows, step) / seen - 1) < 0.25
        total += 1
    assert total >= 20 and near >= 0.9 * total and far < 0.5 * total


def test_skewed_ids_make_updates_cheaper_and_uniform_ones_cost_what_they_did() -> None:
    model = CostModel(Topology.local(2, memory_bytes=1))
    table = bag("t", 100_000, "a")
    parts = TableLayout((0, 25_000, 100_000), (0, 16), ((0,), (1,)))
    prices = [
        model.price(table_work(table, ParameterConstraints(skew=skew), 4096, 2), parts)
        for skew in (0.0, 0.5, 1.0, 2.0)
    ]
    for rank in (0, 1):
        updates = [price[rank].update_s for price in prices]
        assert updates == sorted(updates, reverse=True) and updates[3] < updates[0]
        assert len({price[rank].output_s for price in prices}) == 1
    uniform = model.amounts(table_work(table, ParameterConstraints(), 4096, 2), parts)[1]
    # a line of weights and one of state
    assert uniform.update.rows == pytest.approx(2 * 75_000 * -np.expm1(-0.08192) * (64 + 64))


@pytest.mark.parametrize("skew", [-0.1, float("inf"), float("nan")])
def test_a_skew_that_is_none_is_refused(skew: float) -> None:
    with pytest.raises(ConfigError, match="skew="):
        ParameterConstraints(skew=skew)
