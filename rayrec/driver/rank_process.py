"""Process of a rank: start of a Ray actor at a place of the cluster, its end, what Ray tells."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from rayrec.driver.scaling import ScalingConfig
from rayrec.errors import ConfigError, as_user_mistake
from rayrec.machine.workers import is_ray_worker
from rayrec.train.seat import RankAddress


def start_process(scaling: ScalingConfig, group: Any, bundle: int) -> Any:
    """Start an actor in a placement group, which imports torch at once, and return its handle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

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
        # the head keeps a record of each call, of which a run of weeks has millions
        enable_task_events=False,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=bundle
        ),
    )
    # torch's profiler writes to stderr else
    return options.remote({"OMP_NUM_THREADS": str(scaling.threads), "KINETO_LOG_LEVEL": "99"})


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
    if address is not None and address.node_id == here and is_ray_worker(address.pid):
        with suppress(OSError):
            os.kill(address.pid, signal.SIGKILL)
    ray.kill(actor, no_restart=True)


def told(error: Any) -> dict[str, Any]:
    """Return what a call that raised tells: cause in one line, traceback, and a user's mistake."""
    raised = error.cause if error.cause is not None else error
    words = str(raised).strip()
    cause = f"{type(raised).__name__}: {(words.splitlines() or [''])[0]}"
    mistake = as_user_mistake(raised, words)
    final = mistake is not None
    return {"cause": cause, "traceback": str(error), "mistake": mistake, "final": final}


def stacks_of(actors: Sequence[Any], addresses: Sequence[RankAddress], timeout_s: float) -> str:
    """Return the stack traces of all ranks as text; a rank that gives none in time is named."""
    import ray

    asked = [actor.stacks.remote() for actor in actors]
    # A rank that hangs in native code gives no stack; the others still show where it is waited for.
    ready, _ = ray.wait(asked, num_returns=len(asked), timeout=timeout_s)
    lines = []
    for rank, reference in enumerate(asked):
        address = addresses[rank]
        lines.append(f"-- rank {rank} on {address.host}, process {address.pid}")
        if reference not in ready:
            lines.append(f"no answer in {timeout_s:.0f} s")
            continue
        try:
            lines.append(ray.get(reference))
        except ray.exceptions.RayError as error:
            lines.append(f"{type(error).__name__}: {death_line(error)}")
    return "\n".join(lines)


def death_line(error: BaseException) -> str:
    """Return the cause of an actor's death in one line, taken from Ray's long message."""
    text = str(error)
    low = text.lower()
    if "node has died" in low or "node was terminated" in low or "node failure" in low:
        return "its node died or lost its connection"
    if "ActorUnavailable" in type(error).__name__:
        # without restarts Ray says so when it cannot reach the actor's raylet, or the head that
        # would know more; it never comes back
        return (
            "it cannot be reached: its process or its node's raylet was killed, or the node lost "
            "its connection"
        )
    if "OutOfMemory" in type(error).__name__ or "memory monitor" in low or "low memory" in low:
        return "its process was killed because the node ran out of memory"
    silent = ("worker unexpectedly exits", "exit_detail", "worker process has died")
    if any(words in low for words in silent):
        return (
            "its process died without a word (killed by SIGKILL or the kernel's OOM killer, or "
            "crashed in native code)"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"its process died: {lines[-1] if lines else type(error).__name__}"
