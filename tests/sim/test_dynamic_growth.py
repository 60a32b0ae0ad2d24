"""Dynamic tables that grow while they train: by the rule in plain Python, alike on any ranks and
plans, and as a checkpoint that is restored into twice the rows.
"""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rayrec.checkpoint import ShardState, restore_checkpoint, save_checkpoint
from rayrec.comm import SimulatedWorld
from rayrec.distributed import DistributedModelParallel, shard_embeddings
from rayrec.distributed.fused_modules import FusedEmbeddingBagCollection
from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.dynamic.clock import clock_extras
from rayrec.errors import ConfigError
from rayrec.layout import DynamicConfig, EmbeddingBagConfig, GrowthConfig, table_wise
from rayrec.modules import EmbeddingBagCollection
from rayrec.optim import SGD
from tests.memory import MemoryHere
from tests.sim.dynamic_worlds import (
    KEYS,
    SAME,
    SEED,
    Bags,
    Model,
    drifting,
    growing,
    joined,
    kjt_of,
    latest,
    random_model,
    random_plan,
    random_rule,
    random_times,
    rows_of,
    train,
)
from tests.sim.known_ids import check_equal
from tests.unit.checkpoint_worlds import Ranks
from tests.unit.dynamic_twin import Twin
from tests.worlds import plan_for


@pytest.mark.seeds(range(40))
def test_tables_grow_alike_on_any_ranks_and_plans(seed: int) -> None:
    rng = random.Random(seed)
    ranks, blocks = rng.randint(2, 4), rng.choice([2, 4, 8])
    rows = blocks * rng.choice([1, 2, 5])
    first = random_rule(rng, blocks, read_only=(rng.choice(KEYS),))
    # one table of two grows, or both do
    rules = growing(rng, first, rows), random_rule(rng, blocks)
    if rng.random() < 0.5:
        rules = rules[0], growing(rng, rules[1], rows)
    model = random_model(rng, ranks, rules, rows)
    steps = drifting(rng, ranks, 10)
    times = random_times(rng, steps)
    grows = {number for number in range(10) if rng.random() < 0.5}
    plans = {n: random_plan(model.tables, ranks, rng, model.optimizer) for n in (3, 7)}
    in_place = rng.random() < 0.5
    outputs, known = train(model, steps, plans, grows=grows, times=times, in_place=in_place)
    alone = replace(model, plan=random_plan(model.tables, 1, rng, model.optimizer))
    whole = [[joined(step)] for step in steps]
    wanted, known_alone = train(alone, whole, grows=grows, times=latest(times))
    check_equal(known, known_alone)
    if isinstance(model.tables[0], EmbeddingBagConfig):
        for number in range(len(steps)):
            parts = [outputs[rank][number][0] for rank in range(ranks)]
            torch.testing.assert_close(torch.cat(parts), wanted[0][number][0], **SAME)


@pytest.mark.seeds(range(40))
def test_a_table_grows_by_the_rule_in_plain_python(seed: int) -> None:
    rng = random.Random(seed)
    blocks, size = rng.choice([1, 2, 4]), rng.choice([2, 5])
    rule = growing(rng, random_rule(rng, blocks), blocks * size)
    # the seed that the twin draws with, so that every id may enter
    rule = replace(rule, admission_probability=1.0)
    table = EmbeddingBagConfig(blocks * size, 8, "t", feature_names=list(KEYS), dynamic=rule)
    steps = drifting(rng, 1, 12)
    times = random_times(rng, steps)
    sizes: list[int] = []

    def rank_main(exchange: Any) -> None:
        plan = plan_for(1, {"t": table_wise(table, 0)})
        model, twin, rows = Model((table,), plan, SGD(lr=0.1)), Twin(table), table.num_embeddings
        parts = model.optimizer, torch.device("cpu"), SEED
        module, engine = shard_embeddings(model.collection("meta"), plan, exchange, *parts)
        for number, (bags,) in enumerate(steps, start=1):
            (time,) = times[number - 1]
            rows_of(model, module, bags, time).sum().backward()
            ids = {key: [one for bag in bags[key] for one in bag] for key in KEYS}
            features = [key for key in KEYS for _ in ids[key]]
            told = -1 if time is None else time
            twin.step([one for key in KEYS for one in ids[key]], number, told, features)
            if number % 2:
                grown = twin.grow(number)
                assert engine.grow() == ({"t": twin.size * blocks} if grown else {})
            (state,) = engine.shard_states()
            sizes.append(len(state.weight))
            rows = twin.size * blocks
            assert len(state.weight) == rows == engine.plan.rows["t"]
            columns = (state.ids[name].tolist() for name in ("id_key", "id_seen", "id_hits"))
            found = {key: (seen, hits) for key, seen, hits in zip(*columns, strict=True)}
            found.pop(-1, None)
            places = [(place, one) for place in twin.rows for one in place.ids]
            held = {one: (place.stamps(one)[0], place.ids[one].count) for place, one in places}
            assert found == held

    SimulatedWorld(1).run(rank_main)
    assert max(sizes) <= rule.growth.max_num_embeddings


