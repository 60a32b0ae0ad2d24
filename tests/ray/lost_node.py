"""A run on a cluster of two nodes, of which one is lost amid training and another one comes.

`python -m tests.ray.lost_node FOLDER` prints "same tables" where the run ends as one that nothing
happened to. It needs a process and a cluster of its own: Ray's test cluster with fast health
checks, whose nodes all live on this machine.
"""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rayrec.data.synthetic import SyntheticPaths
from rayrec.train.callbacks import Callback
from tests.clicks import write_clicks

HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


class Moment(Callback):
    """In the driver: tells that a step was reached."""

    def __init__(self, at: int) -> None:
        self._at, self.reached = at, threading.Event()

    def on_step(self, step: int, trainer: Any = None) -> None:
        """It is told once and for all."""
        if step >= self._at:
            self.reached.set()


def slow(clicks: SyntheticPaths) -> Any:
    """The tiny model, which takes its time, so that a node is lost between two steps."""
    from tests.ray import worlds

    build = worlds.recipe(clicks)

    def model() -> Any:
        module = build()
        module.register_forward_pre_hook(lambda _module, _inputs: time.sleep(0.1))
        return module

    return model


def train(clicks: SyntheticPaths, folder: Path, callback: Callback, failures: int) -> Any:
    """One run of two ranks, which waits for room where a node is lost."""
    from rayrec.driver import FailureConfig
    from rayrec.train.checkpoint_config import CheckpointConfig
    from tests.ray import worlds

    return worlds.driver(
        clicks,
        2,
        model=slow(clicks),
        steps=24,
        batch=256,
        storage_path=str(folder),
        checkpoint=CheckpointConfig(every_n_steps=5),
        failure=FailureConfig(max_failures=failures),
        placement_timeout_s=60.0 if failures > 1 else None,
        plan="row_wise",
        callbacks=(callback,),
        progress="plain",
    ).fit()


def main(folder: Path) -> None:
    """Train three times: undisturbed, with another node for the lost one, and without one."""
    import ray
    from ray.cluster_utils import Cluster

    from tests.ray import worlds

    clicks = write_clicks(
        folder, rows_train=6007, rows_eval=500, num_features=6, num_dense=3, dim=8, cap=200, seed=3
    )
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": dict(HEALTH)}
    )
    node = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    calm = train(clicks, folder / "calm", Callback(), 0)
    # Ray adds a node in the main thread alone, so training takes another one.
    with ThreadPoolExecutor(1) as pool:
        moment = Moment(12)
        shaken = pool.submit(train, clicks, folder / "shaken", moment, 2)
        assert moment.reached.wait(100)
        cluster.remove_node(node, allow_graceful=False)
        time.sleep(3)
        node = cluster.add_node(num_cpus=1)
        result = shaken.result(150)
        print(result.failures, result.recoveries, f"{result.seconds_lost:.1f} s")
        assert result.failures == 1
        same = worlds.digests(calm.checkpoint) == worlds.digests(result.checkpoint)
        print("same tables" if same else "OTHER TABLES")
        moment = Moment(12)
        alone = pool.submit(train, clicks, folder / "alone", moment, 1)
        assert moment.reached.wait(100)
        cluster.remove_node(node, allow_graceful=False)
        print(type(alone.exception(100)).__name__, alone.exception())
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
