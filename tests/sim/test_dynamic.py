"""Dynamic tables on simulated ranks: as static tables where nothing is evicted, and equal on any
ranks and plans where ids come and go.
"""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rayrec.comm import SimulatedWorld
from rayrec.distributed import DistributedModelParallel, shard_embeddings
from rayrec.distributed.engine import ShardedEmbeddings
from rayrec.distributed.program.engine_options import EngineOptions, check_dynamic
from rayrec.distributed.program.groups import CollectionSpec
from rayrec.dynamic.clock import Instant
from rayrec.dynamic.first_values import first_values
from rayrec.errors import ConfigError, InputError, PlanError
from rayrec.layout import DynamicConfig, EmbeddingBagConfig, row_wise, table_wise
from rayrec.modules import EmbeddingBagCollection
from rayrec.optim import SGD, Adagrad, RowWiseAdagrad, SparseOptimizer
from rayrec.sparse import KeyedJaggedTensor
from tests.sim.dynamic_worlds import (
    KEYS,
    SAME,
    SEED,
    TWO_ROWS,
    Model,
    alone,
    drifting,
    joined,
    kjt_of,
    latest,
    random_model,
    random_plan,
    random_rule,
    random_steps,
    random_times,
    train,
)
from tests.sim.known_ids import check_equal
from tests.worlds import plan_for


@pytest.mark.seeds(range(30))
def test_a_dynamic_table_with_room_trains_as_a_static_one(seed: int) -> None:
    rng = random.Random(seed)
    ranks, count = rng.randint(1, 3), 24
    rule = DynamicConfig(blocks=rng.choice([1, 2, 4]))
    model = random_model(rng, ranks, (rule, rule), 64 * 4)
    names = list({rng.randint(-(2**63), 2**63 - 1) for _ in range(count)} - {-1})
    steps = random_steps(rng, ranks, names, 4)
    outputs, known = train(model, steps, in_place=rng.random() < 0.5)
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


@pytest.mark.seeds(range(300))
def test_ids_come_and_go_alike_on_any_ranks_and_plans(seed: int) -> None:
    rng = random.Random(seed)
    ranks, blocks = rng.randint(1, 4), rng.choice([2, 4, 8])
    rules = random_rule(rng, blocks, read_only=(rng.choice(KEYS),)), random_rule(rng, blocks)
    model = random_model(rng, ranks, rules, blocks * rng.choice([2, 5, 12]))
    steps = drifting(rng, ranks, 10)
    times = random_times(rng, steps)
    plans = {
        n: random_plan(model.tables, ranks, rng, model.optimizer)
        for n in (3, 7)
        if rng.random() < 0.7
    }
    in_place = rng.random() < 0.5
    outputs, known = train(model, steps, plans, times=times, in_place=in_place)
    alone = replace(model, plan=random_plan(model.tables, 1, rng, model.optimizer))
    whole = [[joined(step)] for step in steps]
    wanted, known_alone = train(alone, whole, times=latest(times))
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
                    apart = (part.unsqueeze(1) - whole).abs().amax(2)
                    assert not len(part) or apart.amin(1).max() < 1e-3


def test_what_does_not_go_with_dynamic_tables_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"table 't' is dynamic, and .*dedup_sequences"):
        alone(TWO_ROWS, lambda *_: None, options=EngineOptions(dedup_sequences=True))


def test_rows_that_are_averaged_by_number_are_refused() -> None:
    table = EmbeddingBagConfig(8, 8, "t", feature_names=["f"], dynamic=DynamicConfig())
    still = replace(table, name="still", dynamic=None, feature_names=["g"])
    says = r"averaged by number \(sync_every ab"
    for tables, refused in (([still, table], True), ([still], False)):
        spec = CollectionSpec("", tables, False, False)
        with pytest.raises(ConfigError, match=says) if refused else nullcontext():
            check_dynamic([spec], EngineOptions(averaged=True))


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
        assert engine.id_clocks == {"t": Instant(0)}
        module.train()
        assert module(kjt_of({"f": [[10, 11]], "g": [[]]})).values().any()
        assert engine.id_clocks == {"t": Instant(1)}

    alone(TWO_ROWS, act)


