"""`Driver.fit` end to end on a real cluster: training, evaluation, checkpoints, other numbers of
ranks, stops.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rayrec.checkpoint import read_manifest
from rayrec.data.synthetic import SyntheticPaths
from rayrec.driver import CheckpointConfig, OptimizerConfig, ProfileConfig
from rayrec.layout import ShardingPlan
from tests.ray import worlds

pytestmark = pytest.mark.usefixtures("cluster")
SUM_ORDER = 2e-4  # float32 sums in another order, over a dozen steps of Adagrad


def test_fit_learns_and_reports(clicks: SyntheticPaths, tmp_path: Path) -> None:
    profile = ProfileConfig(path=str(tmp_path / "profile"), skip_steps=2, steps=3)
    result = worlds.driver(
        clicks, 2, epochs=3, storage_path=str(tmp_path), name="a", profile=profile
    ).fit()
    assert result.steps == 3 * 12 and result.rows == 3 * 6007
    assert result.metrics["rows"] == 2003 and result.metrics["auc"] > 0.6
    assert result.train_loss is not None and 0 < result.train_loss < 0.7
    assert result.checkpoint == f"{tmp_path}/a/step-00000036"
    assert result.plan.world_size == 2 and not result.stopped and result.rows_per_s > 0
    assert [r.step for r in result.reports] == sorted(
        r.step for r in result.reports
    ) and result.reports[-1].rows == result.rows
    assert sum(
        (b.rows - a) / b.rows_per_s
        for a, b in zip([0, *(r.rows for r in result.reports)], result.reports, strict=False)
    ) == (pytest.approx(result.seconds))
    assert read_manifest(result.checkpoint).cursor["epoch"] == 2
    assert (
        result.profile is not None
        and result.profile.first_step == 3
        and len(result.profile.ranks) == 2
    )
    assert (tmp_path / "profile" / "summary.txt").read_text() == result.profile.text() + "\n"
    assert (tmp_path / "profile" / "rank1.trace.json.gz").is_file()


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root may leave the low priority that Ray's default gives"
)
def test_ranks_run_at_normal_priority(clicks: SyntheticPaths, tmp_path: Path) -> None:
    def on_step(rank: int, step: int) -> None:
        (tmp_path / f"{rank}.nice").write_text(str(os.getpriority(os.PRIO_PROCESS, 0)))

    worlds.driver(clicks, 1, steps=3, model=worlds.misbehaving(clicks, tmp_path, on_step)).fit()
    assert (tmp_path / "0.nice").read_text() == "0"


PRIVATE = """
import os, ray
from rayrec.driver.cluster import connected
with connected(num_cpus=1):
    print(ray.get(ray.remote(lambda: os.getpriority(os.PRIO_PROCESS, 0)).remote()))
"""


@pytest.mark.slow
def test_workers_of_a_private_cluster_have_normal_priority() -> None:
    env = {name: value for name, value in os.environ.items() if name != "RAY_worker_niceness"}
    done = subprocess.run(
        [sys.executable, "-c", PRIVATE],
        env=env,
        timeout=120,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split()[-1] == "0"


@pytest.mark.parametrize(
    ("ranks", "plan", "optimizer", "lr"),
    # row-wise Adagrad keeps one value per column block, so under column cuts it is another
    # optimizer by design; SGD is not
    [
        (2, "row_wise", "rowwise_adagrad", 0.05),
        (3, "row_wise", "rowwise_adagrad", 0.05),
        (3, "data_parallel", "adagrad", 0.05),
        (3, "column_wise", "sgd", 5.0),
    ],
)
@pytest.mark.slow
def test_number_of_ranks_does_not_change_the_result(
    clicks: SyntheticPaths, ranks: int, plan: str, optimizer: str, lr: float
) -> None:
    options = {
        "sparse_optimizer": OptimizerConfig(name=optimizer, lr=lr),
        # feels the scale of gradients, which Adagrad would hide
        "dense_optimizer": OptimizerConfig(name="sgd", lr=0.1),
    }
    alone = worlds.driver(clicks, 0, plan="table_wise", **options).fit()
    together = worlds.driver(clicks, ranks, plan=plan, **options).fit()
    assert together.steps == alone.steps and together.rows == alone.rows
    for score in ("auc", "logloss", "ne"):
        assert together.metrics[score] == pytest.approx(alone.metrics[score], abs=SUM_ORDER)


@pytest.mark.parametrize(("ranks", "plan"), [(1, "auto"), (3, "row_wise"), (2, "column_wise")])
@pytest.mark.slow
def test_checkpoint_scores_the_same_on_other_ranks(
    clicks: SyntheticPaths, trained: Path, ranks: int, plan: str
) -> None:
    expected = json.loads((trained / "metrics.json").read_text())
    scores = worlds.driver(clicks, ranks, plan=plan).evaluate(f"{trained}/run/step-00000012")
    assert scores["rows"] == expected["rows"]
    for score in ("auc", "logloss", "calibration"):
        assert scores[score] == pytest.approx(expected[score], abs=1e-6)


@pytest.fixture(scope="module")
def trained(clicks: SyntheticPaths, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Storage of a run of 12 steps on 2 ranks, with checkpoints at 5, 10 and 12."""
    folder = tmp_path_factory.mktemp("trained")
    result = worlds.driver(
        clicks, 2, storage_path=str(folder), checkpoint=CheckpointConfig(every_n_steps=5)
    ).fit()
    (folder / "metrics.json").write_text(json.dumps(dict(result.metrics)))
    return folder


