"""What training reaches, through jobs.train_dlrm: the planted truth, chance when there is nothing
to learn, and every table optimizer.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from jobs import train_dlrm
from rayrec.data.planted import SyntheticConfig
from rayrec.data.synthetic import SyntheticPaths, write_synthetic
from rayrec.optim import SPARSE_OPTIMIZERS
from tests.words import sets

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


def train(data: SyntheticPaths | None, folder: Path, *options: str) -> dict[str, Any]:
    """The result of jobs.train_dlrm on two ranks; without data it makes its own."""
    paths = [] if data is None else ["--data", str(data.schema.parent)]
    words = [*paths, "--ranks", "2", "--result", f"{folder}/result.json", *options]
    assert train_dlrm.main(words) == 0
    return json.loads((folder / "result.json").read_text())


def test_the_job_as_it_is_gets_within_002_of_the_best_possible_auc(tmp_path: Path) -> None:
    result = train(None, tmp_path)
    scores = result["eval"]
    assert result["rows"] == 1_500_000 and scores["rows"] == 100_000
    assert 0.8 < scores["bayes_auc"] < 0.9
    # noise of an AUC over 100,000 rows is 0.0014 (one sigma); both AUCs are of the same rows, so
    # that of their difference is smaller
    assert -0.005 < scores["regret"] < 0.02, scores


def test_shuffled_labels_stay_at_chance(tmp_path: Path) -> None:
    """A model that did better would have seen labels it must not see: of the rows to be scored, or
    of a row before its own step.
    """
    config = SyntheticConfig(rows_train=300_000, rows_eval=100_000, shuffle_labels=True)
    made = write_synthetic(tmp_path / "data", config)
    truth = json.loads(made.truth.read_text())
    result = train(made, tmp_path, *sets("run.epochs=1"))
    scores, rate, rows = result["eval"], truth["base_rate"], truth["rows"]
    # of an AUC when scores say nothing: 0.0021
    sigma = math.sqrt((rows + 1) / (12 * rows * rate * rows * (1 - rate)))
    assert abs(scores["auc"] - 0.5) < 4 * sigma, (scores, sigma)
    # no prediction made without the labels beats their entropy; four sigma of log loss on these
    # rows is 0.006
    entropy = truth["bayes_logloss"]
    assert scores["logloss"] > entropy - 0.006, (scores, entropy)
    # loss in training is of rows before their first update; its last window may hold a single step
    # of 4096 rows: four sigma is 0.03
    assert result["train_loss"] > entropy - 0.03, (result, entropy)


def test_the_int8_exchange_costs_less_than_0002_of_auc(tmp_path: Path) -> None:
    """Row-wise for every table, so that every pooled row and every gradient is coded; both runs see
    the same rows in the same order.
    """
    made = write_synthetic(tmp_path / "data", SyntheticConfig(rows_train=400_000, rows_eval=50_000))
    options = ("--plan", "row_wise", *sets("run.epochs=1"))
    exact = train(made, tmp_path, *options)["eval"]
    coded = train(
        made, tmp_path, *options, *sets("run.qcomms_forward=int8", "run.qcomms_backward=int8")
    )["eval"]
    assert exact["auc"] > 0.75 and coded["logloss"] != exact["logloss"]
    assert abs(coded["regret"] - exact["regret"]) < 0.002, (coded, exact)


# of the others 0.01
LEARNING_RATES = {
    "rowwise_adagrad": "0.1",
    "adagrad": "0.1",
    "lamb": "0.05",
    "lars_sgd": "5",
    "sgd": "20",
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SyntheticPaths:
    config = SyntheticConfig(
        rows_train=20_000, rows_eval=5_000, num_features=8, num_lists=2, num_dense=4, dim=8, cap=500
    )
    return write_synthetic(tmp_path_factory.mktemp("small"), config)


FROZEN = sets(
    "run.dense_optimizer.lr=0",
    "run.dense_optimizer.name=sgd",
    "run.global_batch_size=256",
    "model.init_bound=0.1",  # LAMB's steps are as long as the rows
    "model.dense_layers=[16]",
    "model.over_layers=[32]",
)


@pytest.fixture(scope="module")
def untrained(
    small: SyntheticPaths, cluster: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The scores of the initial values."""
    return train(
        small,
        tmp_path_factory.mktemp("untrained"),
        *FROZEN,
        *sets("run.steps=1", "run.sparse_optimizer.lr=0"),
    )["eval"]


@pytest.mark.parametrize("name", sorted(SPARSE_OPTIMIZERS))
def test_every_optimizer_trains_the_tables(
    small: SyntheticPaths, untrained: dict[str, Any], tmp_path: Path, name: str
) -> None:
    """The dense part does not learn here: whatever is learned is of the tables' optimizer."""
    lr = LEARNING_RATES.get(name, "0.01")
    optimizer = sets(f"run.sparse_optimizer.name={name}", f"run.sparse_optimizer.lr={lr}")
    result = train(small, tmp_path, *FROZEN, *sets("run.epochs=3"), *optimizer)
    assert result["steps"] == 237
    assert abs(untrained["auc"] - 0.5) < 0.05
    assert result["eval"]["auc"] > untrained["auc"] + 0.1, (result, untrained)
    assert result["eval"]["logloss"] < untrained["logloss"] - 0.03, (result, untrained)
    assert result["train_loss"] < untrained["logloss"] - 0.03, (result, untrained)
