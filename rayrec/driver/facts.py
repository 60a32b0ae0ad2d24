"""What the head of a Ray cluster tells of nodes and places.

Every function waits for the head without a bound, so each is called by `head` alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple


class Resources(NamedTuple):
    """What a cluster has in all, and what is free on each node."""

    total: Mapping[str, float]
    free: tuple[Mapping[str, float], ...]


def resources() -> Resources:
    """The resources of the cluster."""
    import ray
    from ray._private.state import available_resources_per_node

    return Resources(ray.cluster_resources(), tuple(available_resources_per_node().values()))


def alive_nodes() -> frozenset[str]:
    """The nodes of the cluster that live, by id."""
    import ray

    return frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])


def draining() -> dict[str, float | None]:
    """The nodes that will go, by id: when, in wall clock seconds, or None where nobody says."""
    import ray._private.state as state

    ends: Mapping[str, int] = state.state.get_draining_nodes()
    return {node: at_ms / 1000 if at_ms else None for node, at_ms in ends.items()}


def node_of(group: Any, bundle: int) -> str:
    """The node of a bundle of a placement group, which may be gone; "" while it has none."""
    from ray.util.placement_group import placement_group_table

    nodes = placement_group_table(group).get("bundles_to_node_id", {})
    return str(nodes.get(bundle, ""))


def bundles_on(group: Any, alive: Collection[str]) -> list[int]:
    """The bundles of a placement group that have a place on a node that is alive."""
    from ray.util.placement_group import placement_group_table

    table = placement_group_table(group)
    # A pending group has no place yet; one that lost a node keeps its other places.
    if table.get("state") not in ("CREATED", "RESCHEDULING"):
        return []
    nodes = table.get("bundles_to_node_id", {})
    return sorted(int(bundle) for bundle, node in nodes.items() if node in alive)
