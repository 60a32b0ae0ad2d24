"""The start of a `RankGroup`: one actor on each bundle of a placement group.

The actors are sorted so that the ranks of one host are neighbours, the driver's host first. They
import torch while the caller goes on, and are killed when the block ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rayrec.driver.answers import answers
from rayrec.driver.config import ScalingConfig
from rayrec.driver.rank_group import RankGroup
from rayrec.train.seat import RankAddress


@contextmanager
def started(
    scaling: ScalingConfig,
    placement: Any,
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> Iterator[RankGroup]:
    """Actors on the bundles of `placement` inside the block; they are killed at its end.

    They import torch while the caller goes on.

    Args:
        check: called several times a second while the group waits; what it raises ends the wait.
    Raises:
        TrainingFailed: an actor did not come up within `timeout_s` seconds.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from actors.rank import RankActor

    threads = str(max(1, math.floor(scaling.cpus_per_worker)))
    bundle = scaling.bundle
    extra = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    actors = []
    try:
        for index in range(scaling.num_workers):
            options = ray.remote(RankActor).options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                resources=extra or None,
                max_restarts=0,
                max_task_retries=0,
                # a poll must pass while another call waits
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement, placement_group_bundle_index=index
                ),
            )
            # torch's profiler writes to stderr else
            actors.append(options.remote({"OMP_NUM_THREADS": threads, "KINETO_LOG_LEVEL": "99"}))
        asked = {rank: actor.describe.remote() for rank, actor in enumerate(actors)}
        addresses = answers(asked, (), len(actors), "start", timeout_s, check)
        order = neighbours(addresses, ray.get_runtime_context().get_node_id())
        yield RankGroup([actors[i] for i in order], [addresses[i] for i in order], scaling, check)
    finally:
        for actor in actors:
            ray.kill(actor, no_restart=True)


def neighbours(addresses: Sequence[RankAddress], here: str) -> list[int]:
    """Order of the actors by node: those of the node `here` first, then by address and node."""

    def key(i: int) -> tuple[bool, str, str, int]:
        address = addresses[i]
        return address.node_id != here, address.host, address.node_id, i

    return sorted(range(len(addresses)), key=key)
