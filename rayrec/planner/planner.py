"""The planner: tables and a topology in, a `ShardingPlan` with its predictions out.

Four steps, each in a module of its own: enumerate candidates, price them, search under the memory
limits, and say why. Prices are in seconds of the slowest rank. Deterministic: the same request
gives the same plan. When nothing fits, `remedies` finds what would. `manual_plan` in `manual.py` is
for those who know better. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rayrec.errors import ConfigError
from rayrec.fields.typed import check_argument
from rayrec.layout.estimates import PlanEstimates, TableEstimate
from rayrec.layout.geometry import COLUMN_MULTIPLE
from rayrec.layout.kinds import KINDS, kind_of
from rayrec.layout.plan import ShardingPlan, TablePlacement
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.layout.topology import Topology
from rayrec.layout.units import format_bytes
from rayrec.layout.words import also_takes
from rayrec.planner.constraints import ParameterConstraints
from rayrec.planner.costs import CostModel
from rayrec.planner.estimate import price_tables, sum_ranks
from rayrec.planner.greedy import NoRoom
from rayrec.planner.options import Item, Option
from rayrec.planner.packing import Choice
from rayrec.planner.remedies import NoPlan, find_changes
from rayrec.planner.request import PlanRequest
from rayrec.planner.search import pack
from rayrec.planner.uneven import Recutter
from rayrec.planner.work import weight_bytes

BATCH_SIZE = 512  # what a planner that is told none supposes, as TorchRec's


class HoldsTables(Protocol):
    """A torch module that holds embedding collections."""

    def modules(self) -> Iterable[Any]: ...


@also_takes()
class EmbeddingShardingPlanner:
    """Chooses a layout for every table.

    Args:
        topology: ranks, memory and bandwidths.
        batch_size: rows per rank and step; also decides the bytes of buffers.
        constraints: per table name; tables without one may take any kind, with one id per bag.
        sparse_optimizer: name as in `rayrec.optim`; decides state bytes and update time.
        kinds: the sharding kinds any table may use; None allows all.
        qcomms_forward, qcomms_backward: wire type of rows and of their gradients: fp32, fp16, bf16
            or int8.
        share_tables: `DistributedModelParallel` has the same option, and reads rows in place then.
    Attributes:
        asked: the request of any plan, without tables.
    Raises:
        ConfigError: a number, kind or optimizer that makes no sense.

    Example:
        plan = EmbeddingShardingPlanner(Topology.local(2), batch_size=2048).plan(tables)
        print(plan.report())
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int = BATCH_SIZE,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        sparse_optimizer: str = "rowwise_adagrad",
        kinds: Sequence[str] | None = None,
        qcomms_forward: str = "fp32",
        qcomms_backward: str = "fp32",
        share_tables: bool = True,
    ) -> None:
        for name, value, kind in (
            ("topology", topology, Topology),
            ("batch_size", batch_size, int),
            ("constraints", constraints, Mapping[str, ParameterConstraints] | None),
            ("sparse_optimizer", sparse_optimizer, str),
            ("kinds", kinds, Sequence[str] | None),
        ):
            check_argument(type(self).__name__, name, value, kind)
        self.asked = PlanRequest(
            tables=(),
            topology=topology,
            batch_size=batch_size,
            constraints=dict(constraints or {}),
            sparse_optimizer=sparse_optimizer,
            kinds=KINDS if kinds is None else kinds,
            qcomms_forward=qcomms_forward,
            qcomms_backward=qcomms_backward,
            share_tables=share_tables,
        )

    def request(self, tables: Sequence[BaseEmbeddingConfig]) -> PlanRequest:
        """Return the request that `plan(tables)` answers.

        Raises:
            ConfigError: tables contradict themselves.
        """
        return replace(self.asked, tables=tuple(tables))

    def plan(
        self,
        tables: Sequence[BaseEmbeddingConfig] | HoldsTables,
        sharders: Sequence[Any] | None = None,
    ) -> ShardingPlan:
        """Place every table.

        Args:
            tables: tables of the whole model, whose names are unique; or the model, whose marks of
                optimizers are not read: `sparse_optimizer` is what counts.
            sharders: TorchRec's sharders; their optimizer of the most state is the one counted.
        Returns:
            A plan with estimates, tables in the order given, within every rank's memory as
            `planner.memory` counts it.
        Raises:
            NoPlan: a table fits nowhere; names it, the numbers, and changes that help.
            PlanError: constraints leave a table no kind.
            ConfigError: tables or constraints contradict themselves.
        """
        named = [own for sharder in sharders or () if (own := getattr(sharder, "optimizer", None))]
        request = self.request(_tables_of(tables))
        if named:
            largest = max(named, key=lambda optimizer: optimizer.state_bytes(COLUMN_MULTIPLE))
            request = replace(request, sparse_optimizer=largest.name)
        return plan_request(request)

    def collective_plan(
        self,
        tables: Sequence[BaseEmbeddingConfig] | HoldsTables,
        sharders: Sequence[Any] | None = None,
        pg: Any = None,
    ) -> ShardingPlan:
        """Plan as `plan` does: all ranks make equal plans where their planners are equal, with no
        exchange. `DistributedModelParallel` refuses plans that differ.
        """
        return self.plan(tables, sharders)


