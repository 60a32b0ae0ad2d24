"""Worlds of dynamic tables on simulated ranks: models, batches of ids, plans, training."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rayrec.comm import SimulatedWorld
from rayrec.distributed import shard_embeddings
from rayrec.distributed.engine import ShardedEmbeddings
from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.layout import (
    BaseEmbeddingConfig,
    DynamicConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    GrowthConfig,
    Layout,
    PoolingType,
    ShardingPlan,
    column_wise,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection
from rayrec.optim import SGD, Adagrad, Adam, RowWiseAdagrad, SparseOptimizer
from rayrec.sparse import KeyedJaggedTensor
from tests.sim.known_ids import Known, known_ids
from tests.worlds import plan_for

SEED = 3
CPU = torch.device("cpu")
KEYS = ("f", "g")
SAME = {"rtol": 2e-5, "atol": 2e-6}
OPTIMIZERS: tuple[SparseOptimizer, ...] = (
    RowWiseAdagrad(lr=0.1, eps=1e-2),
    Adagrad(lr=0.1, eps=1e-2),
    SGD(lr=0.1),
    Adam(lr=0.1, eps=1e-2),
)
Bags = dict[str, list[list[int]]]  # key -> bags of a rank
Times = list[list[int | None]]  # of each rank's batch, by step


@dataclass(frozen=True)
class Model:
    """Tables of one collection, with the plan that cuts them."""

    tables: tuple[BaseEmbeddingConfig, ...]
    plan: ShardingPlan
    optimizer: SparseOptimizer
    weighted: bool = False

    def collection(self, device: str) -> torch.nn.Module:
        if isinstance(self.tables[0], EmbeddingConfig):
            return EmbeddingCollection(tables=list(self.tables), device=device)
        return EmbeddingBagCollection(list(self.tables), self.weighted, device=device)


def kjt_of(bags: Bags, time: int | None = None, weighted: bool = False) -> KeyedJaggedTensor:
    """A batch of bags; its weights, if any, are halves, by id and place in the bag."""
    lengths = [len(bag) for key in KEYS for bag in bags[key]]
    ids = [one for key in KEYS for bag in bags[key] for one in bag]
    halves = [1 + (one + i) % 4 for key in KEYS for bag in bags[key] for i, one in enumerate(bag)]
    return KeyedJaggedTensor(
        list(KEYS),
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor(halves) / 2 if weighted else None,
        lengths=torch.tensor(lengths, dtype=torch.int32),
        stride=len(bags["f"]),
        time=time,
    )


def joined(step: list[Bags]) -> Bags:
    """The batches of all ranks as that of one."""
    return {key: [bag for bags in step for bag in bags[key]] for key in KEYS}


def rows_of(
    model: Model,
    module: torch.nn.Module,
    bags: Bags,
    time: int | None = None,
    device: torch.device = CPU,
) -> Tensor:
    """Outputs of all bags or ids as (rows, width), rows of a rank one after the other."""
    output = module(kjt_of(bags, time, model.weighted).to(device))
    if isinstance(output, dict):
        return torch.cat([part.values() for part in output.values()])
    return output.values()


def bent(output: Tensor) -> Tensor:
    """A loss whose gradients hang on the output, and so on the order of its sums."""
    return (output * output).sum() / 8 + output.sum() / 4


def straight(output: Tensor) -> Tensor:
    """A loss whose gradients are quarters, so that float32 adds them up exactly in any order."""
    return output.sum() / 4


def train(
    model: Model,
    steps: list[list[Bags]],
    plans: dict[int, ShardingPlan] | None = None,
    start: dict[str, Tensor] | None = None,
    times: Times | None = None,
    grows: Collection[int] = (),
    in_place: bool = False,
    track_rows: bool = False,
    run_ranks: Callable[[int, Callable[[Any, torch.device], Any]], list[Any]] | None = None,
    loss: Callable[[Tensor], Tensor] = bent,
) -> tuple[list[list[Tensor]], Known]:
    """Outputs by step and rank, and per table what is known of every id.

    Args:
        plans: plan to go over to before a step.
        start: first rows of static tables.
        times: of the batches, where the data tells any.
        grows: steps before which tables may grow.
        in_place: ranks read the rows of each other where they lie.
        track_rows: rows that training touches are noted, as for publications.
        run_ranks: runs ranks on devices of their own; CPU ranks where it is left out.
        loss: of the output of a rank.
    """

    def rank_main(exchange: Any, device: torch.device = CPU) -> Any:
        torch.set_num_threads(1)
        module = model.collection("meta" if start is None else "cpu")
        for name, rows in (start or {}).items():
            weight = dict(module.named_parameters())
            next(w for n, w in weight.items() if n.endswith(f"{name}.weight")).data.copy_(rows)
        options = EngineOptions(share_tables=in_place, track_rows=track_rows)
        parts = model.plan, exchange, model.optimizer, device, SEED, options
        module, engine = shard_embeddings(module, *parts)
        outputs, clocks = [], []
        for number, step in enumerate(steps):
            if number in grows:
                engine.grow()
            if plans and number in plans:
                engine.reshard(plans[number].with_rows(engine.plan.rows))
            bags = step[exchange.rank]
            time = times[number][exchange.rank] if times else None
            output = rows_of(model, module, bags, time, device)
            clocks.append(engine.id_clocks)
            # the engine divides the sum over ranks by their number
            (exchange.world_size * loss(output)).backward()
            with torch.no_grad():
                after = rows_of(model, module, bags, device=device)
                outputs.append((output.detach().cpu().clone(), after.cpu().clone()))
        return outputs, engine.shard_states(), clocks

    torch.manual_seed(0)
    size = model.plan.world_size
    ranks = SimulatedWorld(size).run(rank_main) if run_ranks is None else run_ranks(size, rank_main)
    for _, _, clocks in ranks:
        assert clocks == ranks[0][2], "all ranks have one clock, with rows or without"
    states = [state for _, of_rank, _ in ranks for state in of_rank]
    return [list(outputs) for outputs, *_ in ranks], known_ids(states)


def random_plan(
    tables: tuple[BaseEmbeddingConfig, ...],
    ranks: int,
    rng: random.Random,
    optimizer: SparseOptimizer,
    hosts: tuple[tuple[int, ...], ...] = (),
) -> ShardingPlan:
    everyone = list(range(ranks))
    kinds: list[Callable[[BaseEmbeddingConfig], Layout]] = [
        lambda t: table_wise(t, rng.choice(everyone)),
        lambda t: row_wise(t, everyone),
        lambda t: data_parallel(t, everyone),
    ]
    # its sums of squares are one value per row and column block: columns stay whole
    if optimizer.name != "rowwise_adagrad":
        kinds.append(lambda t: column_wise(t, everyone))
        kinds.append(lambda t: grid_shard(t, hosts or [everyone]))
    if hosts:
        kinds.append(lambda t: table_row_wise(t, rng.choice(hosts)))
    return plan_for(ranks, {table.name: rng.choice(kinds)(table) for table in tables}, hosts)


def random_model(
    rng: random.Random, ranks: int, rules: tuple[DynamicConfig, DynamicConfig], rows: int
) -> Model:
    sequence = rng.random() < 0.4
    kind = EmbeddingConfig if sequence else EmbeddingBagConfig
    tables = []
    for i, features in enumerate((["f", "g"], ["g"])):
        more = {} if sequence else {"pooling": rng.choice([PoolingType.SUM, PoolingType.MEAN])}
        tables.append(kind(rows, 8, f"t{i}", feature_names=features, dynamic=rules[i], **more))
    optimizer = rng.choice(OPTIMIZERS)
    return Model(tuple(tables), random_plan(tuple(tables), ranks, rng, optimizer), optimizer)


def random_steps(rng: random.Random, ranks: int, ids: list[int], steps: int) -> list[list[Bags]]:
    def bags() -> list[list[int]]:
        return [rng.choices(ids, k=rng.randint(0, 4)) for _ in range(rng.choice([0, 1, 3, 6]))]

    found = []
    for _ in range(steps):
        step = []
        for _ in range(ranks):
            own = bags()
            step.append({"f": own, "g": [rng.choices(ids, k=rng.randint(0, 2)) for _ in own]})
        found.append(step)
    return found


def random_rule(rng: random.Random, blocks: int, read_only: tuple[str, ...] = ()) -> DynamicConfig:
    threshold = rng.choice([1, 1, 2, 3])
    # fewer candidates than rows, or more
    capacity = None if threshold == 1 else rng.choice([None, blocks, 3 * blocks, 20 * blocks])
    read_only = rng.choice([(), read_only])
    ttls: list[dict[str, Any]] = [{}, {"ttl_steps": 2}, {"ttl_steps": 6}]
    ttls += [{"ttl_s": 15}, {"ttl_s": 60}]
    if "g" not in read_only:  # which all tables have
        ttls += [{"ttl_steps": 6, "feature_ttl_steps": {"g": rng.choice([1, 3])}}]
        ttls += [{"ttl_s": 60, "feature_ttl_s": {"g": rng.choice([5, 30])}}]
    return DynamicConfig(
        read_only_features=read_only,
        admission_threshold=threshold,
        counter_capacity=capacity,
        admission_probability=rng.choice([1.0, 0.7]),
        eviction=rng.choice(["step", "timestamp", "lfu", "none"]),
        blocks=blocks,
        **rng.choice(ttls),
    )


def growing(rng: random.Random, rule: DynamicConfig, rows: int) -> DynamicConfig:
    bound = rows * rng.choice([2, 3, 4, 100])
    load = rng.choice([0.3, 0.5, 0.75])
    return replace(rule, growth=GrowthConfig(max_num_embeddings=bound, max_load_factor=load))


def latest(times: Times) -> Times:
    """The times of the batches of all ranks as that of one."""
    return [[max((one for one in step if one is not None), default=None)] for step in times]


def random_times(rng: random.Random, steps: list[list[Bags]]) -> Times:
    """Times that go on and at times back; a rank without bags has none."""
    now, found = 1_700_000_000, []
    for step in steps:
        now += rng.choice([0, 5, 20, 90, -40])
        found.append([now + rng.randint(-9, 9) if bags["f"] else None for bags in step])
    return found


def drifting(rng: random.Random, ranks: int, steps: int) -> list[list[Bags]]:
    """Ids whose favourites move on."""
    names = [rng.randint(-(2**63), 2**63 - 1) for _ in range(steps * 8 + 40)]
    names = [name for name in names if name != -1]
    found = []
    for step in range(steps):
        found += random_steps(rng, ranks, names[step * 8 : step * 8 + 40], 1)
    return found


def alone(
    table: BaseEmbeddingConfig,
    act: Callable[[torch.nn.Module, ShardedEmbeddings], None],
    weighted: bool = False,
    options: EngineOptions | None = None,
) -> None:
    """Call `act` with a collection of one table on one rank."""
    plan = plan_for(1, {"t": table_wise(table, 0)})
    model = Model((table,), plan, SGD(lr=1.0), weighted)

    def rank_main(exchange: Any) -> None:
        parts = model.optimizer, CPU, SEED, options
        act(*shard_embeddings(model.collection("meta"), plan, exchange, *parts))

    SimulatedWorld(1).run(rank_main)


TWO_ROWS = EmbeddingBagConfig(2, 8, "t", feature_names=["f", "g"], dynamic=DynamicConfig(blocks=1))
