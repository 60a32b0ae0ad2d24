"""One plan for all ranks: a model that is given none makes it, from what all ranks know alike; one
that is given differently on some ranks is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from rayrec.comm.choose import number_of
from rayrec.comm.codec import QCommsConfig
from rayrec.comm.process_group import gather_ints
from rayrec.distributed.sharding import find_collections, is_weighted, tables_of
from rayrec.errors import PlanError
from rayrec.layout import ShardingPlan, Topology
from rayrec.optim import SparseOptimizer
from rayrec.planner import ParameterConstraints
from rayrec.planner.planner import BATCH_SIZE, plan_request
from rayrec.planner.request import PlanRequest


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
