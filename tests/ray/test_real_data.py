"""MovieLens and Criteo rows, converted by their jobs and trained by jobs.train_dlrm on two ranks,
under every plan and to a known score, from numbered ids and from raw ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from jobs import convert_criteo, convert_movielens, train_dlrm
from rayrec.cli.main import main
from rayrec.data import FeatureSchema
from rayrec.layout import KINDS, ShardingPlan, TablePlacement, row_wise, table_wise
from rayrec.serve import Predictor
from tests.unit.documents import BLOCKS
from tests.unit.running_replica import running
from tests.words import sets

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]
SETS = ("movielens", "criteo")
# one host: rows over a host's ranks are rows over all ranks, and a grid has one column block
NAMED = {"grid_shard": "row_wise", "table_row_wise": "row_wise", "table_column_wise": "column_wise"}
# eight steps in float32, sums over ranks and column blocks in another order
SAME = 2e-4


@pytest.fixture(scope="session")
def converted(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with train/, eval/ and schema.json of both sets."""
    out = {name: tmp_path_factory.mktemp(name) for name in SETS}
    assert convert_movielens.main([str(real_data / "ml-100k"), str(out["movielens"])]) == 0
    assert (
        convert_criteo.main(
            [
                str(real_data / "criteo-tiny" / "train.tiny.csv"),
                str(out["criteo"]),
                "--num-buckets",
                "2000",
            ]
        )
        == 0
    )
    return out


def train(data: Path, folder: Path, *options: str) -> dict[str, Any]:
    """The result of jobs.train_dlrm on converted data, in the cluster of the tests."""
    assert (
        train_dlrm.main(["--data", str(data), "--result", f"{folder}/result.json", *options]) == 0
    )
    return json.loads((folder / "result.json").read_text())


SMALL = sets(
    "run.steps=8", "run.global_batch_size=128", "model.dense_layers=[16]", "model.over_layers=[16]"
)
# state per element and a dense SGD: results then do not depend on where columns are cut, and feel
# the scale of gradients
EXACT = sets(
    "run.sparse_optimizer.name=adagrad",
    "run.sparse_optimizer.lr=0.05",
    "run.dense_optimizer.name=sgd",
    "run.dense_optimizer.lr=0.1",
)


@pytest.fixture(scope="session")
def alone(
    converted: dict[str, Path], cluster: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What one rank reaches."""
    folder = tmp_path_factory.mktemp("alone")
    return {
        name: train(converted[name], folder, *SMALL, *EXACT, "--ranks", "1", "--plan", "table_wise")
        for name in SETS
    }


@pytest.mark.parametrize("plan", ["auto", *KINDS, "a file"])
@pytest.mark.parametrize("name", SETS)
def test_two_ranks_train_real_rows_under_every_plan_as_one_rank_does(
    converted: dict[str, Path],
    alone: dict[str, dict[str, Any]],
    tmp_path: Path,
    name: str,
    plan: str,
) -> None:
    word = plan
    if plan == "a file":
        tables = FeatureSchema.load(converted[name] / "schema.json").embedding_bag_configs()
        layouts = {
            t.name: row_wise(t, (1, 0)) if i % 2 else table_wise(t, 1) for i, t in enumerate(tables)
        }
        word = str(tmp_path / "plan.json")
        ShardingPlan(
            world_size=2, tables={t: TablePlacement(layout) for t, layout in layouts.items()}
        ).save(word)
    result = train(converted[name], tmp_path, *SMALL, *EXACT, "--ranks", "2", "--plan", word)
    assert (result["steps"], result["rows"], result["ranks"]) == (8, 1024, 2)
    kinds = set(result["plan"].values())
    if plan in KINDS:
        # tables with fewer rows or columns than there are ranks have one block, which is table-wise
        assert NAMED.get(plan, plan) in kinds and kinds <= {NAMED.get(plan, plan), "table_wise"}
    elif plan == "a file":
        assert kinds == {"row_wise", "table_wise"}
    assert result["eval"]["rows"] == alone[name]["eval"]["rows"]
    assert result["eval"]["logloss"] == pytest.approx(alone[name]["eval"]["logloss"], abs=SAME)


@pytest.mark.parametrize("model", ["dlrm", "dcn"])
def test_movielens_reaches_an_auc_of_078_on_its_held_out_tenth(
    converted: dict[str, Path], tmp_path: Path, model: str
) -> None:
    options = sets(
        "run.global_batch_size=1024",
        "run.epochs=8",
        "run.sparse_optimizer.lr=0.02",
        "run.dense_optimizer.lr=1e-3",
        f"model.model={model}",
    )
    result = train(converted["movielens"], tmp_path, *options, "--ranks", "2")
    assert result["rows"] == 8 * 90_000 and result["eval"]["rows"] == 10_000
    assert result["eval"]["auc"] >= 0.78, result["eval"]
    assert result["eval"]["ne"] < 0.86 and abs(result["eval"]["calibration"] - 1) < 0.06, result[
        "eval"
    ]


@pytest.fixture(scope="module")
def dynamic(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both sets from raw ids."""
    out = {name: tmp_path_factory.mktemp(f"raw-{name}") for name in SETS}
    convert_movielens.convert_movielens(real_data / "ml-100k", out["movielens"], dynamic=4096)
    log = real_data / "criteo-tiny" / "train.tiny.csv"
    convert_criteo.convert_criteo([log], out["criteo"], dynamic=4096)
    return out


@pytest.mark.parametrize("name", SETS)
def test_two_ranks_train_raw_ids_by_the_run_file_of_the_page(
    dynamic: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The page says what MovieLens reaches; Criteo's 185 held-out rows say only that they score."""
    (block,) = [b for b in BLOCKS if b.page.stem == "dynamic" and b.language == "toml"]
    (tmp_path / "dynamic.toml").write_text(block.code)
    run = ["--checkpoint-dir", f"{tmp_path}/run", "--result", f"{tmp_path}/result.json"]
    words = [f"{tmp_path}/dynamic.toml", "--data", str(dynamic[name]), *run]
    assert main(["train", *words]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    printed = capsys.readouterr().out
    assert result["ranks"] == 2 and result["eval"]["rows"] == {"movielens": 10_000}.get(name, 185)
    if name == "movielens":
        assert "table 't_user': 943 ids have a row and 0 are candidates; 943 were" in printed
        assert result["eval"]["auc"] >= 0.78, result["eval"]
    else:
        assert "table 't_C9': 2 ids have a row" in printed
        assert 0.4 < result["eval"]["auc"] < 0.8, result["eval"]
    check_served(dynamic[name], tmp_path)


def check_served(data: Path, folder: Path) -> None:
    """A server answers each held-out row with the score of its evaluation."""
    model = f"{folder}/run@latest"
    rows, scores, served = str(data / "eval"), f"{folder}/scores", f"{folder}/served"
    assert main(["predict", model, "--data", rows, "--out", scores, "--local"]) == 0
    assert main(["export", model, served, "--data", str(data), "--dtype", "fp32"]) == 0
    wanted = pq.read_table(scores)["score"].to_numpy()
    with running(Predictor.load(served)) as server, server.client() as client:
        asked = pq.read_table(rows)
        parts = [client.predict(asked.slice(at, 500)) for at in range(0, len(asked), 500)]
    assert np.abs(np.concatenate(parts) - wanted).max() < 1e-5
