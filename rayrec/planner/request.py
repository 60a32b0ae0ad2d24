"""The request to the planner, as one value: it can be changed and asked again.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rayrec.errors import ConfigError
from rayrec.layout.kinds import KINDS
from rayrec.layout.plan import TablePlacement
from rayrec.layout.tables import BaseEmbeddingConfig, check_tables
from rayrec.layout.topology import Topology
from rayrec.planner.constraints import (
    NO_CONSTRAINTS,
    ParameterConstraints,
    check_constraints,
    check_kinds,
)
from rayrec.planner.costs import CostModel
from rayrec.planner.items import make_items
from rayrec.planner.options import Item
from rayrec.planner.work import TableWork, table_work
from rayrec.spec.optimizers import optimizer_class
from rayrec.spec.wire import FLOAT32, ExchangeOptions


@dataclass(frozen=True, kw_only=True)
class PlanRequest(ExchangeOptions):
    """Tables, a topology, how rows travel, and what else bears on where the tables go.

    Attributes:
        tables: tables of the whole model; names are unique.
        topology: ranks, memory and bandwidths.
        batch_size: rows per rank and step.
        constraints: by table name.
        sparse_optimizer: name of the fused optimizer.
        table_optimizers: table -> the name of its own, where it has another.
        kinds: the sharding kinds any table may use.
    Raises:
        ConfigError: a number, kind, name or optimizer that makes no sense.
    """

    tables: Sequence[BaseEmbeddingConfig]
    topology: Topology
    batch_size: int
    constraints: Mapping[str, ParameterConstraints] = field(default_factory=dict)
    sparse_optimizer: str = "rowwise_adagrad"
    table_optimizers: Mapping[str, str] = field(default_factory=dict)
    kinds: Sequence[str] = KINDS

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size < 2**63:
            raise ConfigError(
                f"batch_size={self.batch_size} must be positive, and below 2^63: the rows per rank "
                "and step."
            )
        for name in (self.sparse_optimizer, *self.table_optimizers.values()):
            optimizer_class(name)
        check_kinds(self.kinds)
        super().__post_init__()
        check_tables(self.tables)

    def limits(self, index: int) -> ParameterConstraints:
        """The constraints of one table by its index."""
        return self.constraints.get(self.tables[index].name, NO_CONSTRAINTS)

    def works(self, placed: Mapping[str, TablePlacement] | None = None) -> list[TableWork]:
        """Return the work of a step on each table.

        Args:
            placed: placement by table; a table without one is assumed in the fastest storage.
        """
        wire, world, device = self.wire, self.topology.world_size, self.topology.device
        # Ranks read rows in place only in the memory of one host, and then nothing is coded. A
        # dynamic table whose ids have weights has its whole collection exchanged, and which tables
        # lie in one is not known here.
        shared = (
            self.share_tables
            and device == "cpu"
            and len(self.topology.hosts) == 1
            and wire == FLOAT32
            and not any(
                table.dynamic is not None and self.limits(number).weighted
                for number, table in enumerate(self.tables)
            )
        )
        works = []
        for number, table in enumerate(self.tables):
            name, limits = table.name, self.limits(number)
            storage = placed[name].storage if placed and name in placed else None
            work = table_work(table, limits, self.batch_size, world, device, wire, storage, shared)
            if name in self.table_optimizers:
                work = replace(work, optimizer=self.table_optimizers[name])
            works.append(work)
        return works

    def items(self) -> list[Item]:
        """The priced items of the search.

        Raises:
            PlanError: constraints leave a table nothing to choose from.
            ConfigError: a constraint names what does not exist.
        """
        check_constraints(self.constraints, {table.name for table in self.tables})
        return make_items(
            self.tables,
            self.works(),
            self.constraints,
            self.kinds,
            CostModel(self.topology, self.sparse_optimizer),
        )
