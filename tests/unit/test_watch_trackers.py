"""TensorBoard, MLflow and W&B hold what a run said; each is read back with its own package."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rayrec.errors import ConfigError, RunInterrupted, TrainingFailed
from rayrec.train.events import Evaluation
from rayrec.watch import MLflowCallback, TensorBoardCallback, WandbCallback
from rayrec.watch.numbers import numbers_of
from tests.watched import info, report, tell, wandb_curve, wandb_records

FAILED = TrainingFailed("rank 1 of 2 failed", 1, "10.0.0.2", "OSError: gone")


@pytest.fixture(params=["tensorboard", "mlflow", "wandb"])
def missing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a package that cannot be imported here."""
    for name in [n for n in sys.modules if n.split(".")[0] == request.param]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, request.param, None)
    return request.param


def test_a_missing_package_is_said_with_its_extra(missing: str, tmp_path: Path):
    make: dict[str, Any] = {
        "tensorboard": lambda: TensorBoardCallback(tmp_path),
        "mlflow": MLflowCallback,
        "wandb": WandbCallback,
    }
    said = rf"Callback needs the package {missing}: .*pip install 'rayrec\[{missing}\]'"
    with pytest.raises(ConfigError, match=said) as error:
        make[missing]()
    assert "\n" not in str(error.value)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder)).Reload()
    names = read.Tags()["scalars"]
    return {name: [(e.step, e.value) for e in read.Scalars(name)] for name in names}


def test_tensorboard_shows_every_curve(tmp_path: Path):
    pytest.importorskip("tensorboard")
    tell(TensorBoardCallback(tmp_path / "a"), 400)
    curves = scalars(tmp_path / "a")
    steps = list(range(50, 401, 50))
    assert curves["train/loss"] == [(s, pytest.approx(report(s).loss, rel=1e-6)) for s in steps]
    assert [step for step, _ in curves["eval/auc"]] == [200, 400]
    assert curves["checkpoint/seconds"] == [(200, 0.25), (400, 0.25)]
    assert curves["memory_bytes/max"][0][1] == pytest.approx(2.1e9)
    for name in ("train/click/auc", "learning_rate/dense", "step_s/lookup", "data_wait/mean"):
        assert [step for step, _ in curves[name]] == steps
    assert curves["ids/user/held"] == [(step, 200 + step) for step in steps]
    assert curves["ids/user/fill"] == [(s, pytest.approx((200 + s) / 800)) for s in steps]
    assert curves["ids/user/unknown_share"] == [(step, pytest.approx(0.4)) for step in steps]


def test_tensorboard_forgets_what_a_later_life_takes_back(tmp_path: Path):
    pytest.importorskip("tensorboard")
    tell(TensorBoardCallback(tmp_path), 1000, until=500)
    tell(TensorBoardCallback(tmp_path), 1000, first=400, rate=0.6)
    loss = scalars(tmp_path)["train/loss"]
    assert [step for step, _ in loss] == list(range(50, 1001, 50))
    assert loss[8][1] == pytest.approx(report(450, rate=0.6).loss, rel=1e-6)


def test_tensorboard_refuses_a_folder_that_it_cannot_write(tmp_path: Path):
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write TensorBoard's events to .*file/a"):
        TensorBoardCallback(tmp_path / "file" / "a")
    with pytest.raises(ConfigError, match="'s3://b/c'; name a local folder"):
        TensorBoardCallback("s3://b/c")


