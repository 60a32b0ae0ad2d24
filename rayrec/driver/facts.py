"""Queries of a Ray cluster's head about resources, nodes and placement groups.

Every function waits for the head without a bound, so each is called by `head` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Resources(NamedTuple):
    """Total resources of a cluster, and the free resources of each node."""

    total: Mapping[str, float]
    free: tuple[Mapping[str, float], ...]


def resources() -> Resources:
    """Return the total and the free resources of the cluster."""
    import ray
    from ray._private.state import available_resources_per_node

    return Resources(ray.cluster_resources(), tuple(available_resources_per_node().values()))


def alive_nodes() -> frozenset[str]:
    """Return the ids of the nodes that are alive."""
    import ray

    return frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])


def draining() -> dict[str, float | None]:
    """Return the draining nodes: deadline in wall clock seconds, or None if unknown, by node id."""
    import ray._private.state as state

    ends: Mapping[str, int] = state.state.get_draining_nodes()
    return {node: at_ms / 1000 if at_ms else None for node, at_ms in ends.items()}


def bundles(group: Any) -> tuple[str, dict[int, str]]:
    """Return Ray's word for the state of a placement group, and the node of each given bundle."""
    from ray.util.placement_group import placement_group_table

    table = placement_group_table(group)
    state = table.get("state", "unknown")
    said = str(table.get("stats", {}).get("scheduling_state", state))
    # A pending group has no place yet; one that lost a node keeps its other places.
    if state not in ("CREATED", "RESCHEDULING"):
        return said, {}
    nodes = table.get("bundles_to_node_id", {})
    return said, {int(bundle): str(node) for bundle, node in nodes.items()}
