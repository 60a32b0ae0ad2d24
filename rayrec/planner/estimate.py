"""Prediction of the bytes and seconds of any plan, priced table by table.

It serves the planner's own plans, and those made by hand, by kind or from a file. Standard library
only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

from rayrec.layout.estimates import RankEstimate
from rayrec.layout.plan import ShardingPlan, TablePlacement
from rayrec.planner.amounts import StepCost
from rayrec.planner.costs import CostModel
from rayrec.planner.memory import RankMemory, layout_memory
from rayrec.planner.request import PlanRequest


class TablePrice(NamedTuple):
    """Seconds and bytes of one table: of each rank that owns a part of it, and of every home."""

    owners_s: dict[int, StepCost]
    home_s: StepCost
    owners_memory: dict[int, RankMemory]
    home_memory: RankMemory


def price_tables(request: PlanRequest, placed: Mapping[str, TablePlacement]) -> list[TablePrice]:
    """The price of every table of a request where it lies."""
    costs = CostModel(request.topology, request.sparse_optimizer)
    prices = []
    for table, work in zip(request.tables, request.works(placed), strict=True):
        layout = placed[table.name].layout
        summed = costs.summed(work, layout)
        memory = layout_memory(work, layout, request.sparse_optimizer, summed)
        home_s = costs.layout_home_cost(work, layout)
        prices.append(TablePrice(costs.price(work, layout), home_s, *memory))
    return prices


def sum_ranks(request: PlanRequest, prices: Sequence[TablePrice]) -> tuple[RankEstimate, ...]:
    """Bytes and seconds of a training step on every rank.

    A rank pays as owner for the pieces of tables it holds, and as home for the look-ups of its own
    rows of the batch. Every rank is home to equally many rows, so what a home pays is summed once.

    Args:
        request: its topology and optimizer are read.
        prices: price of each table of a plan.
    Returns:
        one estimate per rank, in order.
    """
    world = request.topology.world_size
    times, memory = [StepCost()] * world, [RankMemory()] * world
    home_s = CostModel(request.topology, request.sparse_optimizer).fixed_cost()
    home_memory = RankMemory()
    for price in prices:
        for rank, seconds in price.owners_s.items():
            times[rank] += seconds
            memory[rank] += price.owners_memory[rank]
        home_s += price.home_s
        home_memory += price.home_memory
    return tuple(
        RankEstimate(**asdict(own + home_memory), **asdict(seconds + home_s))
        for own, seconds in zip(memory, times, strict=True)
    )


def estimate_ranks(
    request: PlanRequest, plan: ShardingPlan | Mapping[str, TablePlacement]
) -> tuple[RankEstimate, ...]:
    """Predicted bytes and seconds of a training step on every rank.

    Args:
        request: tables, topology, batch size and constraints.
        plan: layout of every table of the request.
    """
    placed = plan.tables if isinstance(plan, ShardingPlan) else plan
    return sum_ranks(request, price_tables(request, placed))