@pytest.mark.slow
def test_ranks_predict_what_they_evaluate(
    clicks: SyntheticPaths, trained: Path, tmp_path: Path
) -> None:
    driver, checkpoint = worlds.driver(clicks, 2), f"{trained}/run/step-00000012"
    told = driver.predict(checkpoint, str(tmp_path / "scores"), columns=["cat_0"])
    driver.evaluate(checkpoint, predictions=str(tmp_path / "one.parquet"), keys=["cat_0"])
    got, wanted = pq.read_table(tmp_path / "scores"), pq.read_table(tmp_path / "one.parquet")
    assert got.equals(wanted.select(["score", "cat_0"])) and told.rows == wanted.num_rows


@pytest.mark.slow
def test_resume_on_another_number_of_ranks_ends_as_if_never_interrupted(
    clicks: SyntheticPaths, trained: Path
) -> None:
    expected = json.loads((trained / "metrics.json").read_text())
    resumed = worlds.driver(
        clicks, 3, plan="table_wise", resume_from=f"{trained}/run/step-00000005"
    ).fit()
    assert resumed.steps == 12 and resumed.rows == 6007 - 5 * 512
    for score in ("auc", "logloss"):
        assert resumed.metrics[score] == pytest.approx(expected[score], abs=SUM_ORDER)


@pytest.mark.slow
def test_only_the_newest_checkpoints_are_kept(clicks: SyntheticPaths, tmp_path: Path) -> None:
    keep = CheckpointConfig(every_n_steps=3, num_to_keep=2)
    worlds.driver(clicks, 2, storage_path=str(tmp_path), checkpoint=keep).fit()
    assert sorted(p.name for p in (tmp_path / "run").glob("step-*")) == [
        "step-00000009",
        "step-00000012",
    ]


@pytest.mark.slow
def test_a_stop_saves_and_returns(clicks: SyntheticPaths, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    driver = worlds.driver(
        clicks,
        2,
        model=worlds.misbehaving(clicks, pids, lambda rank, step: None),
        steps=1_000_000,
        storage_path=str(tmp_path),
    )

    def stop() -> None:
        worlds.wait_for_pid(pids, 1)
        driver.request_stop()

    thread = threading.Thread(target=stop)
    thread.start()
    result = driver.fit()
    thread.join()
    assert result.stopped and 3 <= result.steps < 1_000_000
    assert result.checkpoint is not None and read_manifest(result.checkpoint).step == result.steps


@pytest.mark.slow
def test_one_run_after_the_other_ends(clicks: SyntheticPaths) -> None:
    drivers = [worlds.driver(clicks, 2, batch=256, steps=8) for _ in range(8)]
    scores: list[dict[str, float]] = []
    for driver in drivers:
        thread = threading.Thread(
            target=lambda driver=driver: scores.append(dict(driver.fit().metrics)), daemon=True
        )
        before = len(scores)
        thread.start()
        thread.join(60)
        assert len(scores) == before + 1, f"run {before} has not ended in 60 s"
    assert all(s == scores[0] for s in scores)


@pytest.mark.slow
def test_plan_fits_the_real_topology_and_can_be_given_back(
    clicks: SyntheticPaths, tmp_path: Path
) -> None:
    plan = worlds.driver(clicks, 2).plan()
    assert plan.world_size == 2 and plan.hosts == ((0, 1),) and len(plan.tables) == 6
    plan.save(tmp_path / "plan.json")
    result = worlds.driver(clicks, 2, plan=str(tmp_path / "plan.json"), steps=2).fit()
    assert result.plan == ShardingPlan.load(tmp_path / "plan.json")
