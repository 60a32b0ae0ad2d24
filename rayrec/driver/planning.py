"""From a model function and a user's word for a plan to a `ShardingPlan` for the ranks that exist.

The driver builds the model once on the meta device to learn its tables; no row is ever made here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rayrec.errors import ConfigError, RayrecError
from rayrec.layout import KINDS, BaseEmbeddingConfig, ShardingPlan, Topology
from rayrec.planner import EmbeddingShardingPlanner, ParameterConstraints, manual_plan

if TYPE_CHECKING:
    from torch import nn


def find_tables(model: Callable[[], nn.Module]) -> list[BaseEmbeddingConfig]:
    """The tables of the module that `model()` makes, in module order.

    Raises:
        ConfigError: the function fails, or its module holds nothing to shard.
    """
    import torch

    from rayrec.distributed import table_configs

    try:
        with torch.device("meta"):
            module = model()
    except RayrecError:
        raise
    except Exception as error:
        raise ConfigError(
            f"model() failed on the driver, which builds it on the meta device to learn its tables: {type(error).__name__}: {error}. "
            "Pass tables=[...] to the Driver if it cannot be built there."
        ) from error
    return table_configs(module)


def check_plan_word(plan: str | ShardingPlan) -> None:
    """Refuse a plan's name that is neither "auto", nor a sharding kind, nor a file, before anything is started.

    Raises:
        ConfigError: says what exists.
        PlanError: the file holds no plan.
    """
    if isinstance(plan, ShardingPlan) or plan == "auto" or plan in KINDS:
        return
    if not Path(plan).is_file():
        raise ConfigError(f"plan {plan!r} is neither a file nor one of: auto, {', '.join(KINDS)}.")
    ShardingPlan.load(plan)


def resolve_plan(
    plan: str | ShardingPlan,
    tables: Sequence[BaseEmbeddingConfig],
    topology: Topology,
    *,
    global_batch_size: int,
    sparse_optimizer: str,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    qcomms_forward: str = "fp32",
    qcomms_backward: str = "fp32",
    share_tables: bool = True,
) -> ShardingPlan:
    """The plan to train by.

    Args:
        plan: "auto" asks the planner, a sharding kind places every table by it, a file or a plan is taken as it is.
        topology: the ranks that exist.
        global_batch_size: rows of a step over all ranks.
        sparse_optimizer: by name; its state counts as memory.
        constraints: by table, for the planner.
        qcomms_forward, qcomms_backward: what rows and their gradients travel as.
        share_tables: see `RunConfig`.
    Raises:
        PlanError: the tables do not fit, or the plan given is for other tables or ranks.
    """
    if isinstance(plan, str) and plan in KINDS:
        return manual_plan(tables, plan, topology)
    if plan == "auto":
        rows = -(-global_batch_size // topology.world_size)
        planner = EmbeddingShardingPlanner(
            topology,
            batch_size=rows,
            constraints=constraints,
            sparse_optimizer=sparse_optimizer,
            qcomms_forward=qcomms_forward,
            qcomms_backward=qcomms_backward,
            share_tables=share_tables,
        )
        return planner.plan(tables)
    given = plan if isinstance(plan, ShardingPlan) else ShardingPlan.load(plan)
    given.check(tables, topology.world_size)
    return given
