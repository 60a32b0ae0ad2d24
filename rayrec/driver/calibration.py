"""Measures a cluster: its ranks are started as for training, and leave a topology.

topology = calibrate(ScalingConfig(num_workers=8))
Path("topology.json").write_text(topology.to_json())
"""

from __future__ import annotations

from collections.abc import Callable

from rayrec.driver.controller import Controller
from rayrec.driver.planning import discover
from rayrec.driver.rank_group import Prepared, RankGroup
from rayrec.driver.run import Rules
from rayrec.driver.scaling import ScalingConfig
from rayrec.errors import ConfigError
from rayrec.layout import Topology


def calibrate(
    scaling: ScalingConfig,
    say: Callable[[str], None] = lambda line: None,
    *,
    timeout_s: float = 300.0,
    setup_timeout_s: float = 120.0,
) -> Topology:
    """Measure the ranks that Ray places, and return their topology with the measured constants.

    Args:
        scaling: number and resources of the ranks, the same as for the training.
        say: receives a line about every step of the calibration.
        timeout_s: bound on every collective. setup_timeout_s: bound on the start of the ranks.
    Raises:
        ConfigError: the ranks do not fit the cluster.
        TrainingFailed: a rank failed.
    """

    def prepare(group: RankGroup) -> Prepared:
        from rayrec.calibration.task import CalibrateTask

        return Prepared(CalibrateTask(topology=discover(group)))

    def on_event(event: object) -> None:
        if isinstance(event, str):
            say(event)

    if scaling.most < 1:
        raise ConfigError(
            "calibration measures the ranks of a cluster; give num_workers of at least 1 (--ranks)."
        )
    # A calibration has nothing to save, so a signal ends it at once.
    rules = Rules(
        scaling=scaling, timeout_s=timeout_s, setup_timeout_s=setup_timeout_s, obeys_stop=False
    )
    topology: Topology = Controller(rules, prepare, on_event).run().results[0]
    return topology
