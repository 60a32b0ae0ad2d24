"""Dynamic tables on simulated ranks: as static tables where nothing is evicted, and equal on any
ranks and plans where ids come and go.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rayrec.comm import SimulatedWorld
from rayrec.distributed import shard_embeddings
from rayrec.distributed.dynamic_tables import check_dynamic
from rayrec.distributed.engine import ShardedEmbeddings
from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.distributed.program.groups import CollectionSpec
from rayrec.dynamic.first_values import first_values
from rayrec.errors import ConfigError, InputError, PlanError
from rayrec.layout import (
    BaseEmbeddingConfig,
    DynamicConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    Layout,
    PoolingType,
    ShardingPlan,
    TablePlacement,
    column_wise,
    data_parallel,
    grid_shard,
    row_wise,
    table_wise,
)
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection
from rayrec.optim import SGD, Adagrad, Adam, RowWiseAdagrad, SparseOptimizer
from rayrec.sparse import KeyedJaggedTensor

SEED = 3
KEYS = ("f", "g")
SAME = {"rtol": 2e-5, "atol": 2e-6}
OPTIMIZERS: tuple[SparseOptimizer, ...] = (
    RowWiseAdagrad(lr=0.1, eps=1e-2),
    Adagrad(lr=0.1, eps=1e-2),
    SGD(lr=0.1),
    Adam(lr=0.1, eps=1e-2),
)
Bags = dict[str, list[list[int]]]  # key -> bags of a rank


@dataclass(frozen=True)
class Model:
    """Tables of one collection, with the plan that cuts them."""

    tables: tuple[BaseEmbeddingConfig, ...]
    plan: ShardingPlan
    optimizer: SparseOptimizer

    def collection(self, device: str) -> torch.nn.Module:
        if isinstance(self.tables[0], EmbeddingConfig):
            return EmbeddingCollection(tables=list(self.tables), device=device)
        return EmbeddingBagCollection(tables=list(self.tables), device=device)


def kjt_of(bags: Bags) -> KeyedJaggedTensor:
    lengths = [len(bag) for key in KEYS for bag in bags[key]]
    ids = [one for key in KEYS for bag in bags[key] for one in bag]
    return KeyedJaggedTensor(
        list(KEYS),
        torch.tensor(ids, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        stride=len(bags["f"]),
    )


def joined(step: list[Bags]) -> Bags:
    """The batches of all ranks as that of one."""
    return {key: [bag for bags in step for bag in bags[key]] for key in KEYS}


def rows_of(model: Model, module: torch.nn.Module, bags: Bags) -> Tensor:
    """Outputs of all bags or ids as (rows, width), rows of a rank one after the other."""
    output = module(kjt_of(bags))
    if isinstance(output, dict):
        return torch.cat([part.values() for part in output.values()])
    return output.values()


def train(
    model: Model,
    steps: list[list[Bags]],
    plans: dict[int, ShardingPlan] | None = None,
    start: dict[str, Tensor] | None = None,
) -> tuple[list[list[Tensor]], dict[str, dict[int, Any]]]:
    """Outputs by step and rank, and per table what is known of every id.

    Args:
        plans: plan to go over to before a step.
        start: first rows of static tables.
    """

    def rank_main(exchange: Any) -> Any:
        torch.set_num_threads(1)
        module = model.collection("meta" if start is None else "cpu")
        for name, rows in (start or {}).items():
            weight = dict(module.named_parameters())
            next(w for n, w in weight.items() if n.endswith(f"{name}.weight")).data.copy_(rows)
        module, engine = shard_embeddings(
            module,
            model.plan,
            exchange,
            model.optimizer,
            torch.device("cpu"),
            SEED,
            EngineOptions(share_tables=False),
        )
        outputs = []
        for number, step in enumerate(steps):
            if plans and number in plans:
                engine.reshard(plans[number])
            bags = step[exchange.rank]
            output = rows_of(model, module, bags)
            # the engine divides the sum over ranks by their number
            loss = (output * output).sum() / 8 + output.sum() / 4
            (exchange.world_size * loss).backward()
            with torch.no_grad():
                outputs.append((output.detach().clone(), rows_of(model, module, bags).clone()))
        return outputs, engine.shard_states()

    torch.manual_seed(0)
    ranks = SimulatedWorld(model.plan.world_size).run(rank_main)
    known: dict[str, dict[int, Any]] = {}
    for _, states in ranks:
        for state in states:
            part = known.setdefault(state.shard.table, {})
            keys = state.ids["id_key"] if state.ids else torch.tensor(state.shard.rows)
            for row, key in enumerate(keys.tolist()):
                if key != -1:
                    told = part.setdefault(key, {})
                    told |= {c: state.weight[row, i].item() for i, c in enumerate(state.shard.cols)}
                    for name, column in state.ids.items():
                        told[name] = column[row].item() if name.startswith("id") else 0
    return [list(outputs) for outputs, _ in ranks], known


def check_equal(found: dict[str, dict[int, Any]], wanted: dict[str, dict[int, Any]]) -> None:
    assert found.keys() == wanted.keys()
    for table, rows in wanted.items():
        assert found[table].keys() == rows.keys()
        for key, told in rows.items():
            other = found[table][key]
            assert other.keys() == told.keys()
            for name, value in told.items():
                assert other[name] == (
                    value if isinstance(value, int) else pytest.approx(value, rel=1e-4, abs=1e-5)
                )


def random_plan(
    tables: tuple[BaseEmbeddingConfig, ...],
    ranks: int,
    rng: random.Random,
    optimizer: SparseOptimizer,
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
        kinds.append(lambda t: grid_shard(t, [everyone]))
    layouts = {table.name: TablePlacement(rng.choice(kinds)(table)) for table in tables}
    return ShardingPlan(world_size=ranks, tables=layouts)


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


@pytest.mark.seeds(range(30))
def test_a_dynamic_table_with_room_trains_as_a_static_one(seed: int) -> None:
    rng = random.Random(seed)
    ranks, count = rng.randint(1, 3), 24
    rule = DynamicConfig(blocks=rng.choice([1, 2, 4]))
    model = random_model(rng, ranks, (rule, rule), 64 * 4)
    names = list({rng.randint(-(2**63), 2**63 - 1) for _ in range(count)} - {-1})
    steps = random_steps(rng, ranks, names, 4)
    outputs, known = train(model, steps)
    # the same with ids 0, 1, ... in static tables, on the same ranks
    number = {name: i for i, name in enumerate(names)}
    static = tuple(
        replace(t, dynamic=None, num_embeddings=len(names), feature_names=list(t.feature_names))
        for t in model.tables
    )
    start = {
        t.name: first_values(SEED, t, np.array(names, np.int64), range(8)) for t in model.tables
    }
    plan = random_plan(static, ranks, rng, model.optimizer)
    numbered = [
        [{k: [[number[i] for i in bag] for bag in b[k]] for k in KEYS} for b in step]
        for step in steps
    ]
    wanted, rows = train(Model(static, plan, model.optimizer), numbered, start=start)
    for got, want in zip(outputs, wanted, strict=True):
        for (trained, after), (trained_want, after_want) in zip(got, want, strict=True):
            torch.testing.assert_close(trained, trained_want, **SAME)
            torch.testing.assert_close(after, after_want, **SAME)
    for table, ids in known.items():
        for name, told in ids.items():
            of_static = rows[table][number[name]]
            assert [told[c] for c in range(8)] == pytest.approx(
                [of_static[c] for c in range(8)], rel=1e-4, abs=1e-5
            )


def random_rule(rng: random.Random, blocks: int) -> DynamicConfig:
    return DynamicConfig(
        admission_threshold=rng.choice([1, 1, 2, 3]),
        admission_probability=rng.choice([1.0, 0.7]),
        eviction=rng.choice(["step", "lfu", "none"]),
        ttl_steps=rng.choice([None, 2, 6]),
        blocks=blocks,
    )


def drifting(rng: random.Random, ranks: int, steps: int) -> list[list[Bags]]:
    """Ids whose favourites move on."""
    names = [rng.randint(-(2**63), 2**63 - 1) for _ in range(steps * 8 + 40)]
    names = [name for name in names if name != -1]
    found = []
    for step in range(steps):
        found += random_steps(rng, ranks, names[step * 8 : step * 8 + 40], 1)
    return found


@pytest.mark.seeds(range(40))
def test_ids_come_and_go_alike_on_any_ranks_and_plans(seed: int) -> None:
    rng = random.Random(seed)
    ranks, blocks = rng.randint(2, 4), rng.choice([2, 4, 8])
    rule = random_rule(rng, blocks)
    rules = rule, random_rule(rng, blocks)
    model = random_model(rng, ranks, rules, blocks * rng.choice([2, 5, 12]))
    steps = drifting(rng, ranks, 10)
    plans = {
        n: random_plan(model.tables, ranks, rng, model.optimizer)
        for n in (3, 7)
        if rng.random() < 0.7
    }
    outputs, known = train(model, steps, plans)
    alone = replace(model, plan=random_plan(model.tables, 1, rng, model.optimizer))
    wanted, known_alone = train(alone, [[joined(step)] for step in steps])
    check_equal(known, known_alone)
    for number in range(len(steps)):
        for kind in (0, 1):
            parts = [outputs[rank][number][kind] for rank in range(ranks)]
            whole = wanted[0][number][kind]
            if isinstance(model.tables[0], EmbeddingBagConfig):
                torch.testing.assert_close(torch.cat(parts), whole, **SAME)
            else:  # a sequence gives all ids of a use, then those of the next
                assert sum(part.shape[0] for part in parts) == whole.shape[0]
                for part in parts:
                    rows = {tuple(round(v, 3) for v in row) for row in whole.tolist()}
                    assert {tuple(round(v, 3) for v in row) for row in part.tolist()} <= rows


def test_what_does_not_go_with_dynamic_tables_is_refused() -> None:
    table = EmbeddingBagConfig(8, 8, "t", feature_names=["f"], dynamic=DynamicConfig())
    plan = ShardingPlan(world_size=1, tables={"t": TablePlacement(table_wise(table, 0))})

    def rank_main(exchange: Any) -> None:
        module = EmbeddingBagCollection(tables=[table], device="meta")
        given = EngineOptions(dedup_sequences=True)
        shard_embeddings(module, plan, exchange, SGD(0.1), torch.device("cpu"), SEED, given)

    with pytest.raises(ConfigError, match=r"table 't' is dynamic, and .*dedup_sequences"):
        SimulatedWorld(1).run(rank_main)


@pytest.mark.parametrize(
    ("device", "replicas", "says"),
    [("cuda", False, "the rows lie on cuda"), ("cpu", True, "there are replicas")],
)
def test_where_rows_would_be_wrong_dynamic_tables_are_refused(
    device: str, replicas: bool, says: str
) -> None:
    table = EmbeddingBagConfig(8, 8, "t", feature_names=["f"], dynamic=DynamicConfig())
    still = replace(table, name="still", dynamic=None, feature_names=["g"])
    for tables, refused in (([still, table], True), ([still], False)):
        spec = CollectionSpec("", tables, False, False)
        with pytest.raises(ConfigError, match=says) if refused else nullcontext():
            check_dynamic([spec], EngineOptions(), torch.device(device), replicas)


def alone(
    table: BaseEmbeddingConfig, act: Callable[[torch.nn.Module, ShardedEmbeddings], None]
) -> None:
    """Call `act` with a collection of one table on one rank."""
    plan = ShardingPlan(world_size=1, tables={"t": TablePlacement(table_wise(table, 0))})
    model = Model((table,), plan, SGD(lr=1.0))

    def rank_main(exchange: Any) -> None:
        parts = model.optimizer, torch.device("cpu"), SEED
        act(*shard_embeddings(model.collection("meta"), plan, exchange, *parts))

    SimulatedWorld(1).run(rank_main)


TWO_ROWS = EmbeddingBagConfig(2, 8, "t", feature_names=["f", "g"], dynamic=DynamicConfig(blocks=1))


def test_a_table_is_not_looked_up_again_before_its_gradient_has_come() -> None:
    def act(module: torch.nn.Module, engine: ShardedEmbeddings) -> None:
        first = module(kjt_of({"f": [[10, 11]], "g": [[]]})).values()
        with pytest.raises(ConfigError, match=r"'t' is dynamic, and was looked up again before"):
            module(kjt_of({"f": [[20, 21]], "g": [[]]}))
        with torch.no_grad():
            module(kjt_of({"f": [[20, 21]], "g": [[]]}))
        first.sum().backward()
        (state,) = engine.shard_states()
        assert sorted(state.ids["id_key"].tolist()) == [10, 11]
        values = dict(zip(state.ids["id_key"].tolist(), state.weight, strict=True))
        begun = first_values(SEED, TWO_ROWS, np.array([10, 11]), range(8))
        torch.testing.assert_close(torch.stack([values[10], values[11]]), begun - 1.0)
        # an output that nobody holds any more has no gradient
        module(kjt_of({"f": [[20]], "g": [[]]}))
        module(kjt_of({"f": [[30]], "g": [[]]})).values().sum().backward()

    alone(TWO_ROWS, act)


def test_evaluation_admits_no_id_with_gradients_or_without() -> None:
    def act(module: torch.nn.Module, engine: ShardedEmbeddings) -> None:
        module.eval()
        assert not module(kjt_of({"f": [[10, 11]], "g": [[]]})).values().any()
        assert engine.id_steps == {"t": 0}
        module.train()
        assert module(kjt_of({"f": [[10, 11]], "g": [[]]})).values().any()
        assert engine.id_steps == {"t": 1}

    alone(TWO_ROWS, act)


def test_rows_by_number_are_not_loaded() -> None:
    def act(module: torch.nn.Module, engine: ShardedEmbeddings) -> None:
        with pytest.raises(RuntimeError, match="the table is dynamic, and rows by number"):
            module.load_state_dict({"embedding_bags.t.weight": torch.ones(2, 8)})
        assert not engine.shard_states()[0].weight.any()

    alone(TWO_ROWS, act)


def test_the_id_that_is_none_is_refused_and_the_extremes_are_ids() -> None:
    table = EmbeddingBagConfig(8, 8, "t", feature_names=["f", "g"], dynamic=DynamicConfig())
    plan = ShardingPlan(world_size=1, tables={"t": TablePlacement(table_wise(table, 0))})
    model = Model((table,), plan, SGD(lr=0.1))
    extremes = [-(2**63), 2**63 - 1, 0, -2]
    _, known = train(model, [[{"f": [extremes], "g": [[]]}]])
    assert known["t"].keys() == set(extremes)
    with pytest.raises(InputError, match=r"id -1 of key 'f', row 0 .* is no id of a dynamic table"):
        train(model, [[{"f": [[5, -1]], "g": [[]]}]])


def test_a_plan_cuts_a_dynamic_table_between_blocks() -> None:
    table = EmbeddingBagConfig(32, 8, "t", feature_names=["f"], dynamic=DynamicConfig(blocks=4))
    layout = row_wise(table, [0, 1, 2])
    assert layout.row_cuts == (0, 8, 16, 32)
    odd = replace(layout, row_cuts=(0, 8, 12, 32))
    plan = ShardingPlan(world_size=3, tables={"t": TablePlacement(odd)})
    with pytest.raises(PlanError, match=r"cuts the dynamic table 't' at rows .*multiples of 8"):
        plan.check([table], 3)
