"""The planner: tables and a topology in, a `ShardingPlan` with its predictions out.

Four steps, each in a module of its own: enumerate candidates, price them, pack them under the memory limits, and say why. Prices are
in seconds of the slowest rank. Deterministic: the same tables, topology and constraints give the same plan. `manual_plan` in
`manual.py` is for those who know better. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rayrec.errors import ConfigError, PlanError
from rayrec.layout.estimates import PlanEstimates, RankEstimate, TableEstimate
from rayrec.layout.geometry import Replicated
from rayrec.layout.kinds import KINDS, kind_of
from rayrec.layout.plan import ShardingPlan, TablePlacement
from rayrec.layout.tables import BaseEmbeddingConfig, DataType, check_tables
from rayrec.layout.topology import Topology
from rayrec.layout.units import format_bytes
from rayrec.planner.candidates import enumerate_candidates
from rayrec.planner.constraints import ParameterConstraints, check_constraints, check_kinds
from rayrec.planner.costs import CostModel, StepCost, check_optimizer
from rayrec.planner.memory import RankMemory, layout_memory
from rayrec.planner.options import Option, price_options
from rayrec.planner.packing import Choice, NoRoom, Packing, pack
from rayrec.planner.work import table_work

NO_CONSTRAINTS = ParameterConstraints()


class EmbeddingShardingPlanner:
    """Chooses a layout for every table.

    Args:
        topology: ranks, memory and bandwidths.
        batch_size: rows per rank and step.
        constraints: per table name; tables without one may take any kind, with one id per bag.
        sparse_optimizer: "rowwise_adagrad", "adagrad" or "sgd"; decides state bytes and update time.
        kinds: the sharding kinds any table may use; None allows all.
    Raises:
        ConfigError: a number, kind or optimizer that makes no sense.

    Example:
        plan = EmbeddingShardingPlanner(Topology.local(2), batch_size=2048).plan(tables)
        print(plan.report())
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        sparse_optimizer: str = "rowwise_adagrad",
        kinds: Sequence[str] | None = None,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} must be positive: the rows per rank and step.")
        check_optimizer(sparse_optimizer)
        if kinds is not None:
            check_kinds(kinds)
        self.topology = topology
        self.batch_size = batch_size
        self.constraints = dict(constraints or {})
        self.kinds = tuple(KINDS if kinds is None else kinds)
        self.costs = CostModel(topology, sparse_optimizer)

    def plan(self, tables: Sequence[BaseEmbeddingConfig]) -> ShardingPlan:
        """Place every table.

        Args:
            tables: of the whole model; names are unique.
        Returns:
            A plan with estimates, tables in the order given, within every rank's memory as `planner.memory` counts it.
        Raises:
            PlanError: a table fits nowhere, or its constraints leave no kind; with numbers and what to try.
            ConfigError: tables or constraints contradict themselves.
        """
        check_tables(tables)
        check_constraints(self.constraints, {table.name for table in tables})
        options = [self._options(table) for table in tables]
        try:
            choices = pack(options, self.topology)
        except NoRoom as problem:
            raise self._no_room(tables[problem.table], options[problem.table], problem.free_bytes) from None
        placements = {table.name: TablePlacement(choice.layout) for table, choice in zip(tables, choices, strict=True)}
        return ShardingPlan(
            world_size=self.topology.world_size,
            tables=placements,
            hosts=self.topology.hosts,
            estimates=self._estimate(tables, options, choices),
        )

    def _constraints_of(self, table: BaseEmbeddingConfig) -> ParameterConstraints:
        return self.constraints.get(table.name, NO_CONSTRAINTS)

    def _kinds_of(self, table: BaseEmbeddingConfig) -> tuple[str, ...]:
        own = self._constraints_of(table).kinds
        return self.kinds if own is None else tuple(kind for kind in self.kinds if kind in own)

    def _options(self, table: BaseEmbeddingConfig) -> tuple[Option, ...]:
        limits, kinds = self._constraints_of(table), self._kinds_of(table)
        candidates = enumerate_candidates(table, self.topology, kinds, limits.min_partition)
        if not candidates:
            sizes = [len(host) for host in self.topology.hosts]
            raise PlanError(
                f"table {table.name!r} may use no sharding kind here: its constraints allow {list(limits.kinds or KINDS)}, the planner "
                f"{list(self.kinds)}, and grid_shard needs hosts of equal size (they have {sizes} ranks). Allow row_wise or table_wise."
            )
        work = table_work(table, limits, self.batch_size, self.topology.world_size)
        return price_options(work, candidates, self.costs)

    def _estimate(self, tables: Sequence[BaseEmbeddingConfig], options: Sequence[Sequence[Option]], choices: list[Choice]) -> PlanEstimates:
        """Predictions, counted anew from the layouts."""
        world = self.topology.world_size
        times = [self.costs.fixed_cost()] * world
        memory = [RankMemory()] * world
        packing = Packing(self.topology)
        for index, choice in enumerate(choices):
            packing.put(index, choice)
        told: dict[str, TableEstimate] = {}
        for index, (table, choice) in enumerate(zip(tables, choices, strict=True)):
            layout = choice.layout
            work = table_work(table, self._constraints_of(table), self.batch_size, world)
            prices = self.costs.price(work, layout)
            for rank, price in prices.items():
                times[rank] += price
            taken = layout_memory(work, layout, self.costs.sparse_optimizer)
            memory = [a + b for a, b in zip(memory, taken, strict=True)]
            runner_up = self._runner_up(packing, index, options[index])
            work_s = sum(price.total_s for price in prices.values())
            told[table.name] = TableEstimate(
                kind=kind_of(layout, self.topology.hosts),
                data_type=table.data_type.value,
                weight_bytes=sum(rank.weight_bytes for rank in taken),
                why=self._why(options[index], work_s, runner_up),
                work_s=work_s,
                runner_up=kind_of(runner_up.layout, self.topology.hosts) if runner_up else None,
                runner_up_work_s=_work_s(packing, runner_up) if runner_up else None,
            )
        ranks = tuple(_rank_estimate(a, b) for a, b in zip(memory, times, strict=True))
        return PlanEstimates(
            topology=self.topology, batch_size=self.batch_size, sparse_optimizer=self.costs.sparse_optimizer, ranks=ranks, tables=told
        )

    def _runner_up(self, packing: Packing, index: int, options: Sequence[Option]) -> Choice | None:
        """The best place of a layout cut along other axes, with all other tables where they are."""
        chosen = packing.take(index)
        family = chosen.option.candidate.family
        others = [option for option in options if option.candidate.family != family]
        choice = packing.best(others, 64, max(packing.loads))
        packing.put(index, chosen)
        return choice

    @staticmethod
    def _why(options: Sequence[Option], work_s: float, runner_up: Choice | None) -> str:
        if len({option.candidate.family for option in options}) == 1:
            return "forced"
        if runner_up is None:
            return "only fit"
        best_s = min(sum(seconds) for option in options for seconds in option.seconds.values())
        return "least work" if work_s <= best_s * (1 + 1e-9) else "even ranks"

    def _no_room(self, table: BaseEmbeddingConfig, options: Sequence[Option], free: Sequence[int]) -> PlanError:
        least = min(options, key=lambda option: option.most_bytes)
        rank = max(range(len(free)), key=lambda r: free[r])
        tips = []
        unused = [kind for kind in KINDS if kind not in self._kinds_of(table) and kind != "data_parallel"]
        if unused:
            tips.append(f"allow {' or '.join(unused[:3])} for it")
        if table.data_type is DataType.FP32:
            tips.append("store it as FP16")
        if self.costs.sparse_optimizer == "adagrad":
            tips.append("use rowwise_adagrad")
        tips.append(f"add ranks (there are {self.topology.world_size})")
        weights = table.num_embeddings * table.embedding_dim * table.data_type.num_bytes
        copies = "a copy on every rank" if isinstance(least.candidate.template, Replicated) else f"{least.candidate.num_ranks} rank(s)"
        return PlanError(
            f"table {table.name!r} ({table.num_embeddings} x {table.embedding_dim} {table.data_type.value}, {format_bytes(weights)}) fits "
            f"nowhere: even as {least.candidate.kind} over {copies} it needs {format_bytes(least.most_bytes)} on a rank with optimizer "
            f"state and buffers; rank {rank} has most free, {format_bytes(max(free[rank], 0))} of "
            f"{format_bytes(self.topology.memory_bytes[rank])}, and the tightest rank {format_bytes(max(min(free), 0))} for buffers of "
            f"its batch. Try: {', '.join(tips)}, or lower batch_size={self.batch_size}."
        )


def _work_s(packing: Packing, choice: Choice) -> float:
    return sum(choice.option.seconds[packing.locality[rank]][i] for i, rank in enumerate(choice.ranks))


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
