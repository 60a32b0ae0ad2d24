"""What any plan would cost, priced table by table: for the planner's own plans, and for plans made
by hand, by kind or from a file.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping

from rayrec.layout.estimates import RankEstimate
from rayrec.layout.plan import ShardingPlan, TablePlacement
from rayrec.planner.costs import CostModel, StepCost
from rayrec.planner.memory import RankMemory, layout_memory_parts
from rayrec.planner.request import PlanRequest


def estimate_ranks(
    request: PlanRequest, plan: ShardingPlan | Mapping[str, TablePlacement]
) -> tuple[RankEstimate, ...]:
    """Predicted bytes and seconds of a training step on every rank.

    Args:
        request: tables, topology, batch size and constraints.
        plan: where every table of the request lies.
    """
    placed = plan.tables if isinstance(plan, ShardingPlan) else plan
    topology, costs = request.topology, CostModel(request.topology, request.sparse_optimizer)
    times, memory = [StepCost()] * topology.world_size, [RankMemory()] * topology.world_size
    at_home, home_memory = costs.fixed_cost(), RankMemory()
    for table, work in zip(request.tables, request.works(placed), strict=True):
        layout = placed[table.name].layout
        owners, home_bytes = layout_memory_parts(
            work, layout, request.sparse_optimizer, costs.summed(work, layout)
        )
        for rank, price in costs.price(work, layout).items():
            times[rank] += price
            memory[rank] += owners[rank]
        at_home, home_memory = (
            at_home + costs.layout_home_cost(work, layout),
            home_memory + home_bytes,
        )
    return tuple(
        _rank_estimate(a + home_memory, b + at_home) for a, b in zip(memory, times, strict=True)
    )


def _rank_estimate(memory: RankMemory, cost: StepCost) -> RankEstimate:
    return RankEstimate(
        weight_bytes=memory.weight_bytes,
        optimizer_bytes=memory.optimizer_bytes,
        buffer_bytes=memory.buffer_bytes,
        input_s=cost.input_s,
        lookup_s=cost.lookup_s,
        output_s=cost.output_s,
        gradient_s=cost.gradient_s,
        update_s=cost.update_s,
        overhead_s=cost.overhead_s,
    )
