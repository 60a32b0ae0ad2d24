"""The topology of a process group: which ranks share a host, and the memory that each may take.

The driver asks Ray instead (`rayrec.driver.planning`). One collective of two numbers per
rank, so every rank comes to the same topology, and plans alike from it. Bandwidths are the
ready-made ones.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from itertools import groupby

import torch
import torch.distributed as dist

from rayrec.comm.choose import host_identity, number_of
from rayrec.comm.process_group import gather_ints
from rayrec.layout import Topology
from rayrec.layout.topology import DEFAULT_SPEEDS

GPU_SHARE = 0.8  # of what is free; the rest is left to the dense model and activations


def topology_of(
    group: dist.ProcessGroup | None, device: torch.device, grouped: bool = True
) -> Topology:
    """The ranks of `group`, on what they compute and what they have; all of them call it.

    Args:
        group: the default group when None.
        grouped: False where this rank is alone and has no process group.
    Raises:
        ConfigError: the device is neither a CPU nor a GPU of CUDA.
    """
    mine = [number_of(host_identity()), _memory_bytes(device)]
    parts = gather_ints(mine, group, device) if grouped else [mine]
    hosts, memory = zip(*parts, strict=True)
    # ranks of a CPU host share its memory; each has a GPU of its own
    sharers = Counter(hosts) if device.type == "cpu" else Counter(set(hosts))
    # ranks of one host that are not consecutive count as several hosts: a plan has no other word
    runs = [tuple(run) for _, run in groupby(range(len(hosts)), key=lambda rank: hosts[rank])]
    return Topology(
        hosts=tuple(runs),
        device=device.type,  # type: ignore[arg-type]  # Topology checks it
        memory_bytes=tuple(m // sharers[host] for host, m in zip(hosts, memory, strict=True)),
        **asdict(DEFAULT_SPEEDS.get(device.type, DEFAULT_SPEEDS["cpu"])),
    )


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE)
    return Topology.local(1).memory_bytes[0]
