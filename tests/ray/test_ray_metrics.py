"""A run's numbers as Prometheus sees them: scraped from Ray's own port over HTTP."""

from __future__ import annotations

import time
import urllib.request
from dataclasses import asdict
from pathlib import Path

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from rayrec.data.synthetic import SyntheticPaths
from rayrec.driver import CheckpointConfig, EvaluationConfig, RayMetrics, Result
from rayrec.driver.ray_metrics import METRICS
from rayrec.errors import TrainingFailed
from rayrec.train.callbacks import Callback
from rayrec.train.events import Evaluation
from rayrec.watch.numbers import only_scores, train_scores
from tests.ray import worlds
from tests.watched import exported, info

pytestmark = pytest.mark.usefixtures("cluster")

# (metric without Ray's prefix, label besides run) -> value
Samples = dict[tuple[str, str], float]


def scrape(run: str) -> Samples:
    """The samples of a run from the port at which this node's agent exports metrics."""
    (node,) = [node for node in ray.nodes() if node["Alive"]]
    url = f"http://127.0.0.1:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=5) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples: Samples = {}
    for family in families:
        for sample in family.samples:
            if sample.labels.get("run") == run:
                name = sample.name.removeprefix("ray_").removesuffix("_total")
                label = [sample.labels[label] for label in METRICS[name].labels]
                assert sample.name == exported(name)
                assert family.type == METRICS[name].kind and family.documentation
                samples[name, *label, *([""] * (1 - len(label)))] = sample.value
    return samples


def scrape_until(run: str, name: str, value: float) -> Samples:
    """The samples of a run, once one of them has a value; the agent hears of it every 2 s."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        samples = scrape(run)
        if samples.get((name, "")) == value:
            return samples
        time.sleep(0.2)
    raise TimeoutError(f"{name} of {run} is not {value}: {samples}")


class Kept(Callback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.saved, self.evaluations = [], []

    def on_checkpoint(self, saved, trainer=None) -> None:
        self.saved.append(saved)

    def on_evaluation(self, evaluation, trainer=None) -> None:
        self.evaluations.append(evaluation)


@pytest.mark.slow
def test_prometheus_sees_every_number_of_a_run(clicks: SyntheticPaths, tmp_path: Path):
    kept = Kept()
    result: Result = worlds.driver(
        clicks,
        1,
        storage_path=str(tmp_path),
        name="scraped",
        checkpoint=CheckpointConfig(every_n_steps=6),
        evaluation=EvaluationConfig(every_n_steps=6),
        callbacks=(RayMetrics(), kept),
    ).fit()
    samples = scrape_until("scraped", "rayrec_running", 0)
    assert {name for name, _ in samples} == set(METRICS) - {"rayrec_window_score"}  # no windows
    last, evaluation = result.reports[-1], kept.evaluations[-1]
    expected: Samples = {
        ("rayrec_running", ""): 0,
        ("rayrec_step", ""): 12,
        ("rayrec_steps_planned", ""): 12,
        ("rayrec_rows", ""): 6007,
        ("rayrec_rows_per_second", ""): last.rows_per_s,
        ("rayrec_loss", ""): last.loss,
        ("rayrec_eval_seconds", ""): evaluation.seconds,
        ("rayrec_checkpoints", ""): len(kept.saved),
        ("rayrec_checkpoint_seconds", ""): kept.saved[-1].seconds,
        ("rayrec_checkpoint_step", ""): 12,
        ("rayrec_failed", ""): 0,
    }
    by_label = {
        "rayrec_train_score": train_scores(asdict(last)),
        "rayrec_eval_score": only_scores(evaluation.scores),
        "rayrec_step_part_seconds": last.step_s,
        "rayrec_data_wait_ratio": {"0": last.data_wait[0]},
        "rayrec_memory_bytes": {"0": last.memory_bytes[0]},
        "rayrec_learning_rate": last.learning_rates,
    }
    for name, values in by_label.items():
        expected |= {(name, label): value for label, value in values.items()}
    assert len(kept.saved) >= 2 and len(kept.evaluations) >= 2
    assert samples == {key: pytest.approx(value) for key, value in expected.items()}


@pytest.mark.slow
def test_a_failure_is_seen(clicks: SyntheticPaths, tmp_path: Path):
    def on_step(rank: int, step: int) -> None:
        if step == 5:
            raise OSError("the disk is gone")

    model = worlds.misbehaving(clicks, tmp_path, on_step)
    with pytest.raises(TrainingFailed, match="the disk is gone"):
        worlds.driver(clicks, 1, model=model, callbacks=(RayMetrics("failing"),)).fit()
    samples = scrape_until("failing", "rayrec_failed", 1)
    assert samples["rayrec_running", ""] == 0 and samples["rayrec_step", ""] <= 5


@pytest.mark.slow
def test_a_run_that_stands_still_is_seen_all_the_while():
    """Ray forgets a gauge after two report intervals of the cluster's 2 s."""
    metrics = RayMetrics("still")
    metrics.on_start(info(100))
    metrics.on_evaluation(Evaluation(step=0, scores={"auc": 0.75}, rows=10, seconds=0.5))
    scrape_until("still", "rayrec_running", 1)
    time.sleep(7)
    samples = scrape("still")
    assert samples["rayrec_eval_score", "auc"] == 0.75
    assert samples["rayrec_steps_planned", ""] == 100 and samples["rayrec_running", ""] == 1
    metrics.on_end(None)
    scrape_until("still", "rayrec_running", 0)