@pytest.fixture
def mlflow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """MLflow's store of files, which needs no server and no data base."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return f"file://{tmp_path}/mlruns"


@pytest.mark.parametrize(
    ("error", "status"), [(None, "FINISHED"), (FAILED, "FAILED"), (RunInterrupted(2), "KILLED")]
)
def test_mlflow_has_settings_curves_and_outcome(mlflow_store: str, error, status: str):
    from mlflow import MlflowClient

    callback = MLflowCallback("clicks", mlflow_store, tags={"team": "ads"})
    tell(callback, 400, error=error)
    client = MlflowClient(mlflow_store)
    (run,) = client.search_runs([client.get_experiment_by_name("clicks").experiment_id])
    assert run.info.run_id == callback.run_id and run.info.run_name == "a"
    assert run.info.status == status and run.data.tags["team"] == "ads"
    assert run.data.params["global_batch_size"] == "1024" and run.data.params["world_size"] == "2"
    loss = client.get_metric_history(callback.run_id, "train/loss")
    expected = [(step, report(step).loss) for step in range(50, 401, 50)]
    assert [(m.step, m.value) for m in sorted(loss, key=lambda m: m.step)] == expected


def test_mlflow_takes_names_and_numbers_that_it_has_no_form_for(mlflow_store: str):
    from mlflow import MlflowClient

    callback = MLflowCallback(tracking_uri=mlflow_store)
    settings = {f"option {i} (odd)": "x" * 10_000 for i in range(150)}
    callback.on_start(replace(info(100), settings=settings))
    callback.on_window(replace(report(50), loss=math.nan, scores={"recall@10": 0.25}))
    callback.on_end(None)
    run = MlflowClient(mlflow_store).get_run(callback.run_id)
    assert run.data.metrics["train/recall_at_10"] == 0.25 and "train/loss" not in run.data.metrics
    assert len(run.data.params) == 152


def test_mlflow_that_cannot_be_reached_ends_the_run_before_training(
    tmp_path: Path, mlflow_store: str
):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"MLflowCallback cannot begin run 'a': ") as error:
        MLflowCallback(tracking_uri=f"file://{tmp_path}/file/mlruns").on_start(info(100))
    assert "\n" not in str(error.value)


def test_a_run_that_never_began_leaves_nothing(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    pytest.importorskip("tensorboard")
    TensorBoardCallback(tmp_path / "a").on_end(FAILED)
    assert not list(tmp_path.iterdir()) and not recwarn.list


def test_a_tracker_that_fails_later_is_one_warning(mlflow_store: str, tmp_path: Path):
    callback = MLflowCallback(tracking_uri=mlflow_store)
    callback.on_start(info(200))
    kept = callback.run_id
    callback.run_id = "0" * 32
    with pytest.warns(RuntimeWarning, match="MLflowCallback lost values: .*training goes on") as w:
        callback.on_window(report(50))
        callback.on_window(report(100))
    assert len(w) == 1
    callback.run_id = kept
    callback.on_window(report(150))
    callback.on_end(None)
    history = callback._client.get_metric_history(kept, "train/loss")
    assert [m.step for m in history] == [150]


@pytest.fixture
def wandb_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for offline runs; the helper process of wandb ends with the test."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    yield tmp_path
    wandb.teardown()


@pytest.mark.parametrize("error", [pytest.param(None, marks=pytest.mark.slow), FAILED])
def test_wandb_offline_has_settings_curves_and_outcome(wandb_home: Path, error):
    tell(WandbCallback("clicks", mode="offline", dir=str(wandb_home)), 400, error=error)
    # What its helper process holds is in the file when that has ended.
    sys.modules["wandb"].teardown()
    records = wandb_records(wandb_home)
    (run,) = [r.run for r in records if r.HasField("run")][:1]
    assert run.project == "clicks" and run.display_name == "a"
    config = {update.key: json.loads(update.value_json) for update in run.config.update}
    assert config["global_batch_size"] == 1024 and config["steps"] == 400
    loss = wandb_curve(records, "train/loss")
    assert loss == {step: report(step).loss for step in range(50, 401, 50)}
    (end,) = [r.exit for r in records if r.HasField("exit")]
    assert end.exit_code == (0 if error is None else 1)


def test_wandb_refuses_bad_options_before_training(wandb_home: Path):
    with pytest.raises(ConfigError, match=r"WandbCallback cannot begin run 'a': ") as error:
        WandbCallback(mode="offline", colour="red").on_start(info(100))
    assert "\n" not in str(error.value)


def test_what_is_told_beside_scores_is_no_curve():
    told = replace(
        report(50), scores={"auc": 0.7, "rows": 512.0, "buy/rows": 3.0, "auc_error": 0.1}
    )
    numbers = numbers_of("window", asdict(told))
    assert numbers["train/rows"] == told.rows and numbers["train/auc"] == 0.7
    assert not {"train/buy/rows", "train/auc_error"} & set(numbers)
    scored = Evaluation(step=50, scores={"click/auc": 0.6, "click/rows": 9}, rows=9, seconds=2.0)
    numbers = numbers_of("evaluation", asdict(scored))
    assert numbers == {"eval/click/auc": 0.6, "eval/seconds": 2.0}
