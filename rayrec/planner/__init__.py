"""The sharding planner: constraints, candidates, prices, memory, packing. Standard library only."""

from __future__ import annotations

from rayrec.layout.words import foreign_names
from rayrec.planner.constraints import ParameterConstraints
from rayrec.planner.manual import manual_plan
from rayrec.planner.planner import EmbeddingShardingPlanner
from rayrec.planner.remedies import Change, NoPlan

__all__ = ["Change", "EmbeddingShardingPlanner", "NoPlan", "ParameterConstraints", "manual_plan"]

__getattr__ = foreign_names(__name__)