def _tables_of(given: Sequence[BaseEmbeddingConfig] | HoldsTables) -> list[BaseEmbeddingConfig]:
    """The tables themselves, or those of all collections in a module, in its order."""
    if not hasattr(given, "modules"):
        if isinstance(given, Iterable):
            return list(given)
        raise ConfigError(f"a planner plans tables or a model, got {type(given).__name__}.")
    found: dict[int, BaseEmbeddingConfig] = {}
    for part in given.modules():
        for ask in ("embedding_bag_configs", "embedding_configs"):
            # a collection around another one tells of the same tables
            found |= {id(table): table for table in getattr(part, ask, list)()}
    if not found:
        raise ConfigError(f"{type(given).__name__} holds no embedding collection to plan.")
    return list(found.values())


def plan_request(request: PlanRequest) -> ShardingPlan:
    """The plan of a request. Raises as `EmbeddingShardingPlanner.plan`."""
    items = request.items()
    narrowest = [request.limits(index).min_partition for index in range(len(request.tables))]
    costs = CostModel(request.topology, request.sparse_optimizer)
    recutter = Recutter(request.works(), costs, narrowest)
    try:
        choices = pack(items, request.topology, recutter)
    except NoRoom as problem:
        raise _no_plan(request, items[problem.item], problem.free_bytes) from None
    placed: dict[int, TablePlacement] = {}
    for item, choice in zip(items, choices, strict=True):
        placements = map(TablePlacement, choice.layouts, choice.option.storages)
        placed |= zip(item.tables, placements, strict=True)
    tables = {table.name: placed[index] for index, table in enumerate(request.tables)}
    estimates = _estimate(request, items, choices, tables)
    if not math.isfinite(estimates.step_s):
        raise ConfigError(
            f"by the speeds and rates of the topology a step takes {estimates.step_s} seconds; "
            "correct them, or calibrate."
        )
    return ShardingPlan(
        world_size=request.topology.world_size,
        tables=tables,
        hosts=request.topology.hosts,
        estimates=estimates,
    )


def _estimate(
    request: PlanRequest,
    items: Sequence[Item],
    choices: Sequence[Choice],
    placed: Mapping[str, TablePlacement],
) -> PlanEstimates:
    """Predictions, counted anew from the layouts."""
    topology = request.topology
    world = topology.world_size
    prices = price_tables(request, placed)
    told: dict[int, TableEstimate] = {}
    for item, choice in zip(items, choices, strict=True):
        runner_up = _runner_up(item, choice, topology) if len(item.tables) == 1 else None
        for index in item.tables:
            table, price = request.tables[index], prices[index]
            owners_s = sum(cost.total_s for cost in price.owners_s.values())
            told[index] = TableEstimate(
                kind=kind_of(placed[table.name].layout, topology.hosts),
                data_type=table.data_type.value,
                weight_bytes=sum(memory.weight_bytes for memory in price.owners_memory.values()),
                why=_why(item, choice, runner_up),
                work_s=owners_s + world * price.home_s.total_s,
                runner_up=runner_up.kind if runner_up else None,
                runner_up_work_s=runner_up.mean_s * world if runner_up else None,
            )
    return PlanEstimates(
        topology=topology,
        batch_size=request.batch_size,
        sparse_optimizer=request.sparse_optimizer,
        ranks=sum_ranks(request, prices),
        tables={table.name: told[index] for index, table in enumerate(request.tables)},
    )


def _runner_up(item: Item, choice: Choice, topology: Topology) -> Option | None:
    """The cheapest layout cut along other axes that the largest rank has room for."""
    room = max(topology.memory_bytes)
    return next(
        (o for o in item.families if o.family != choice.option.family and o.most_bytes <= room),
        None,
    )


def _why(item: Item, choice: Choice, runner_up: Option | None) -> str:
    if choice.option.storages != item.options[0].storages:
        return "to fit"
    if len(item.families) == 1:
        return "forced"
    if runner_up is None:
        return "only fit" if len(item.tables) == 1 else "together"
    cheapest = item.options[0].mean_s
    return "least work" if choice.option.mean_s <= cheapest * (1 + 1e-9) else "even ranks"


def _no_plan(request: PlanRequest, item: Item, free: Sequence[int]) -> NoPlan:
    least = min(item.options, key=lambda option: option.most_bytes)
    rank = max(range(len(free)), key=lambda r: free[r])
    names = []
    for index in item.tables:
        table = request.tables[index]
        shape = f"{table.num_embeddings} x {table.embedding_dim} {table.data_type.value}"
        size = format_bytes(weight_bytes(table))
        if table.most_rows > table.num_embeddings:
            size += f", with room to grow to {table.most_rows} rows"
        if table.dynamic is not None and table.dynamic.counter_capacity is not None:
            size += f", with a counter_capacity of {table.dynamic.counter_capacity}"
        names.append(f"table {table.name!r} ({shape}, {size})")
    shown = " with ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    copies = "a copy on every rank" if least.replicated else f"{least.num_ranks} rank(s)"
    changes = find_changes(request, item.tables)
    tips = "; or ".join(change.text for change in changes)
    remedy = "No single change helps; lift constraints."
    if tips:
        remedy = f"Any one of these makes a plan exist: {tips}."
    return NoPlan(
        f"{shown} fits nowhere: even as {least.kind} over {copies} it needs "
        f"{format_bytes(least.most_bytes)} on a rank with optimizer state and buffers; rank {rank} "
        f"has most free, {format_bytes(max(free[rank], 0))} of "
        f"{format_bytes(request.topology.memory_bytes[rank])}, and the tightest rank "
        f"{format_bytes(max(min(free), 0))} for buffers of its batch. {remedy}",
        changes,
    )
