"""Topology of the placed ranks for the planner: their nodes, and the memory of each rank.

Memory is Ray's own figure for a node (which leaves out the object store) or a GPU's free memory,
less a reserve for the dense model, activations and the data's batches in flight, shared evenly by
the ranks of the node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from rayrec.driver.head import head
from rayrec.driver.rank_group import RankGroup
from rayrec.driver.scaling import ScalingConfig
from rayrec.errors import ConfigError
from rayrec.layout import Topology
from rayrec.layout.topology import DEFAULT_SPEEDS

# share of a node's memory for its processes, the dense part and batches in flight
CPU_RESERVE = 0.3
GPU_RESERVE = 0.2


def discover(group: RankGroup, scaling: ScalingConfig, timeout_s: float) -> Topology:
    """Return the topology of the ranks of `group`.

    Raises:
        TrainingFailed: a rank did not say how much memory its GPU has.
    """
    device = "cuda" if scaling.use_gpu else "cpu"
    if scaling.memory_per_worker is not None:
        memory = (scaling.memory_per_worker,) * group.world_size
    elif scaling.use_gpu:
        memory = tuple(int(free * (1 - GPU_RESERVE)) for free in group.gpu_memory(timeout_s))
    else:
        memory = _cpu_memory(group, _node_memory(group.check))
    speeds = DEFAULT_SPEEDS[device]
    return Topology(
        hosts=group.hosts,
        device=device,  # type: ignore[arg-type]
        memory_bytes=memory,
        memory_bw=speeds.memory_bw,
        intra_host_bw=speeds.intra_host_bw,
        inter_host_bw=speeds.inter_host_bw,
        latency_s=speeds.latency_s,
    )


def read_topology(path: str) -> Topology:
    """Read a topology's JSON file.

    Raises:
        ConfigError: it cannot be read. PlanError: it holds no topology.
    """
    try:
        return Topology.from_json(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the topology {path}: {error}.") from None


def _node_memory(check: Callable[[], None]) -> dict[str, float]:
    import ray

    alive = [node for node in head.answer(ray.nodes, check) if node["Alive"]]
    return {node["NodeID"]: node["Resources"].get("memory", 0.0) for node in alive}


def _cpu_memory(group: RankGroup, by_node: Mapping[str, float]) -> tuple[int, ...]:
    shares = []
    for ranks in group.hosts:
        node = group.addresses[ranks[0]].node_id
        shares += [int(by_node.get(node, 0.0) * (1 - CPU_RESERVE) / len(ranks))] * len(ranks)
    return tuple(shares)