@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(lr=0.1), Adagrad(lr=0.1)])
def test_a_reused_row_begins_as_a_fresh_one(optimizer: SparseOptimizer) -> None:
    plan = plan_for(1, {"t": table_wise(TWO_ROWS, 0)})

    def trained(steps: list[list[int]]) -> dict[int, dict[str, list[float]]]:
        """Values and state of the optimizer of every id that has a row after the steps."""

        def rank_main(exchange: Any) -> Any:
            module = EmbeddingBagCollection([TWO_ROWS], device="meta")
            parts = exchange, optimizer, torch.device("cpu"), SEED
            module, engine = shard_embeddings(module, plan, *parts)
            for ids in steps:
                module(kjt_of({"f": [ids], "g": [[]]})).values().sum().backward()
            (state,) = engine.shard_states()
            columns = {"weight": state.weight, **state.optimizer}
            return {
                one: {name: column[row].tolist() for name, column in columns.items()}
                for row, one in enumerate(state.ids["id_key"].tolist())
            }

        (found,) = SimulatedWorld(1).run(rank_main)
        return found

    reused, fresh = trained([[10, 11], [12, 12]]), trained([[12, 12]])
    assert len(reused) == 2 and 12 in reused, "the row was that of 10 or 11"
    assert reused[12] == fresh[12] and len(fresh[12]) == 2


def test_a_copy_of_a_model_has_ids_and_rows_of_its_own() -> None:
    def step(model: torch.nn.Module, ids: list[int]) -> None:
        model(kjt_of({"f": [ids], "g": [[]]})).values().sum().backward()

    def told(model: DistributedModelParallel) -> list[torch.Tensor]:
        (state,) = model.shard_states()
        return [column.clone() for column in state.tensors().values()]

    def made() -> DistributedModelParallel:
        bags = EmbeddingBagCollection(tables=[TWO_ROWS], device="meta")
        return DistributedModelParallel(bags, sparse_optimizer=SGD(lr=1.0), seed=SEED)

    model, wanted = made(), made()
    for one in (model, wanted):
        step(one, [10])
    twin = copy.deepcopy(model)
    before = told(model)
    for one in (twin, wanted):
        step(one, [11])
        step(one, [12, 12])  # takes a row back
    assert all(map(torch.equal, told(model), before))
    assert all(map(torch.equal, told(twin), told(wanted)))
    assert (model.id_clocks, twin.id_clocks) == ({"t": Instant(1)}, {"t": Instant(3)})


def test_rows_by_number_are_not_loaded() -> None:
    def act(module: torch.nn.Module, engine: ShardedEmbeddings) -> None:
        with pytest.raises(RuntimeError, match="the table is dynamic, and rows by number"):
            module.load_state_dict({"embedding_bags.t.weight": torch.ones(2, 8)})
        assert not engine.shard_states()[0].weight.any()

    alone(TWO_ROWS, act)


def test_the_id_that_is_none_is_refused_and_the_extremes_are_ids() -> None:
    table = EmbeddingBagConfig(8, 8, "t", feature_names=["f", "g"], dynamic=DynamicConfig())
    plan = plan_for(1, {"t": table_wise(table, 0)})
    model = Model((table,), plan, SGD(lr=0.1))
    extremes = [-(2**63), 2**63 - 1, 0, -2]
    _, known = train(model, [[{"f": [extremes], "g": [[]]}]])
    assert known["t"].keys() == set(extremes)
    with pytest.raises(InputError, match=r"id -1 of key 'f', row 0 .* is no id of a dynamic table"):
        train(model, [[{"f": [[5, -1]], "g": [[]]}]])


def test_ids_are_whole_numbers_of_any_width() -> None:
    def act(module: torch.nn.Module, engine: ShardedEmbeddings) -> None:
        def look_up(ids: torch.Tensor) -> torch.Tensor:
            lengths = torch.tensor([len(ids), 0])
            return module(KeyedJaggedTensor(["f", "g"], ids, lengths=lengths)).values()

        with pytest.raises(InputError, match=r"ids in rank 0 are torch.float32; they must be int"):
            look_up(torch.tensor([5.0, 6.5]))
        assert engine.id_clocks == {"t": Instant(0)}
        look_up(torch.tensor([5], dtype=torch.int32)).sum().backward()
        (state,) = engine.shard_states()
        assert sorted(state.ids["id_key"].tolist()) == [-1, 5]

    alone(TWO_ROWS, act)


def test_a_plan_cuts_a_dynamic_table_between_blocks() -> None:
    table = EmbeddingBagConfig(32, 8, "t", feature_names=["f"], dynamic=DynamicConfig(blocks=4))
    layout = row_wise(table, [0, 1, 2])
    assert layout.row_cuts == (0, 8, 16, 32)
    odd = replace(layout, row_cuts=(0, 8, 12, 32))
    plan = plan_for(3, {"t": odd})
    with pytest.raises(PlanError, match=r"cuts the dynamic table 't' at rows .*multiples of 8"):
        plan.check([table], 3)
