"""One plan for all ranks: a model that is given none makes it, from what all ranks know alike; one
that is given differently on some ranks is refused.

Which ranks share a host, and the memory that each may take, they tell each other by one collective
of two numbers, so every rank comes to the same topology. The driver asks Ray instead
(`rayrec.driver.planning`). Bandwidths are the ready-made ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import groupby

import torch
import torch.distributed as dist
from torch import nn

from rayrec.comm.choose import host_identity, number_of
from rayrec.comm.codec import QCommsConfig
from rayrec.comm.process_group import gather_ints
from rayrec.distributed.sharding import find_collections, is_weighted, tables_of
from rayrec.errors import PlanError
from rayrec.layout import ShardingPlan, Topology
from rayrec.layout.topology import DEFAULT_SPEEDS
from rayrec.optim import SparseOptimizer
from rayrec.planner import ParameterConstraints
from rayrec.planner.planner import BATCH_SIZE, plan_request
from rayrec.planner.request import PlanRequest

GPU_SHARE = 0.8  # of what is free; the rest is left to the dense model and activations


def check_same_plan(
    plan: ShardingPlan, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Check that all ranks of `group` hold the same plan; all of them call it.

    Raises:
        PlanError: names a rank whose plan differs from that of rank 0; on every rank.
    """
    mine = number_of(replace(plan, estimates=None).to_json())
    (first, *others) = gather_ints([mine], group, device)
    if odd := [rank for rank, number in enumerate(others, 1) if number != first]:
        raise PlanError(
            f"rank {odd[0]} has another plan than rank 0. Give the planner of every rank the same "
            "topology, or give no plan, and the ranks plan together."
        )


def plan_model(
    module: nn.Module,
    topology: Topology,
    optimizers: Mapping[str, SparseOptimizer],
    qcomms: QCommsConfig | None,
    share_tables: bool,
) -> ShardingPlan:
    """Plan the tables of a module, for batches of the size that a planner without one supposes.

    Args:
        optimizers: optimizer of every table.
    Raises:
        NoPlan: a table fits nowhere; says what would help.
    """
    children = find_collections(module).values()
    weighted = [table.name for c in children if is_weighted(c) for table in tables_of(c)]
    wire = qcomms or QCommsConfig()
    return plan_request(
        PlanRequest(
            tables=[table for child in children for table in tables_of(child)],
            topology=topology,
            batch_size=BATCH_SIZE,
            constraints=dict.fromkeys(weighted, ParameterConstraints(weighted=True)),
            table_optimizers={name: optimizer.name for name, optimizer in optimizers.items()},
            qcomms_forward=wire.forward_precision.value,
            qcomms_backward=wire.backward_precision.value,
            share_tables=share_tables,
        )
    )


def topology_of(group: dist.ProcessGroup | None, device: torch.device, grouped: bool) -> Topology:
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
