"""The plan of a model that is given none: every rank makes it, from what all ranks know alike."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from rayrec.comm.codec import QCommsConfig
from rayrec.distributed.sharding import find_collections, is_weighted, tables_of
from rayrec.layout import ShardingPlan, Topology
from rayrec.optim import SparseOptimizer
from rayrec.planner import ParameterConstraints
from rayrec.planner.planner import BATCH_SIZE, plan_request
from rayrec.planner.request import PlanRequest


def plan_model(
    module: nn.Module,
    topology: Topology,
    optimizers: Mapping[str, SparseOptimizer],
    qcomms: QCommsConfig | None,
    share_tables: bool,
) -> ShardingPlan:
    """Plan the tables of a module, for batches of the size that a planner without one supposes.

    Args:
        optimizers: of every table.
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
