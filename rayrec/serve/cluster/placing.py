"""Room on a cluster for the replicas of a server, spread over its nodes.

A placement group holds the room: Ray puts its parts on as many nodes as it can, and finds another
place for a part whose node is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rayrec.driver.cluster import Cluster
from rayrec.driver.rooms import comes_in_time
from rayrec.errors import ConfigError
from rayrec.serve.server.settings import ServerSettings

ROOM_S = 300.0  # how long a server waits for nodes, and for other work to end


@contextmanager
def room_for(
    settings: ServerSettings, cluster: Cluster, check: Callable[[], None]
) -> Iterator[Any]:
    """Hold a placement group with one part per replica; it is given back at the end.

    Args:
        check: called several times a second while there is no room; its error ends the wait.
    Raises:
        ConfigError: the cluster is too small, or other work holds it for `ROOM_S` seconds.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    each, wanted = settings.threads, settings.replicas
    nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    fit = sum(int(cpus) // each for cpus in nodes)
    what = (
        f"{wanted} replicas of {each} CPUs have no room on the cluster, whose {len(nodes)} nodes "
        f"hold {fit}"
    )
    if fit < wanted and cluster.fixed:
        raise ConfigError(f"{what}. Give fewer --replicas or --threads, or add nodes.")
    group = placement_group([{"CPU": each}] * wanted, strategy="SPREAD")
    try:
        if not comes_in_time(group, ROOM_S, check):
            raise ConfigError(
                f"{what}, after {ROOM_S:.0f} s. End other work, give fewer --replicas, or add "
                "nodes."
            )
        yield group
    finally:
        remove_placement_group(group)
