"""`RayMetrics`: a run's numbers among Ray's own metrics, for Prometheus and Grafana.

Every node of a Ray cluster exports metrics over HTTP; those set here appear at the driver's node
within ten seconds. `METRICS` lists them, and the board and the alerts in `deploy/monitoring` query
them: Ray puts ray_ before every name, and _total behind a counter. Ray forgets a gauge that is not
set again for two of its report intervals, so a thread sets all of them every `REFRESH_S` seconds
while the run trains, also while it stands still. After the end the values last for those two
intervals (20 s by default), or less where the driver's process ends before.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal, NamedTuple

from rayrec.errors import ConfigError
from rayrec.train.callbacks import Callback, RunInfo
from rayrec.train.events import Evaluation, ProgressReport, Saved
from rayrec.watch.event_callback import outcome_of
from rayrec.watch.numbers import finite, only_scores, train_scores

REFRESH_S = 2.0


class RayMetric(NamedTuple):
    """One metric.

    Attributes:
        kind: a gauge is set, a counter only grows.
        about: what it is, with its unit.
        labels: besides `run`, the name of the run.
    """

    kind: Literal["gauge", "counter"]
    about: str
    labels: tuple[str, ...] = ()


METRICS = {
    "rayrec_running": RayMetric("gauge", "1 while the run trains, 0 after its end"),
    "rayrec_step": RayMetric("gauge", "global steps done"),
    "rayrec_steps_planned": RayMetric("gauge", "global steps at which the run ends"),
    "rayrec_rows": RayMetric("counter", "rows trained on"),
    "rayrec_rows_per_second": RayMetric("gauge", "rows per second of the last window"),
    "rayrec_loss": RayMetric("gauge", "mean loss of the last window"),
    "rayrec_train_score": RayMetric("gauge", "score of the last window's rows", ("score",)),
    "rayrec_eval_score": RayMetric("gauge", "score of the last evaluation", ("score",)),
    "rayrec_window_score": RayMetric(
        "gauge", "score of the last window in time, before it is trained on", ("score",)
    ),
    "rayrec_eval_seconds": RayMetric("gauge", "seconds of the last evaluation"),
    "rayrec_step_part_seconds": RayMetric("gauge", "seconds of a mean step by part", ("part",)),
    "rayrec_data_wait_ratio": RayMetric("gauge", "share of time in wait for data", ("rank",)),
    "rayrec_memory_bytes": RayMetric("gauge", "resident bytes of a rank's process", ("rank",)),
    "rayrec_learning_rate": RayMetric("gauge", "learning rate of the last step", ("optimizer",)),
    "rayrec_checkpoints": RayMetric("counter", "checkpoints that are complete"),
    "rayrec_checkpoint_step": RayMetric("gauge", "step of the newest checkpoint of this life"),
    "rayrec_checkpoint_seconds": RayMetric("gauge", "standstill for the last checkpoint, seconds"),
    # A counter that first appears with 1 has no increase for Prometheus, so this is a gauge.
    "rayrec_failed": RayMetric("gauge", "1 when the run ended by an error, else 0"),
}


class RayMetrics(Callback):
    """Sets Ray metrics.

    Args:
        run: the label `run` of every metric; None takes the run's name.
    Raises:
        ConfigError: when training starts without Ray, with `ScalingConfig(num_workers=0)`.
    """

    def __init__(self, run: str | None = None) -> None:
        self._wanted, self._run = run, run or ""
        self._metrics: dict[str, Any] = {}
        self._rows = 0
        # (metric, its labels) -> the newest value of every gauge
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._lock, self._over = threading.Lock(), threading.Event()

    def on_start(self, info: RunInfo) -> None:
        """Make the metrics, and say that the run trains."""
        import ray
        from ray.util.metrics import Counter, Gauge

        if not ray.is_initialized():
            raise ConfigError(
                "RayMetrics needs Ray, and this run has none (num_workers=0); leave RayMetrics "
                "out, or give num_workers."
            )
        self._run, self._rows = self._wanted or info.name, 0
        kinds = {"gauge": Gauge, "counter": Counter}
        for name, metric in METRICS.items():
            keys = ("run", *metric.labels)
            self._metrics[name] = kinds[metric.kind](name, metric.about, tag_keys=keys)
        self._values, self._over = {}, threading.Event()
        self._set("rayrec_running", 1)
        self._set("rayrec_step", info.first_step)
        self._set("rayrec_steps_planned", info.steps)
        self._set("rayrec_checkpoint_step", info.first_step)
        self._set("rayrec_failed", 0)
        refresh = threading.Thread(
            target=self._refresh, args=(self._over,), name="rayrec-metrics", daemon=True
        )
        refresh.start()

    def on_step(self, step: int, trainer: Any = None) -> None:
        """Tell how far the run is."""
        self._set("rayrec_step", step)

    def on_window(self, report: ProgressReport, trainer: Any = None) -> None:
        """Tell a window."""
        self._set("rayrec_step", report.step)
        self._add("rayrec_rows", report.rows - self._rows)
        self._rows = report.rows
        self._set("rayrec_rows_per_second", report.rows_per_s)
        self._set("rayrec_loss", report.loss)
        self._set_all("rayrec_train_score", "score", train_scores(asdict(report)))
        self._set_all("rayrec_learning_rate", "optimizer", report.learning_rates)
        self._set_all("rayrec_step_part_seconds", "part", report.step_s)
        self._set_all("rayrec_data_wait_ratio", "rank", _by_rank(report.data_wait))
        self._set_all("rayrec_memory_bytes", "rank", _by_rank(report.memory_bytes))

    def on_evaluation(self, evaluation: Evaluation, trainer: Any = None) -> None:
        """Tell an evaluation."""
        name = "rayrec_eval_score" if evaluation.window is None else "rayrec_window_score"
        self._set_all(name, "score", only_scores(evaluation.scores))
        self._set("rayrec_eval_seconds", evaluation.seconds)

    def on_checkpoint(self, saved: Saved, trainer: Any = None) -> None:
        """Count a checkpoint."""
        self._add("rayrec_checkpoints", 1)
        self._set("rayrec_checkpoint_step", saved.step)
        self._set("rayrec_checkpoint_seconds", saved.seconds)

    def on_end(self, error: BaseException | None, trainer: Any = None) -> None:
        """Set the metrics of the end: the run trains no more, and has failed or not."""
        if not self._metrics:
            return
        self._set("rayrec_running", 0)
        self._set("rayrec_failed", outcome_of(error) == "failed")
        self._over.set()

    def _refresh(self, over: threading.Event) -> None:
        while not over.wait(REFRESH_S):
            with self._lock:
                for (name, labels), value in self._values.items():
                    self._metrics[name].set(value, tags=dict(labels))

    def _set(self, name: str, value: float, **labels: str) -> None:
        for finite_value in finite({name: value}).values():
            tags = {"run": self._run, **labels}
            with self._lock:
                self._values[name, tuple(tags.items())] = finite_value
                self._metrics[name].set(finite_value, tags=tags)

    def _set_all(self, name: str, label: str, values: Mapping[str, float]) -> None:
        for each, value in values.items():
            self._set(name, value, **{label: each})

    def _add(self, name: str, value: float) -> None:
        # Ray refuses to count nothing.
        if value > 0:
            self._metrics[name].inc(value, tags={"run": self._run})


def _by_rank(values: tuple[float, ...]) -> dict[str, float]:
    return {str(rank): value for rank, value in enumerate(values)}
