"""From a model function, the ranks that exist and a user's word for a plan to a `ShardingPlan`.

The driver builds the model once on the meta device to learn its tables; no row is ever made here.
The ranks give the topology: their nodes, and the memory of each rank. Memory is Ray's own figure
for a node (which leaves out the object store) or a GPU's free memory, less a reserve for the dense
model, activations and the data's batches in flight, shared evenly by the ranks of the node.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rayrec.driver.config import RunConfig
from rayrec.driver.head import head
from rayrec.driver.rank_group import RankGroup
from rayrec.errors import ConfigError, RayrecError
from rayrec.layout import KINDS, BaseEmbeddingConfig, ShardingPlan, Topology
from rayrec.layout.estimates import RankEstimate
from rayrec.layout.topology import DEFAULT_SPEEDS
from rayrec.planner import ParameterConstraints, manual_plan
from rayrec.planner.estimate import estimate_ranks
from rayrec.planner.planner import plan_request
from rayrec.planner.request import PlanRequest
from rayrec.storage import one_line

if TYPE_CHECKING:
    from torch import nn

# share of a node's memory for its processes, the dense part and batches in flight
CPU_RESERVE = 0.3
GPU_RESERVE = 0.2


def find_tables(model: Callable[[], nn.Module]) -> list[BaseEmbeddingConfig]:
    """Return the tables of the module that `model()` makes, in module order.

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
            "model() failed on the driver, which builds it on the meta device to learn its tables: "
            f"{type(error).__name__}: {one_line(error)}. "
            "Pass tables=[...] to the Driver if it cannot be built there."
        ) from error
    return table_configs(module)


def check_same_features(data: object, eval_data: object) -> None:
    """Check that data to train on and to score on are read as the same features, where both have a
    schema.

    Columns may have other names; features, dense columns and tables are the model's and must agree.

    Raises:
        ConfigError: names what differs.
    """
    if data is None or eval_data is None:
        return
    from rayrec.data import RowDataset

    if not isinstance(data, RowDataset) or not isinstance(eval_data, RowDataset):
        return
    for what, train, held_out in (
        ("features", data.schema.feature_names(), eval_data.schema.feature_names()),
        ("tables", data.schema.tables, eval_data.schema.tables),
        ("number of dense columns", len(data.schema.dense), len(eval_data.schema.dense)),
        ("number of labels", len(data.schema.labels), len(eval_data.schema.labels)),
        ("weights", data.schema.is_weighted, eval_data.schema.is_weighted),
    ):
        if train != held_out:
            raise ConfigError(
                f"the {what} of the training data and of the evaluation data differ: {train} and "
                f"{held_out}. Give both the same schema, but for names of columns."
            )


def check_plan_word(plan: str | ShardingPlan) -> None:
    """Refuse a plan's name that is neither "auto", nor a sharding kind, nor a file, before anything
    is started.

    Raises:
        ConfigError: names the words that exist.
        PlanError: the file holds no plan.
    """
    if isinstance(plan, ShardingPlan) or plan == "auto" or plan in KINDS:
        return
    if not os.path.isfile(plan):  # unlike Path.is_file, no error for a name that is too long
        raise ConfigError(f"plan {plan!r} is neither a file nor one of: auto, {', '.join(KINDS)}.")
    ShardingPlan.load(plan)


class RunPlanner:
    """Planner of one driver's model and run.

    Args:
        model: () -> the module.
        run: batch size, optimizer and wire precisions.
        plan: "auto" asks the planner, a sharding kind places every table by it, a JSON file or a
            plan is taken as it is.
        constraints: limits on the planner's choice, by table.
        tables: the model's tables, if it cannot be built on the meta device.
        measured: a topology whose constants the planner shall use, or None.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        run: RunConfig,
        plan: str | ShardingPlan,
        constraints: Mapping[str, ParameterConstraints] | None,
        tables: Sequence[BaseEmbeddingConfig] | None,
        measured: Topology | None,
    ) -> None:
        self.model, self.run, self._plan, self._constraints = model, run, plan, constraints
        self._tables = list(tables) if tables is not None else None
        self.measured = measured

    def tables(self) -> list[BaseEmbeddingConfig]:
        """Return the model's tables, in module order; the model is built for them once."""
        if self._tables is None:
            self._tables = find_tables(self.model)
        return self._tables

    def plan(self, topology: Topology) -> ShardingPlan:
        """Return the sharding plan to train by on the ranks of a topology.

        Raises:
            PlanError: the tables do not fit, or the plan given is for other tables or ranks.
        """
        plan, request = self._plan, self._request(topology)
        if plan == "auto":
            return plan_request(request)
        if isinstance(plan, str) and plan in KINDS:
            return manual_plan(request.tables, plan, request.topology)
        given = plan if isinstance(plan, ShardingPlan) else ShardingPlan.load(plan)
        given.check(request.tables, request.topology.world_size)
        return given

    def predict(self, plan: ShardingPlan, topology: Topology) -> tuple[RankEstimate, ...]:
        """Return the cost model's estimate of each rank for any plan of these tables."""
        estimates = estimate_ranks(self._request(topology), plan)
        return estimates * (topology.world_size // len(estimates))  # groups are alike

    def _request(self, topology: Topology) -> PlanRequest:
        run = self.run
        group = run.sharding_group_size
        return PlanRequest(
            **run.exchange(),
            tables=tuple(self.tables()),
            topology=self._priced(topology.group(group) if group is not None else topology),
            # The largest part of a global batch, so that buffers suffice on every rank.
            batch_size=-(-run.global_batch_size // topology.world_size),
            constraints=dict(self._constraints or {}),
            sparse_optimizer=run.sparse_optimizer.name,
            table_optimizers={t: o.name for t, o in run.own_optimizers.items()},
        )

    def _priced(self, topology: Topology) -> Topology:
        """Return the topology with the constants of the calibrated one, if there is one."""
        return topology if self.measured is None else topology.with_speeds_of(self.measured)


def discover(group: RankGroup) -> Topology:
    """Return the topology of the ranks of `group`.

    Raises:
        TrainingFailed: a rank did not say how much memory its GPU has.
    """
    scaling = group.scaling
    if scaling.memory_per_worker is not None:
        memory = (scaling.memory_per_worker,) * group.world_size
    elif scaling.use_gpu:
        memory = tuple(int(free * (1 - GPU_RESERVE)) for free in group.gpu_memory())
    else:
        memory = _cpu_memory(group)
    speeds = asdict(DEFAULT_SPEEDS[scaling.device])
    return Topology(hosts=group.hosts, device=scaling.device, memory_bytes=memory, **speeds)


def read_topology(path: str) -> Topology:
    """Read a topology's JSON file.

    Raises:
        ConfigError: it cannot be read. PlanError: it holds no topology.
    """
    try:
        return Topology.from_json(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the topology {path}: {error}.") from None


def _cpu_memory(group: RankGroup) -> tuple[int, ...]:
    """Return the memory for each rank: an even share of its node's, less the reserve."""
    import ray

    alive = [node for node in head.answer(ray.nodes, group.check) if node["Alive"]]
    by_node = {node["NodeID"]: node["Resources"].get("memory", 0.0) for node in alive}
    shares = []
    for ranks in group.hosts:
        node = group.addresses[ranks[0]].node_id
        shares += [int(by_node.get(node, 0.0) * (1 - CPU_RESERVE) / len(ranks))] * len(ranks)
    return tuple(shares)