@pytest.mark.seeds(range(30))
def test_growth_is_a_restore_into_twice_the_rows(seed: int, tmp_path: Path) -> None:
    """With candidates and the state of the optimizer, on any plan."""
    rng = random.Random(seed)
    ranks, blocks = rng.randint(1, 3), rng.choice([2, 4])
    rows = blocks * rng.choice([2, 5])
    growth = GrowthConfig(max_num_embeddings=2 * rows, max_load_factor=0.01)
    rules = [replace(random_rule(rng, blocks), growth=growth) for _ in range(2)]
    model = random_model(rng, ranks, tuple(rules), rows)
    steps, in_place = drifting(rng, ranks, 6), rng.random() < 0.5
    times = random_times(rng, steps)
    path = str(tmp_path / "saved")

    def rank_main(exchange: Any) -> Any:
        module, engine = shard_embeddings(
            model.collection("meta"), model.plan, exchange, model.optimizer, torch.device("cpu"),
            SEED, EngineOptions(share_tables=in_place),
        )  # fmt: skip
        for step, told in zip(steps, times, strict=True):
            output = rows_of(model, module, step[exchange.rank], told[exchange.rank])
            (output * output).sum().backward()
        before = [copied(state) for state in engine.shard_states()]
        return before, engine.id_clocks, engine.grow(), engine.shard_states(), engine.plan

    torch.manual_seed(0)
    told = SimulatedWorld(ranks).run(rank_main)

    def save(rank: int, gather: Any) -> None:
        extras = clock_extras(told[rank][1])
        save_checkpoint(
            path, shards=told[rank][0], tables=model.tables, plan=model.plan, rank=rank,
            world_size=ranks, gather=gather, dense={}, step=6, extras=extras,
        )  # fmt: skip

    Ranks(ranks).run(save).all()
    grown = told[0][2]
    assert all(one[2] == grown for one in told)
    held = {i.shard.table for states, *_ in told for i in states if (i.ids["id_key"] != -1).any()}
    # the rows of an id whose time is over are no reason to grow
    kept = {t.name for t in model.tables if t.dynamic.ttl_steps is None and t.dynamic.ttl_s is None}
    assert held & kept <= set(grown) <= held
    assert set(grown.values()) <= {2 * rows}
    tables = [t.with_rows(grown.get(t.name, t.num_embeddings)) for t in model.tables]
    for _, _, _, states, plan in told:
        assert plan == model.plan.with_rows(grown)
        twins = [filled(state, 7) for state in states]
        restore_checkpoint(path, twins, tables=tables)
        for state, twin in zip(states, twins, strict=True):
            for name, tensor in twin.tensors().items():
                assert torch.equal(state.tensors()[name], tensor), name


def copied(state: ShardState) -> ShardState:
    own = {name: tensor.clone() for name, tensor in state.optimizer.items()}
    ids = {name: tensor.clone() for name, tensor in state.ids.items()}
    return ShardState(state.shard, state.weight.clone(), own, ids)


def filled(state: ShardState, value: int) -> ShardState:
    twin = copied(state)
    for tensor in twin.tensors().values():
        tensor.fill_(value)
    return twin


TABLE = EmbeddingBagConfig(
    4,
    8,
    "t",
    feature_names=["f", "g"],
    dynamic=DynamicConfig(blocks=2, growth=GrowthConfig(max_num_embeddings=16)),
)


def step(module: torch.nn.Module, ids: list[int]) -> None:
    bags: Bags = {"f": [ids], "g": [[]]}
    module(kjt_of(bags)).values().sum().backward()


def test_a_model_of_ones_own_grows_when_it_is_told_to() -> None:
    bags = EmbeddingBagCollection(tables=[TABLE], device="meta")
    model = DistributedModelParallel(bags, sparse_optimizer=SGD(lr=1.0), seed=SEED)
    assert model.grow() == {}
    step(model, list(range(100)))
    (kernel,) = model._engine.lookups.values()
    old = weakref.ref(kernel)
    del kernel
    assert model.grow(["other"]) == {} and model.grow() == {"t": 8}
    gc.collect()
    assert old() is None, "its memory is free again"
    assert [table.num_embeddings for table in model.tables] == [8] and "t: 8 x 8" in repr(model)
    step(model, list(range(100)))
    assert (model.grow(), model.plan.rows) == ({"t": 16}, {"t": 16})
    step(model, list(range(100)))
    assert model.grow() == {}, "the bound is reached"
    fused = FusedEmbeddingBagCollection([TABLE], torch.optim.SGD, {"lr": 1.0})
    step(fused, list(range(100)))
    assert fused.grow() == {"t": 8}


def test_a_table_that_grows_has_no_sync_points() -> None:
    plan = plan_for(1, {"t": table_wise(TABLE, 0)})

    def rank_main(exchange: Any) -> None:
        module = EmbeddingBagCollection(tables=[TABLE], device="meta")
        given = EngineOptions(memory=MemoryHere())
        shard_embeddings(module, plan, exchange, SGD(0.1), torch.device("cpu"), SEED, given)

    with pytest.raises(ConfigError, match=r"'t' has growth, and .*memory="):
        SimulatedWorld(1).run(rank_main)
