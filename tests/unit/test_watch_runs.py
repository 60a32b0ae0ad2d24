"""Runs of a real driver, with one rank in this process, and what every watcher has of them."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import ray

from rayrec.data.synthetic import SyntheticPaths
from rayrec.driver import CheckpointConfig, Driver, EvaluationConfig, RayMetrics
from rayrec.errors import ConfigError, RunInterrupted, TrainingFailed
from rayrec.layout import ShardingPlan
from rayrec.train.callbacks import Callback
from rayrec.watch import (
    EventLog,
    MLflowCallback,
    TensorBoardCallback,
    WandbCallback,
    read_events,
    write_run_page,
)
from tests.clicks import TWELVE_STEPS, write_clicks
from tests.unit.local_runs import STEPS, acting, driver
from tests.watched import wandb_curve, wandb_records


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> SyntheticPaths:
    return write_clicks(tmp_path_factory.mktemp("clicks"), **TWELVE_STEPS)


def watched(clicks: SyntheticPaths, storage: Path, *callbacks: Callback, **run: Any) -> Driver:
    """A tiny run that scores every 6 steps and reports all the while."""
    options = {"evaluation": EvaluationConfig(every_n_steps=6), "report_every_s": 0.001}
    return driver(clicks, storage, callbacks=callbacks, **(options | run))


def test_the_log_has_what_the_result_has(clicks: SyntheticPaths, tmp_path: Path):
    result = watched(clicks, tmp_path).fit()  # every run with a folder writes it
    events = read_events(tmp_path / "run")
    start = events.start.values
    assert result.hindsight is not None
    assert start["predicted"] == [asdict(rank) for rank in result.hindsight.predicted]
    assert ShardingPlan.from_json(json.dumps(start["plan"])) == result.plan
    assert start["settings"]["global_batch_size"] == 128 and start["steps"] == STEPS
    windows = events.of("window")
    assert len(windows) == len(result.reports) > 3
    for window, report in zip(windows, result.reports, strict=True):
        assert window.step == report.step and window.values["loss"] == report.loss
        assert window.values["rows"] == report.rows and window.values["auc"] == report.auc
        assert window.values["step_s"] == report.step_s and window.values["step_s"]
        assert window.values["learning_rates"] == report.learning_rates
        assert window.values["memory_bytes"] == list(report.memory_bytes)
    evaluations = events.of("evaluation")
    assert [e.step for e in evaluations] == [e.step for e in result.evaluations]
    assert evaluations[-1].values["scores"] == dict(result.evaluations[-1].scores)
    saved = events.of("checkpoint")
    assert [c.step for c in saved] == [4, 8, 12]
    assert saved[-1].values["path"] == result.checkpoint
    assert events.events[-1].values == {"outcome": "done"} and events.events[-1].step == STEPS


@pytest.mark.slow
def test_lives_of_a_real_run_are_joined_and_drawn(clicks: SyntheticPaths, tmp_path: Path):
    def fail() -> None:
        raise MemoryError("no room")

    failing = acting(clicks, 11, fail)
    log = EventLog(tmp_path / "run")
    with pytest.raises(TrainingFailed, match="memory of this machine"):
        watched(clicks, tmp_path, log, model=failing).fit()
    first = read_events(tmp_path / "run")
    (failure,) = first.of("failure")
    assert failure.values["rank"] == 0 and failure.step == 10
    assert failure.values["cause"].startswith("TrainingFailed: the memory of this machine")
    result = watched(clicks, tmp_path, log, resume_from="latest").fit()
    events = read_events(tmp_path / "run")
    assert [start.step for start in events.of("start")] == [0, 8]
    steps = [window.step for window in events.of("window")]
    assert steps == sorted(set(steps)) and steps[-1] == STEPS
    later = [w for w in events.of("window") if w.life == 1]
    assert [w.values["loss"] for w in later] == [report.loss for report in result.reports]
    assert all(w.step <= 8 for w in events.of("window") if w.life == 0)
    text = Path(write_run_page([tmp_path / "run"], tmp_path / "page.html")).read_text()
    assert "continued on 1 ranks" in text and '<g class="failure' in text
    assert "<figcaption>Loss" in text and "<td>lookup</td>" in text


def test_a_run_without_a_folder_has_the_log_that_it_is_given(
    clicks: SyntheticPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    nowhere: dict[str, Any] = {"storage_path": None, "checkpoint": CheckpointConfig()}
    watched(clicks, tmp_path, **nowhere).fit()
    assert not list(tmp_path.iterdir())
    watched(clicks, tmp_path, EventLog("mine"), **nowhere).fit()
    assert read_events("mine").of("window") and [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_a_folder_has_one_log_also_where_a_callback_names_it(
    clicks: SyntheticPaths, tmp_path: Path
):
    watched(clicks, tmp_path, EventLog(tmp_path / "run")).fit()
    events = read_events(tmp_path / "run")
    assert len(events.of("start")) == 1 and len(events.of("end")) == 1


def test_a_run_that_a_signal_stopped_is_stopped(clicks: SyntheticPaths, tmp_path: Path):
    class Interrupt(Callback):
        def on_checkpoint(self, saved, trainer=None) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    log = EventLog(tmp_path / "run")
    with pytest.raises(RunInterrupted):
        watched(clicks, tmp_path, log, Interrupt(), steps=100_000).fit()
    events = read_events(tmp_path / "run")
    assert events.of("end")[0].values == {"outcome": "stopped"} and not events.of("failure")
    assert events.of("end")[0].step == events.of("checkpoint")[-1].step


def test_tensorboard_has_the_curves_of_a_real_run(clicks: SyntheticPaths, tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = watched(clicks, tmp_path, TensorBoardCallback(tmp_path / "board")).fit()
    read = EventAccumulator(str(tmp_path / "board")).Reload()
    loss = [(event.step, event.value) for event in read.Scalars("train/loss")]
    assert loss == [(r.step, pytest.approx(r.loss, rel=1e-6)) for r in result.reports]
    auc = read.Scalars("eval/auc")
    assert [(e.step, e.value) for e in auc] == [
        (e.step, pytest.approx(e.scores["auc"], rel=1e-6)) for e in result.evaluations
    ]


@pytest.mark.slow
def test_mlflow_has_the_curves_of_a_real_run(
    clicks: SyntheticPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    callback = MLflowCallback("clicks", f"file://{tmp_path}/mlruns")
    result = watched(clicks, tmp_path, callback).fit()
    from mlflow import MlflowClient

    client = MlflowClient(f"file://{tmp_path}/mlruns")
    loss = client.get_metric_history(callback.run_id, "train/loss")
    assert {m.step: m.value for m in loss} == {r.step: r.loss for r in result.reports}
    run = client.get_run(callback.run_id)
    assert run.info.status == "FINISHED" and run.data.params["global_batch_size"] == "128"


@pytest.mark.slow
def test_wandb_is_told_of_a_real_run(
    clicks: SyntheticPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    result = watched(
        clicks, tmp_path, WandbCallback("clicks", mode="offline", dir=str(tmp_path))
    ).fit()
    # What its helper process holds is in the file when that has ended.
    wandb.teardown()
    records = wandb_records(tmp_path)
    assert wandb_curve(records, "train/loss") == {r.step: r.loss for r in result.reports}
    evaluated = wandb_curve(records, "eval/auc")
    assert evaluated == {e.step: e.scores["auc"] for e in result.evaluations}


def test_ray_metrics_without_ray_are_refused_before_training(
    clicks: SyntheticPaths, tmp_path: Path
):
    if ray.is_initialized():  # by a test before this one in the same process
        ray.shutdown()
    with pytest.raises(ConfigError, match=r"RayMetrics needs Ray.*num_workers=0"):
        watched(clicks, tmp_path, RayMetrics()).fit()
    assert not list(tmp_path.glob("run/step-*"))
