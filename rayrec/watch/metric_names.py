"""The metrics of a run for Prometheus: what each is called, what it means, and its labels.

`rayrec.driver.RayMetrics` sets them. The Grafana board and the alerts in `deploy/monitoring` query
them, and a test compares the names. Ray puts `ray_` before every name, and `_total` behind a
counter. Standard library only.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Metric(NamedTuple):
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
    "rayrec_running": Metric("gauge", "1 while the run trains, 0 after its end"),
    "rayrec_step": Metric("gauge", "global steps done"),
    "rayrec_steps_planned": Metric("gauge", "global steps at which the run ends"),
    "rayrec_rows": Metric("counter", "rows trained on"),
    "rayrec_rows_per_second": Metric("gauge", "rows per second of the last window"),
    "rayrec_loss": Metric("gauge", "mean loss of the last window"),
    "rayrec_train_score": Metric("gauge", "score of the last window's rows", ("score",)),
    "rayrec_eval_score": Metric("gauge", "score of the last evaluation", ("score",)),
    "rayrec_eval_seconds": Metric("gauge", "seconds of the last evaluation"),
    "rayrec_step_part_seconds": Metric("gauge", "seconds of a mean step by part", ("part",)),
    "rayrec_data_wait_ratio": Metric("gauge", "share of time in wait for data", ("rank",)),
    "rayrec_memory_bytes": Metric("gauge", "resident bytes of a rank's process", ("rank",)),
    "rayrec_learning_rate": Metric("gauge", "learning rate of the last step", ("optimizer",)),
    "rayrec_checkpoints": Metric("counter", "checkpoints that are complete"),
    "rayrec_checkpoint_step": Metric("gauge", "step of the newest checkpoint of this life"),
    "rayrec_checkpoint_seconds": Metric("gauge", "standstill for the last checkpoint, seconds"),
    # A counter that first appears with 1 has no increase for Prometheus, so this is a gauge.
    "rayrec_failed": Metric("gauge", "1 when the run ended by an error, else 0"),
}
