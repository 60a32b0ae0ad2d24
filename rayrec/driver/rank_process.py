"""Process of a rank: start of a Ray actor at a place of the cluster, and its end."""

from __future__ import annotations

import math
import os
import signal
import sys
from contextlib import suppress
from functools import cache
from typing import Any

from rayrec.driver.scaling import ScalingConfig
from rayrec.errors import ConfigError
from rayrec.train.seat import RankAddress


def start_process(scaling: ScalingConfig, group: Any, bundle: int) -> Any:
    """Start an actor in a placement group, which imports torch at once, and return its handle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    threads = str(max(1, math.floor(scaling.cpus_per_worker)))
    each = scaling.bundle
    extra = {name: amount for name, amount in each.items() if name not in ("CPU", "GPU")}
    options = _rank_actor().options(
        num_cpus=each["CPU"],
        num_gpus=each.get("GPU", 0),
        resources=extra or None,
        max_restarts=0,
        max_task_retries=0,
        # a poll must pass while another call waits
        max_concurrency=4,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=bundle
        ),
    )
    # torch's profiler writes to stderr else
    return options.remote({"OMP_NUM_THREADS": threads, "KINETO_LOG_LEVEL": "99"})


@cache
def _rank_actor() -> Any:
    # the head is given the class once for each cluster; made anew, Ray would give it at every call
    import ray
    from ray import cloudpickle

    try:
        from actors import rank
    except ImportError as error:
        found = getattr(sys.modules.get("actors"), "__file__", None)
        raise ConfigError(
            f"the module 'actors' is {found} here, not the package that is installed with rayrec; "
            "rename it, or start from another folder."
        ) from error
    # ranks get the class itself, since there another module may have that name, too
    cloudpickle.register_pickle_by_value(rank)
    return ray.remote(rank.RankActor)


def end_process(actor: Any, address: RankAddress | None) -> None:
    """End the process of an actor, whatever it does."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    # Ray asks a worker to end before it kills it, and waits five seconds for a stopped one.
    # While Ray still counts the actor, the number of its process is of no other process.
    if address is not None and address.node_id == here and _is_ray_worker(address.pid):
        with suppress(OSError):
            os.kill(address.pid, signal.SIGKILL)
    ray.kill(actor, no_restart=True)


def _is_ray_worker(pid: int) -> bool:
    """Return True if a process of this machine is a Ray worker."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return b"RAY_RAYLET_PID=" in file.read()
    except OSError:
        return False
