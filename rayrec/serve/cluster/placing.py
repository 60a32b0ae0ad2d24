"""Room on a cluster for the replicas of a server, spread over its nodes.

A placement group holds the room: Ray puts its parts on as many nodes as it can, and finds another
place for a part whose node is lost.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rayrec.driver.cluster import Cluster
from rayrec.driver.head import head
from rayrec.driver.rooms import comes_in_time, remove_group
from rayrec.errors import ConfigError
from rayrec.serve.server.settings import ServerSettings

ROOM_S = 300.0  # how long a server waits for nodes, and for other work to end


class NodePlace(NamedTuple):
    """Node of a cluster: Ray's id of it, and its address."""

    node: str
    host: str


Places = dict[NodePlace, tuple[int, ...]]  # the parts of a placement group on each node


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
    from ray.util.placement_group import placement_group

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
        # aside, since a head that is gone would not answer
        head.aside(partial(remove_group, group))
        head.settle()


def places_of(group: Any, bundles: Iterable[int], check: Callable[[], None]) -> Places:
    """Return the nodes where some parts of a placement group lie, each with its parts.

    It is empty while one of them has no place, or lies on a node that is dead.

    Args:
        check: called several times a second while the head is waited for; its error ends the wait.
    """
    import ray
    from ray.util.placement_group import placement_group_table

    nodes = head.answer(ray.nodes, check)
    hosts = {one["NodeID"]: one["NodeManagerAddress"] for one in nodes if one["Alive"]}
    table = head.answer(lambda: placement_group_table(group), check).get("bundles_to_node_id", {})
    places: Places = {}
    for bundle in bundles:
        node = str(table.get(bundle, ""))
        if node not in hosts:
            return {}
        place = NodePlace(node, hosts[node])
        places[place] = (*places.get(place, ()), bundle)
    return places


def start_on(place: NodePlace, what: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function in a task on a node, or make an actor of a class there.

    The CPUs that it needs are held by the placement group.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(place.node, soft=False)
    return ray.remote(what).options(num_cpus=0, scheduling_strategy=there).remote(*args, **options)


def kill(pid: int) -> None:
    """Kill a process of Ray of this node; `ray.kill` had no effect on some that were stopped."""
    with suppress(OSError):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
            os.kill(pid, signal.SIGKILL)
