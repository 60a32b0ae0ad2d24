"""Rows of ids from elsewhere in dynamic tables: on any ranks and under any plan, from tensors and
files, and what is refused.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from rayrec.data.hashing import mix
from rayrec.distributed import DistributedModelParallel, load_table
from rayrec.dynamic.clock import NO_TIME, Instant
from rayrec.dynamic.key_blocks import blocks_of
from rayrec.errors import ConfigError, InputError, ShapeError
from rayrec.layout import (
    DynamicConfig,
    EmbeddingBagConfig,
    ShardingPlan,
    column_wise,
    data_parallel,
    grid_shard,
    row_wise,
    table_wise,
)
from rayrec.modules import EmbeddingBagCollection
from rayrec.optim import SGD, Adagrad, RowWiseAdagrad, SparseOptimizer
from rayrec.sparse import KeyedJaggedTensor
from tests.ranks import RankPool
from tests.worlds import plan_for

WIDTH = 8


@dataclass(frozen=True)
class Given:
    """Rows of ids, and the table that they are for."""

    table: EmbeddingBagConfig
    optimizer: SparseOptimizer
    ids: Tensor
    weight: Tensor
    ages: Tensor
    hits: Tensor
    states: dict[str, Tensor]


def random_given(rng: random.Random) -> Given:
    """Ids for which there is room, or not."""
    torch.manual_seed(rng.randrange(1 << 30))
    blocks = rng.choice([1, 2, 4])
    rule = DynamicConfig(
        blocks=blocks,
        ttl_steps=rng.choice([None, 4]),
        eviction=rng.choice(["step", "lfu", "none"]),
        admission_threshold=rng.choice([1, 2]),
    )
    table = EmbeddingBagConfig(
        blocks * rng.randint(2, 8), WIDTH, "t", feature_names=["f"], dynamic=rule
    )
    number = rng.choice([0, 1, 5, 30])
    ids = torch.tensor([rng.randrange(-(2**63), 2**63) for _ in range(number)], dtype=torch.int64)
    ids = ids[ids != -1]
    optimizer, states = rng.choice(
        [
            (SGD(lr=0.1), {}),
            (RowWiseAdagrad(lr=0.1), {"momentum1": torch.rand(len(ids))}),
            (Adagrad(lr=0.1), {"momentum1": torch.rand(len(ids), WIDTH)}),
        ]
    )
    counts = (torch.randint(0, 7, (len(ids),)) for _ in range(2))
    return Given(table, optimizer, ids, torch.randn(len(ids), WIDTH), *counts, states)


def plan_of(given: Given, kind: int, world_size: int) -> ShardingPlan:
    table, everyone = given.table, list(range(world_size))
    layouts = [row_wise(table, everyone), table_wise(table, world_size - 1)]
    layouts += [data_parallel(table, everyone), column_wise(table, everyone)]
    layouts += [grid_shard(table, [everyone])]
    return plan_for(world_size, {"t": layouts[kind % len(layouts)]})


def model_of(given: Given, plan: ShardingPlan) -> DistributedModelParallel:
    tables = EmbeddingBagCollection([given.table], device="meta")
    return DistributedModelParallel(
        tables, plan=plan, sparse_optimizer=given.optimizer, track_rows=True
    )


def look_up(model: DistributedModelParallel, ids: Tensor) -> Tensor:
    lengths = torch.ones(len(ids), dtype=torch.int32)
    with torch.no_grad():
        return model(KeyedJaggedTensor(["f"], ids, lengths=lengths)).values()


def loaded(rank: int, world_size: int, given: Given, kind: int) -> Any:
    """What was said and what is known of every id, and the rows that were looked up."""
    model = model_of(given, plan_of(given, kind, world_size))
    trained = torch.tensor([11, 12, 13])
    for _ in range(3):
        # ids that the table had before
        lengths = torch.ones(3, dtype=torch.int32)
        model(KeyedJaggedTensor(["f"], trained, lengths=lengths)).values().sum().backward()
    assert model.touched is not None
    mark, step = model.touched.mark(), model.id_clocks["t"].step
    said = load_table(
        model,
        "t",
        given.weight,
        ids=given.ids,
        ages=given.ages,
        hits=given.hits,
        optimizer=given.states,
    )
    touched = model.touched.since(mark)
    known: dict[int, dict[str, Any]] = {}
    for state in model.shard_states():
        assert touched[state.shard].tolist() == list(state.shard.rows)
        if "candidate_key" in state.ids:
            assert bool((state.ids["candidate_key"] == -1).all())
        free = state.ids["id_key"] == -1
        assert not any(bool(tensor[free].any()) for tensor in [state.weight])
        for row, key in enumerate(state.ids["id_key"].tolist()):
            if key != -1:
                told = known.setdefault(key, {"age": step - int(state.ids["id_seen"][row])})
                told["hits"] = int(state.ids["id_hits"][row])
                for i, col in enumerate(state.shard.cols):
                    told[f"w{col}"] = float(state.weight[row, i])
                    for name, tensor in state.optimizer.items():
                        at = (row, i) if tensor.dim() == 2 else (row,)
                        told[f"{name}{col}"] = float(tensor[at])
    return said, known, look_up(model, torch.cat([given.ids, trained]))


def stays(given: Given) -> list[int]:
    """Which of the ids have a row, in plain Python."""
    table, rule, size = given.table, given.table.dynamic, given.table.row_multiple
    assert rule is not None
    blocks: dict[int, list[tuple[int, ...]]] = {}
    for at, key in enumerate(given.ids.tolist()):
        age, hits = int(given.ages[at]), int(given.hits[at])
        if rule.ttl_steps is None or age <= rule.ttl_steps:
            array = given.ids[at : at + 1].numpy()
            block = int(blocks_of(array, table.num_embeddings // size)[0])
            score = (hits, -age) if rule.eviction == "lfu" else (-age, hits)
            tie = int(mix(array.view("uint64"))[0])
            blocks.setdefault(block, []).append((*score, tie, key))
    return [one[-1] for ids in blocks.values() for one in sorted(ids)[-size:]]


@pytest.mark.seeds(range(40))
def test_ids_get_the_rows_that_they_had_elsewhere(ranks: RankPool, seed: int) -> None:
    rng = random.Random(seed)
    given, world_size, kind = random_given(rng), rng.randint(1, 3), rng.randrange(5)
    parts = ranks.run(world_size, loaded, given, kind)
    wanted = {}
    for key in stays(given):
        at = given.ids.tolist().index(key)
        told = {"age": int(given.ages[at]), "hits": int(given.hits[at])}
        for col in range(WIDTH):
            told[f"w{col}"] = float(given.weight[at, col])
            for name, state in given.states.items():
                told[f"{name}{col}"] = float(state[at, col] if state.dim() == 2 else state[at])
        wanted[key] = told
    rows = [given.weight[at] * (key in wanted) for at, key in enumerate(given.ids.tolist())]
    rows += [torch.zeros(WIDTH)] * 3
    found: dict[int, dict[str, Any]] = {}
    for said, known, looked_up in parts:
        assert said.left_out == len(given.ids) - len(wanted)
        assert said.written == len(known)
        for key, told in known.items():
            found.setdefault(key, {}).update(told)
        assert torch.equal(looked_up, torch.stack(rows))
    assert found == wanted


def room() -> Given:
    """A table with room for the five ids."""
    rule = DynamicConfig(blocks=1)
    table = EmbeddingBagConfig(8, WIDTH, "t", feature_names=["f"], dynamic=rule)
    torch.manual_seed(0)
    ids, ages, hits = torch.tensor([3, 2**62, -5, 0, 9]), torch.arange(5), torch.arange(5) + 2
    states = {"momentum1": torch.rand(5)}
    return Given(table, RowWiseAdagrad(lr=0.1), ids, torch.randn(5, WIDTH), ages, hits, states)


def test_a_file_and_tensors_give_the_same(tmp_path: Path) -> None:
    given = room()
    flat = pa.array(given.weight.reshape(-1).numpy())
    counts = {"id": given.ids, "age": given.ages, "hits": given.hits, **given.states}
    columns = {name: pa.array(column.numpy()) for name, column in counts.items()}
    columns["weight"] = pa.FixedSizeListArray.from_arrays(flat, WIDTH)
    pq.write_table(pa.table({**columns, "note": ["it is not read"] * 5}), tmp_path / "t.parquet")
    pq.write_table(pa.table(columns)[:0], tmp_path / "none.parquet")
    found = []
    for source in (given.weight, tmp_path / "t.parquet"):
        more = {"ids": given.ids, "ages": given.ages, "hits": given.hits, "optimizer": given.states}
        model = model_of(given, plan_of(given, 0, 1))
        said = load_table(model, "t", source, **(more if source is given.weight else {}))
        assert said == (5, 0)
        (state,) = model.shard_states()
        found.append({name: tensor.tolist() for name, tensor in state.tensors().items()})
    assert found[0] == found[1]
    assert load_table(model, "t", tmp_path / "none.parquet") == (0, 0)
    assert bool((model.shard_states()[0].ids["id_key"] == -1).all())
    pq.write_table(pa.table(columns).drop_columns("id"), tmp_path / "numbered.parquet")
    with pytest.raises(InputError, match="columns 'id' and 'weight'"):
        load_table(model, "t", tmp_path / "numbered.parquet")


def test_loaded_ids_train_on(ranks: RankPool) -> None:
    """An id that was seen longest ago goes first, and a state goes on from where it was."""
    given = room()
    model = model_of(given, plan_of(given, 0, 1))
    load_table(model, "t", given.weight, ids=given.ids, ages=given.ages, optimizer=given.states)
    new = torch.arange(100, 104)
    ids = torch.cat([new, given.ids[:1]])
    kjt = KeyedJaggedTensor(["f"], ids, lengths=torch.ones(5, dtype=torch.int32))
    model(kjt).values().sum().backward()
    (state,) = model.shard_states()
    keys = state.ids["id_key"].tolist()
    assert sorted(key for key in keys if key != -1) == sorted([*ids.tolist(), 2**62, -5, 0])
    row = keys.index(3)
    assert float(state.optimizer["momentum1"][row]) == pytest.approx(
        float(given.states["momentum1"][0]) + 1.0
    )


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"ids": None}, InputError, "give ids=, such as torch.arange"),
        ({"ids": torch.tensor([1, 2, 3, 4, 4])}, InputError, "one of them twice"),
        ({"ids": torch.tensor([1, 2, 3, 4, -1])}, InputError, "hold -1, which is no id"),
        ({"ids": torch.arange(5, dtype=torch.int32)}, InputError, "torch.int32, not torch.int64"),
        ({"ids": [1, 2, 3, 4, 5]}, InputError, "the ids for table 't' are a list; give a tensor"),
        ({"optimizer": {"momentum1": [0.0]}}, InputError, "the momentum1 for table 't' are a list"),
        ({"ids": torch.arange(4)}, ShapeError, "the rows for table 't' have shape (5, 8), not (4"),
        ({"ages": torch.arange(4)}, ShapeError, "the ages for table 't' have shape (4,), not (5,)"),
        ({"ages": torch.arange(5) - 1}, InputError, "the ages for table 't' are not whole numbers"),
        ({"hits": torch.rand(5)}, InputError, "the hits for table 't' are not whole numbers"),
        ({"optimizer": {"momentum1": torch.rand(5, 3)}}, ShapeError, "not (5,) or (5, 8)"),
        (
            {"optimizer": {"momentum1": torch.rand(5, WIDTH)}},
            InputError,
            "has the states momentum1 (one value per row), and momentum1 (one per element)",
        ),
        ({"optimizer": {"sums": torch.rand(5)}}, InputError, "and sums (one value per row) are"),
    ],
)
def test_what_are_no_rows_of_ids_is_refused(change: dict, error: type, says: str) -> None:
    given = room()
    model = model_of(given, plan_of(given, 0, 1))
    before = {name: tensor.clone() for name, tensor in model.shard_states()[0].tensors().items()}
    with pytest.raises(error, match=re.escape(says)):
        load_table(model, "t", given.weight, **({"ids": given.ids} | change))
    for name, tensor in model.shard_states()[0].tensors().items():
        assert torch.equal(tensor, before[name])


def test_ids_are_for_tensors_of_dynamic_tables(tmp_path: Path) -> None:
    given = room()
    model = model_of(given, plan_of(given, 0, 1))
    with pytest.raises(ConfigError, match="'t' is read from a file, and ids is for tensors"):
        load_table(model, "t", tmp_path / "t.parquet", ids=given.ids)
    table = EmbeddingBagConfig(5, WIDTH, "t", feature_names=["f"])
    static = Given(table, SGD(lr=0.1), given.ids, given.weight, given.ages, given.hits, {})
    model = model_of(static, plan_of(static, 0, 1))
    with pytest.raises(ConfigError, match="'t' is not dynamic, and ages is for tensors"):
        load_table(model, "t", given.weight, ages=given.ages)
    assert model.touched is not None
    mark = model.touched.mark()
    load_table(model, "t", given.weight)
    assert [rows.tolist() for rows in model.touched.since(mark).values()] == [list(range(5))]


def test_ages_are_seconds_where_the_table_goes_by_time() -> None:
    given = room()
    rule = DynamicConfig(blocks=1, eviction="timestamp", ttl_s=3)
    timed = replace(given, table=replace(given.table, dynamic=rule))
    model = model_of(timed, plan_of(timed, 0, 1))
    with pytest.raises(ConfigError, match=r"which none has told yet.*set model\.id_clocks first"):
        load_table(model, "t", given.weight, ids=given.ids, ages=given.ages)
    load_table(model, "t", given.weight, ids=given.ids)
    (state,) = model.shard_states()
    assert sorted(state.ids["id_time"].tolist()) == [NO_TIME] * 5 + [0] * 3
    model.id_clocks = {"t": Instant(7, 1000)}
    said = load_table(model, "t", given.weight, ids=given.ids, ages=given.ages)
    assert (said.written, said.left_out) == (4, 1)
    seen = dict(zip(state.ids["id_key"].tolist(), state.ids["id_time"].tolist(), strict=True))
    assert seen == {3: 1000, 2**62: 999, -5: 998, 0: 997, -1: 0}
    assert set(state.ids["id_seen"].tolist()) == {7, 0}
    assert torch.equal(look_up(model, given.ids[:4]), given.weight[:4])


def test_a_table_that_has_grown_takes_as_many_ids_as_it_has_rows() -> None:
    given = room()
    model = model_of(given, plan_of(given, 0, 1))
    model.take_rows({"t": 32})
    ids, rows = torch.arange(20), torch.randn(20, WIDTH)
    assert load_table(model, "t", rows, ids=ids) == (20, 0)
    assert torch.equal(look_up(model, ids), rows)
