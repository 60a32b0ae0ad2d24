"""A run whose node is lost amid training, goes on with fewer ranks, and grows when a node comes.

`python -m tests.ray.elastic_nodes FOLDER` prints what the run said, and "equal tables" where it
ends as one that nothing happened to. It needs a process and a cluster of its own, as `lost_node`.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rayrec.train.callbacks import Callback
from rayrec.train.events import Resized
from tests.clicks import write_clicks
from tests.ray.lost_node import HEALTH, Moment
from tests.ray.preempted_nodes import train

# a node may be lost at any time
OFTEN: dict[str, Any] = {"failures": 3, "every": 20, "wait_s": None}


class Changes(Moment):
    """Tells, too, of every new number of ranks."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.told: list[Resized] = []

    def on_resize(self, resized: Resized) -> None:
        """The run goes on with other ranks."""
        self.told.append(resized)


def main(folder: Path) -> None:
    """Train twice: on two ranks throughout, and on two, one and two."""
    import ray
    from ray.cluster_utils import Cluster

    from tests.ray import worlds

    clicks = write_clicks(
        folder, rows_train=8000, rows_eval=500, num_features=6, num_dense=3, dim=8, cap=200, seed=3
    )
    head = {"num_cpus": 1, "_system_config": dict(HEALTH)}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    calm = train(clicks, folder / "calm", Callback(), 2, **OFTEN)
    # Ray adds a node in the main thread alone, so training takes another one.
    with ThreadPoolExecutor(1) as pool:
        # steps take their time until the run has grown
        (folder / "slow").touch()
        moment = Changes(25)
        shaken = pool.submit(train, clicks, folder / "shaken", moment, (1, 2), **OFTEN)
        assert moment.reached.wait(150)
        cluster.remove_node(node, allow_graceful=False)
        deadline = time.monotonic() + 100
        while not moment.told and time.monotonic() < deadline:
            time.sleep(0.1)
        cluster.add_node(num_cpus=1)
        while len(moment.told) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        (folder / "slow").unlink()
        result = shaken.result(200)
    print([(told.ranks_before, told.ranks, told.lost) for told in moment.told])
    print(f"{result.failures} failures, {result.resizes} resizes, {result.plan.world_size} ranks")
    worlds.compare(calm.checkpoint, result.checkpoint)
    print("equal tables")
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
