"""A planted event log: its events follow the stated probabilities, repeat by seed, and need their
histories to be understood.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import pytest
import torch

from rayrec.cli.main import main
from rayrec.data import FeatureSchema, ParquetDataset, PlantedLogConfig, write_planted_log
from rayrec.data.planted_log import DAY, FACTORS, LIKE, PlantedLog
from rayrec.errors import ConfigError
from rayrec.metrics import PlantedScores
from rayrec.runs.reporting import truth_beside

SMALL = PlantedLogConfig(events=20_000, users=300, items=40, days=10, history=6, dim=4)
Columns = dict[str, np.ndarray]


def rows_of(folder: Path) -> Columns:
    table = ds.dataset(folder / "log").to_table()
    return {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}


def plain_logits(config: PlantedLogConfig, rows: Columns, frozen: bool = False) -> np.ndarray:
    """The true logits of events by user and time, one after the other.

    Args:
        frozen: items keep the factors that they had before the drift.
    """
    planted, logits = PlantedLog(config), []
    past: dict[int, list[tuple[int, int]]] = defaultdict(list)
    drift = config.days if config.drift_day is None or frozen else config.drift_day
    names = ("user", "item", "day", "action")
    for user, item, day, action in zip(*(rows[name].tolist() for name in names), strict=True):
        factors = planted.factors[int(day >= drift)]
        recent = past[user][-config.history :]
        interest = sum((done * factors[one] for one, done in recent), np.zeros(FACTORS))
        logit = config.base + config.readiness * planted.readiness[user]
        logit += config.popularity * planted.popularity[day, item]
        logit += config.affinity * factors[item] @ interest / np.sqrt(config.history * FACTORS)
        logits.append(logit)
        past[user].append((item, action))
    return np.array(logits)


def auc(logits: np.ndarray, labels: np.ndarray) -> float:
    """The share of pairs in order, pair by pair; equal logits are half right."""
    ones, zeros = logits[labels == 1][:, None], logits[labels == 0]
    return float((ones > zeros).mean() + (ones == zeros).mean() / 2)


@pytest.mark.seeds(range(10))
def test_users_engage_with_the_planted_probabilities(seed: int, tmp_path: Path) -> None:
    """In each tenth of the events by true probability, and in each tenth of time, engagements are
    within 5 sigma of what the probabilities sum to; a quarter of them are likes.
    """
    config = replace(SMALL, seed=seed, drift_day=7 if seed % 2 else None)
    write_planted_log(tmp_path, config)
    rows = rows_of(tmp_path)
    logits = plain_logits(config, rows)
    drawn = list(PlantedLog(config).chunks())
    assert np.allclose(np.concatenate([events.logits for events in drawn]), logits, atol=1e-12)
    p = 1 / (1 + np.exp(-logits))
    assert np.array_equal(rows["engaged"], rows["action"] > 0)
    for order in (np.argsort(p), np.argsort(rows["time"])):
        for tenth in np.array_split(order, 10):
            sigma = np.sqrt((p[tenth] * (1 - p[tenth])).sum())
            assert abs(rows["engaged"][tenth].sum() - p[tenth].sum()) < 5 * sigma
    engaged = rows["action"][rows["engaged"] == 1]
    assert abs((engaged == LIKE).mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / len(engaged))
    # a few hundred users and items give worlds far from the mean: its sd over seeds is .04
    assert logits.std() > 0.5 and 0.1 < p.mean() < 0.9


def test_items_are_shown_by_the_popularity_of_the_day() -> None:
    config = replace(SMALL, events=200_000, users=5000, days=40)
    planted, seen = PlantedLog(config), np.zeros((40, 40))
    for events in planted.chunks():
        np.add.at(seen, (events.time // DAY, events.item), 1)
    share = np.exp(planted.popularity)
    wanted = seen.sum(1, keepdims=True) * share / share.sum(1, keepdims=True)
    # chi squared of 40 days with 39 free counts each: mean 1560, deviation 56
    assert abs(((seen - wanted) ** 2 / wanted).sum() - 1560) < 5 * 56
    assert abs(planted.popularity[0] - planted.popularity[20]).mean() > 0.5, "it moves"


def test_the_truth_tells_the_best_scores_of_all_events_and_of_each_part(tmp_path: Path) -> None:
    config = replace(SMALL, drift_day=6)
    log = write_planted_log(tmp_path, config)
    rows, truth = rows_of(tmp_path), PlantedScores.load(tmp_path / "truth.json")
    logits, labels = plain_logits(config, rows), rows["engaged"]
    wheres = [*(f"split == '{part}'" for part in log.events), *(f"day == {d}" for d in range(10))]
    assert [part.where for part in truth.parts] == wheres
    assert log.events == {part.where[10:-1]: part.rows for part in truth.parts[:3] if part.where}
    assert set(rows["day"][rows["split"] == "validation"]) == {8}
    assert set(rows["day"][rows["split"] == "test"]) == {9}
    assert np.array_equal(rows["day"], rows["time"] // DAY)
    schema = FeatureSchema.load(tmp_path / "schema.json")
    for one in (truth, *truth.parts):
        taken = np.ones(len(labels), bool)
        if one.where is not None:
            column, value = one.where.split(" == ")
            taken = rows[column].astype(str) == value.strip("'")
            data = ParquetDataset(str(tmp_path / "log"), schema, where=one.where)
            assert data.num_rows == one.rows
        y, x = labels[taken], logits[taken]
        loss = np.where(y == 1, np.log1p(np.exp(-x)), np.log1p(np.exp(x))).mean()
        rate = y.mean()
        entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
        assert (one.rows, one.base_rate) == (taken.sum(), pytest.approx(rate))
        assert one.bayes_auc == pytest.approx(auc(x, y), abs=1e-9)
        assert one.bayes_logloss == pytest.approx(loss)
        assert one.bayes_ne == pytest.approx(loss / entropy)
    # the truth of the rows that a run scores, however its filter is written
    path = str(tmp_path / "log")
    assert truth_beside(path, "`day`=8") == truth.parts[3 + 8]
    assert truth_beside(path, "day >= 8") == truth_beside(path) == truth


def features_of(config: PlantedLogConfig, folder: Path, where: str) -> tuple[np.ndarray, ...]:
    """Affinity, the other terms, and labels, of what batches by the schema hold."""
    planted, schema = PlantedLog(config), FeatureSchema.load(folder / "schema.json")
    data = ParquetDataset(str(folder / "log"), schema, where=where)
    (batch,) = data.loader(
        0, 1, data.num_rows, shuffle=False, ordered=True, keep_columns=["day"], with_rows=True
    )
    ids, factors = batch.sparse_features, planted.factors[0]
    item, user = ids["item"].values().numpy(), ids["user"].values().numpy()
    affinity = []
    for row, own in zip(item, ids["history"].to_dense(), strict=True):
        actions, items = np.divmod(own.numpy(), config.items)
        affinity.append(factors[row] @ ((actions - 1)[:, None] * factors[items]).sum(0))
    assert batch.origin is not None and batch.origin.columns is not None
    days = np.array(batch.origin.columns["day"])
    others = [planted.popularity[days, item], planted.readiness[user]]
    return np.stack([affinity, *others], 1), batch.labels.numpy()


def fitted_auc(
    train: tuple[np.ndarray, ...], test: tuple[np.ndarray, ...], columns: slice
) -> float:
    """The AUC on the test of a logistic model of some features."""
    x, y = (torch.from_numpy(array).double() for array in train)
    model = torch.nn.Linear(x[:, columns].shape[1], 1).double()
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=50)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        logits = model(x[:, columns])[:, 0]
        out = torch.nn.functional.binary_cross_entropy_with_logits(logits, y)
        out.backward()
        return out

    optimizer.step(loss)
    with torch.no_grad():
        return auc(model(torch.from_numpy(test[0][:, columns]))[:, 0].numpy(), test[1])


def test_who_reads_histories_reaches_the_best_score_and_nobody_else_does(tmp_path: Path) -> None:
    write_planted_log(tmp_path, SMALL)
    train, test = (features_of(SMALL, tmp_path, f"split == '{part}'") for part in ("train", "test"))
    best = truth_beside(str(tmp_path / "log"), "split == 'test'")
    assert best is not None and len(test[1]) == best.rows
    assert abs(fitted_auc(train, test, slice(0, 3)) - best.bayes_auc) < 0.01
    assert fitted_auc(train, test, slice(1, 3)) < best.bayes_auc - 0.05


def test_a_drift_is_abrupt_and_lowers_who_knows_only_the_past(tmp_path: Path) -> None:
    still, moved = SMALL, replace(SMALL, drift_day=6)
    rows = {}
    for name, config in (("still", still), ("moved", moved)):
        write_planted_log(tmp_path / name, config)
        rows[name] = rows_of(tmp_path / name)
    before = rows["moved"]["day"] < 6
    for column in ("user", "item", "time", "day"):
        assert np.array_equal(rows["still"][column], rows["moved"][column])
    same = rows["still"]["action"] == rows["moved"]["action"]
    assert same[before].all() and not same[~before].all()
    true, frozen = (plain_logits(moved, rows["moved"], frozen) for frozen in (False, True))
    y = rows["moved"]["engaged"]
    assert np.array_equal(true[before], frozen[before])
    assert auc(frozen[~before], y[~before]) < auc(true[~before], y[~before]) - 0.05


def test_equal_configs_write_equal_files_and_other_seeds_do_not(tmp_path: Path) -> None:
    def contents(name: str, config: PlantedLogConfig) -> dict[str, bytes]:
        write_planted_log(tmp_path / name, config)
        files = (path for path in (tmp_path / name).rglob("*") if path.is_file())
        return {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files}

    # two chunks of users, of which some have no event
    config = replace(SMALL, events=9000, users=5000)
    first, again = contents("a", config), contents("b", config)
    assert first == again and len(first) == 4
    assert first["log/part-00000.parquet"] != contents("c", replace(config, seed=1)).get(
        "log/part-00000.parquet"
    )
    rows = rows_of(tmp_path / "a")
    assert len(rows["user"]) == 9000 and rows["user"].max() > 4096
    assert (np.diff(rows["user"]) >= 0).all()
    one, two = PlantedLog(config).chunks()
    assert all(np.array_equal(*both) for both in zip(two, PlantedLog(config).chunk(1), strict=True))
    # of 864,000 seconds, of which chunks and seeds have 63 in common by chance
    other = PlantedLog(replace(config, seed=1)).chunk(0)
    for drawn in (two, other):
        assert len(np.intersect1d(one.time, drawn.time)) < 200


@pytest.mark.parametrize(
    "bad",
    [
        {"events": 0},
        {"items": 1},
        {"days": 2},
        {"history": 0},
        {"dim": 3},
        {"drift_day": 0},
        {"drift_day": 10},
        {"affinity": float("nan")},
    ],
)
def test_impossible_configs_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        replace(SMALL, **bad)


def test_events_that_no_disk_holds_are_refused_before_any_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"events need about .* of disk"):
        write_planted_log(tmp_path / "there", replace(SMALL, events=10**16))
    assert not list(tmp_path.iterdir())


def test_the_command_makes_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rows", "3000", "--days", "10", "--drift-day", "5", "--dim", "4", "--seed", "3"]
    out = str(tmp_path / "made")
    assert main(["make-data", out, *words]) == 0
    config = PlantedLogConfig(events=3000, users=60, days=10, drift_day=5, dim=4, seed=3)
    log = write_planted_log(tmp_path / "same", config)
    for name in ("truth.json", "schema.json", "next_item.json", "log/part-00000.parquet"):
        assert (tmp_path / "made" / name).read_bytes() == (tmp_path / "same" / name).read_bytes()
    assert json.loads((tmp_path / "made" / "truth.json").read_text())["config"]["drift_day"] == 5
    said = capsys.readouterr().out
    assert f"3000 events of {log.users} users" in said and f"{log.events['test']} for test" in said
    for wrong, says in (
        (["--drift-day", "5"], "--drift-day needs --days"),
        (["--days", "10", "--lifetime", "5"], "--lifetime is not for an event log (--days)"),
        (["--days", "10", "--eval-rows", "5"], "--eval-rows is not for an event log (--days)"),
        (["--days", "10", "--drift-day", "10"], "drift_day=10; it must lie between 1 and 9"),
        (["--days", "10"], "already holds schema.json and next_item.json"),
    ):
        assert main(["make-data", out, *wrong]) == 2
        assert says in capsys.readouterr().err
