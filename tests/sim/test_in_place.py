"""Tables that all ranks read in place equal the unsharded ones, and N ranks equal one rank bit for
bit.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rayrec.comm import LocalExchange, SimulatedWorld
from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.layout import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    Replicated,
    ShardingPlan,
    TableLayout,
    TablePlacement,
    table_wise,
)
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection
from rayrec.optim import Adam, LarsSGD, PartialRowWiseAdam, RowWiseAdagrad, SparseOptimizer
from rayrec.sparse import KeyedJaggedTensor
from tests.simulation import (
    batches_of,
    check_equals_unsharded,
    check_same,
    check_weight_gradients,
    place_of,
    run_sharded,
    sharded,
    sharded_world,
    targets_of,
)
from tests.worlds import OPTIMIZERS, World, build_collections, output_of, plan_for, random_world

IN_PLACE = EngineOptions(share_tables=True)
OPTIMIZER = RowWiseAdagrad(lr=0.1, eps=1e-6)


def shares(world: World) -> bool:
    """Whether any collection is read in place."""

    def rank_main(exchange) -> bool:
        return sharded_world(world, exchange)[1].deployed.shares_tables

    return all(SimulatedWorld(world.world_size).run(rank_main))


def check_same_in_place(world: World, batches: list[list[KeyedJaggedTensor]]) -> None:
    """Rows that are read in place train as rows that travel, bit for bit."""
    targets = targets_of(world, batches)
    assert shares(world)
    check_same(
        run_sharded(world, batches, targets, True, IN_PLACE),
        run_sharded(world, batches, targets, True, EngineOptions(share_tables=False)),
    )


@pytest.mark.seeds(range(10_000, 10_180))
def test_tables_read_in_place_equal_unsharded(seed: int) -> None:
    world = random_world(
        seed, optimizer=OPTIMIZERS[seed % 3], sequences=seed % 4 == 0, varying=seed % 5 == 0
    )
    check_equals_unsharded(world, meta=seed % 2 == 0, options=IN_PLACE)


def test_most_of_those_worlds_share_tables() -> None:
    assert (
        sum(shares(random_world(seed, optimizer=OPTIMIZER)) for seed in range(10_000, 10_040)) > 25
    )


def _half(world: World, data_type: DataType) -> World:
    tables = [tuple(replace(t, data_type=data_type) for t in ts) for ts in world.collections]
    return replace(world, collections=tables)


@pytest.mark.parametrize(
    "optimizer",
    [
        Adam(lr=0.01),
        PartialRowWiseAdam(lr=0.01),
        LarsSGD(lr=0.1),
        RowWiseAdagrad(lr=0.1, weight_decay=0.1),
    ],
)
@pytest.mark.parametrize("data_type", list(DataType))
@pytest.mark.seeds(range(10_500, 10_505))
def test_every_optimizer_trains_rows_in_place_as_it_trains_those_that_travel(
    seed: int, data_type: DataType, optimizer: SparseOptimizer
) -> None:
    """Bags of one id, whose rows are the same sums whatever cuts them."""
    world = random_world(seed, hosts=((0, 1, 2),), optimizer=optimizer, sequences=seed % 2 == 0)
    world = _half(world, data_type)
    batches = [[_one_id(kjt) for kjt in step] for step in batches_of(world, 3)]
    check_same_in_place(world, batches)


@pytest.mark.seeds(range(10_160, 10_190))
def test_sequences_equal_unsharded_and_those_whose_rows_travel_bit_for_bit(seed: int) -> None:
    world = random_world(seed, hosts=((0, 1, 2),), optimizer=OPTIMIZER, sequences=True)
    batches = batches_of(world, 3)
    targets = targets_of(world, batches)
    assert shares(world)
    outputs, states, _ = run_sharded(world, batches, targets, True, IN_PLACE)
    wanted, want_states, _ = run_sharded(
        world, batches, targets, True, EngineOptions(share_tables=False)
    )
    modules = build_collections(world)
    sequences = [i for i in range(len(world.collections)) if world.is_sequence(i)]
    names = {t.name for i in sequences for t in world.collections[i]}
    for rank in range(3):
        for i in sequences:
            assert torch.equal(
                outputs[0][rank][i], output_of(modules[i], batches[0][rank]).detach()
            )
            assert all(
                torch.equal(step[rank][i], want[rank][i])
                for step, want in zip(outputs, wanted, strict=True)
            )
    found, want_found = (
        [s for s in sorted(all_of, key=place_of) if s[0].table in names]
        for all_of in (states, want_states)
    )
    for (shard, weight, state), (want_shard, want, want_state) in zip(
        found, want_found, strict=True
    ):
        assert (
            shard == want_shard
            and torch.equal(weight, want)
            and torch.equal(state["momentum1"], want_state["momentum1"])
        )


@pytest.mark.seeds(range(10_200, 10_230))
def test_clipped_gradients_are_those_of_exchanged_rows(seed: int) -> None:
    """Bags of one id, whose rows are the same sums whatever cuts them."""
    world = random_world(seed, hosts=((0, 1, 2),), optimizer=replace(OPTIMIZER, max_gradient=0.2))
    batches = [[_one_id(kjt) for kjt in step] for step in batches_of(world, 3)]
    check_same_in_place(world, batches)


def _one_id(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    lengths = kjt.lengths().reshape(-1)
    first = (lengths.cumsum(0) - lengths)[lengths > 0]
    weights = None if kjt.weights_or_none() is None else kjt.weights()[first]
    return KeyedJaggedTensor(
        kjt.keys(),
        kjt.values()[first],
        weights,
        (lengths > 0).to(lengths.dtype),
        stride=kjt.stride(),
    )


def whole_batch(batches: list[KeyedJaggedTensor], keys: list[str]) -> KeyedJaggedTensor:
    """The bags of all ranks, rank by rank."""
    parts = [[(kjt[key], kjt.weights_or_none()) for kjt in batches] for key in keys]
    lengths = torch.cat([jagged.lengths() for of_key in parts for jagged, _ in of_key])
    ids = torch.cat([jagged.values() for of_key in parts for jagged, _ in of_key])
    weighted = batches[0].weights_or_none() is not None
    weights = (
        torch.cat([jagged.weights() for of_key in parts for jagged, _ in of_key])
        if weighted
        else None
    )
    return KeyedJaggedTensor(
        keys, ids, weights, lengths, stride=sum(kjt.stride() for kjt in batches)
    )


def on_one_rank(world: World) -> World:
    """The same column cuts; how rows are cut changes nothing."""

    def alone(layout: TableLayout | Replicated) -> TableLayout | Replicated:
        if isinstance(layout, Replicated):
            return Replicated(*layout.shape, (0,))
        cuts = (layout.row_cuts[0], layout.row_cuts[-1]), layout.col_cuts
        return TableLayout(*cuts, (tuple(0 for _ in layout.col_cuts[1:]),))

    tables = {
        name: TablePlacement(alone(placement.layout))
        for name, placement in world.plan.tables.items()
    }
    return replace(world, hosts=((0,),), plan=ShardingPlan(world_size=1, tables=tables))


@pytest.mark.seeds(range(10_300, 10_360))
def test_any_plan_on_some_ranks_equals_one_rank_bit_for_bit(seed: int) -> None:
    ranks = random.Random(seed).choice([2, 4])  # gradients are divided by it: exactly
    world = random_world(seed, hosts=(tuple(range(ranks)),), optimizer=OPTIMIZER)
    batches = batches_of(world, 3)
    targets = targets_of(world, batches)
    outputs, states, _ = run_sharded(world, batches, targets, True, IN_PLACE)
    alone = on_one_rank(world)
    wholes = [[whole_batch(step, world.features())] for step in batches]
    whole_targets = [
        [[torch.cat(parts) / ranks for parts in zip(*step, strict=True)]] for step in targets
    ]
    one, one_states, _ = run_sharded(alone, wholes, whole_targets, True, IN_PLACE)
    for step, (got,) in zip(outputs, one, strict=True):
        for i, whole in enumerate(got):
            assert torch.equal(torch.cat([rank[i] for rank in step]), whole)
    tables = {(s.table, s.cols.start): weight for s, weight, _ in one_states}
    for shard, weight, _ in states:
        assert torch.equal(
            weight, tables[shard.table, shard.cols.start][shard.rows.start : shard.rows.stop]
        )


@pytest.mark.seeds(range(10_400, 10_430))
def test_gradients_of_learned_weights_equal_unsharded(seed: int) -> None:
    check_weight_gradients(random_world(seed, optimizer=OPTIMIZER))


def test_two_forwards_before_their_backwards() -> None:
    """Gradients of the second are handed over while others may still read those of the first."""
    tables = [EmbeddingBagConfig(50, 16, name=f"t{i}", feature_names=[f"f{i}"]) for i in range(6)]
    # step, forward, feature, row
    ids = torch.randint(50, (4, 2, 6, 8), generator=torch.Generator().manual_seed(3))

    def train(exchange) -> list[Tensor]:
        size = exchange.world_size
        owners = {t.name: table_wise(t, i % size) for i, t in enumerate(tables)}
        plan = plan_for(size, owners, (tuple(range(size)),))
        collection = EmbeddingBagCollection(tables, device="meta")
        model, engine = sharded(collection, plan, exchange, OPTIMIZER)
        for step in ids:
            mine = [part.chunk(exchange.world_size, 1)[exchange.rank].reshape(-1) for part in step]
            kjts = [
                KeyedJaggedTensor([f"f{i}" for i in range(6)], part, lengths=torch.ones_like(part))
                for part in mine
            ]
            for output in [model(kjt).values() for kjt in kjts]:
                # the mean over ranks is of the same sum
                output.backward(output.detach() * (exchange.world_size / 2))
        return [
            state.weight.detach()
            for state in sorted(engine.shard_states(), key=lambda s: s.shard.table)
        ]

    first, second = SimulatedWorld(2).run(train)
    for i, want in enumerate(train(LocalExchange())):
        torch.testing.assert_close((first, second)[i % 2][i // 2], want, rtol=0, atol=0)


@pytest.mark.parametrize("share_tables", [True, False])
@pytest.mark.parametrize("is_sequence", [True, False])
def test_rows_beyond_4_gib_of_a_table_get_their_own_gradients(
    is_sequence: bool, share_tables: bool
) -> None:
    """The memory of rows that nobody touches is never taken."""
    config = EmbeddingConfig if is_sequence else EmbeddingBagConfig
    tables = [
        config(rows, 64, name=f"t{i}", feature_names=[f"f{i}"])
        for i, rows in enumerate([20, (1 << 24) + 1])
    ]
    collection = (EmbeddingCollection if is_sequence else EmbeddingBagCollection)(
        tables=tables, device="meta"
    )
    options = EngineOptions(share_tables=share_tables, initialize=False)
    plan = plan_for(1, {table.name: table_wise(table, 0) for table in tables})
    model, engine = sharded(collection, plan, LocalExchange(), RowWiseAdagrad(lr=0.5), 0, options)
    last = [table.num_embeddings - 1 for table in tables]
    kjt = KeyedJaggedTensor(["f0", "f1"], torch.tensor(last), lengths=torch.ones(2).int())
    output_of(model, kjt).sum().backward()
    for state in engine.shard_states():
        torch.testing.assert_close(state.weight[-1], torch.full((64,), -0.5))
        assert not state.weight[:4].any()
