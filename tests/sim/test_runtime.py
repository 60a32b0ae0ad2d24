"""The sharded runtime equals the unsharded model, over random worlds simulated in one process."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from rayrec.comm import LocalExchange, SimulatedWorld
from rayrec.comm.codec import Codecs, CommType, QCommsConfig
from rayrec.distributed import DistributedModelParallel, table_configs
from rayrec.distributed.kernels import parts
from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.errors import ConfigError, InputError, ShapeError
from rayrec.layout import (
    DataType,
    EmbeddingBagConfig,
    Storage,
    TableLayout,
    data_parallel,
    row_wise,
    table_wise,
)
from rayrec.modules import EmbeddingBagCollection
from rayrec.optim import SGD
from rayrec.sparse import KeyedJaggedTensor
from tests.simulation import (
    STEPS,
    TOLERANCE,
    batches_of,
    check_equals_unsharded,
    check_same,
    check_weight_gradients,
    run_sharded,
    sharded,
    targets_of,
)
from tests.worlds import Reference, build_collections, output_of, part_of, plan_for, random_world


@pytest.mark.seeds(range(200))
def test_mixed_plan_equals_unsharded(seed: int) -> None:
    check_equals_unsharded(random_world(seed), meta=seed % 2 == 0)


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.seeds(range(9000, 9030))
def test_threads_of_a_rank_change_no_bit(
    seed: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "LEAST_VALUES", 0)
    world = random_world(seed, sequences=seed % 2 == 0, varying=seed % 3 == 0)
    batches = batches_of(world, STEPS)
    targets = targets_of(world, batches)
    wanted = run_sharded(world, batches, targets, meta=True)
    check_same(run_sharded(world, batches, targets, meta=True, threads=threads), wanted)


@pytest.mark.seeds(range(200, 230))
def test_cpu_ranks_train_rows_of_any_storage_alike(seed: int) -> None:
    """They have one memory; tables of different storages, or of caches of different sizes, only
    share no kernel.
    """
    world, rng = random_world(seed, sequences=seed % 2 == 0), random.Random(seed)
    storages = [Storage(), Storage("host"), Storage("cached", 0.1), Storage("cached", 0.5)]
    stored = {
        name: replace(placement, storage=rng.choice(storages))
        for name, placement in world.plan.tables.items()
    }
    world.plan = replace(world.plan, tables=stored)
    check_equals_unsharded(world, meta=True)


@pytest.mark.seeds(range(2000, 2150))
def test_mixed_plan_with_sequences_equals_unsharded(seed: int) -> None:
    check_equals_unsharded(random_world(seed, sequences=True), meta=seed % 2 == 0)


@pytest.mark.seeds(range(3000, 3150))
def test_mixed_plan_with_a_variable_batch_equals_unsharded(seed: int) -> None:
    check_equals_unsharded(
        random_world(seed, sequences=seed % 3 == 0, varying=True), meta=seed % 2 == 0
    )


@pytest.mark.seeds(range(4000, 4040))
def test_sequence_forward_equals_unsharded_bit_for_bit(seed: int) -> None:
    world = random_world(seed, sequences=True)
    batches = batches_of(world, 1)
    outputs, _, _ = run_sharded(world, batches, targets_of(world, batches), meta=True)
    modules = build_collections(world)
    for rank in range(world.world_size):
        for i, module in enumerate(modules):
            if world.is_sequence(i):
                assert torch.equal(
                    outputs[0][rank][i], output_of(module, batches[0][rank]).detach()
                )


@pytest.mark.parametrize("precision", list(CommType))
@pytest.mark.seeds(range(20))
def test_replicas_stay_equal_bit_for_bit(seed: int, precision: CommType) -> None:
    world = random_world(seed, hosts=[[0, 1, 2]], sequences=seed % 2 == 0, varying=seed % 3 == 0)
    layouts = {
        t.name: data_parallel(t, range(3)) if i % 3 < 2 else table_wise(t, i % 2)
        for i, t in enumerate(world.tables)
    }
    world.plan = plan_for(3, layouts, world.hosts)
    batches = batches_of(world, STEPS)
    options = EngineOptions(codecs=Codecs.from_config(QCommsConfig(precision, precision)))
    _, states, _ = run_sharded(
        world, batches, targets_of(world, batches), meta=True, options=options
    )
    by_table: dict[str, list[torch.Tensor]] = {}
    for shard, weight, _ in states:
        by_table.setdefault(shard.table, []).append(weight)
    for name, copies in by_table.items():
        if isinstance(layouts[name], TableLayout):
            continue
        assert len(copies) == 3
        assert torch.equal(copies[0], copies[1]) and torch.equal(copies[0], copies[2])


@pytest.mark.parametrize("share_tables, collectives", [(False, [9, 3, 3]), (True, [6, 2, 2])])
def test_collections_on_one_kjt_share_one_exchange(
    share_tables: bool, collectives: list[int]
) -> None:
    tables = [EmbeddingBagConfig(10, 8, name=f"t{i}", feature_names=[f"f{i}"]) for i in range(3)]
    plan = plan_for(2, {t.name: row_wise(t, [0, 1]) for t in tables}, ((0, 1),))

    def rank_main(exchange):
        model = torch.nn.ModuleList(
            EmbeddingBagCollection(tables=[t], device=torch.device("meta")) for t in tables
        )
        options = EngineOptions(share_tables=share_tables)
        model, _ = sharded(model, plan, exchange, options=options)
        counts = []
        for _ in range(4):
            ids = torch.tensor([1, 2, 3])
            kjt = KeyedJaggedTensor(["f0", "f1", "f2"], ids, lengths=torch.ones_like(ids))
            before = exchange.world.collectives
            out = [m(kjt).values() for m in model]
            exchange.world.meet()
            counts.append(exchange.world.collectives - before)
            sum(o.sum() for o in out).backward()
            exchange.world.meet()
        return counts

    counts = SimulatedWorld(2).run(rank_main)[0]
    # header, payload, rows unless they are read in place: three times in the first step, once when
    # the engine has seen who shares
    assert [counts[0], *counts[2:]] == collectives, counts


def test_a_batch_of_empty_numpy_arrays_is_a_batch() -> None:
    table = EmbeddingBagConfig(10, 8, name="t", feature_names=["f"])
    plan = plan_for(1, {"t": table_wise(table, 0)}, ((0,),))
    model, _ = sharded(EmbeddingBagCollection(tables=[table]), plan, LocalExchange())
    ids, lengths = torch.from_numpy(np.empty(0, np.int64)), torch.from_numpy(np.empty(0, np.int32))
    assert model(KeyedJaggedTensor(["f"], ids, lengths=lengths, stride=0)).values().shape == (0, 8)


def test_missing_feature_and_bad_ids_are_named() -> None:
    table = EmbeddingBagConfig(10, 8, name="t", feature_names=["f"])
    plan = plan_for(1, {"t": table_wise(table, 0)}, ((0,),))

    one = torch.ones(1, dtype=torch.int64)
    for key, value, says in (
        ("g", 1, r"'f'.*'g'"),
        ("f", 10, r"id 10 of key 'f', row 0"),
        ("f", -1, "-1"),
    ):
        kjt = KeyedJaggedTensor([key], one * value, lengths=one)

        def rank_main(exchange, kjt=kjt):
            return sharded(EmbeddingBagCollection(tables=[table]), plan, exchange)[0](kjt)

        with pytest.raises(InputError, match=says):
            SimulatedWorld(1).run(rank_main)


def test_what_is_no_batch_of_ids_is_named() -> None:
    table = EmbeddingBagConfig(10, 8, name="t", feature_names=["f"])
    model = DistributedModelParallel(EmbeddingBagCollection([table], is_weighted=True))
    with pytest.raises(InputError, match=r"was given a Tensor; .* a KeyedJaggedTensor"):
        model(torch.arange(3))
    ids, ones = torch.arange(3), torch.ones(3, dtype=int)
    with pytest.raises(ShapeError, match=r"weights have shape \(3, 2\) for ids of shape \(3,\)"):
        model(KeyedJaggedTensor(["f"], ids, torch.ones(3, 2), ones))
    with pytest.raises(AttributeError, match=r"'t' is sharded .* model.state_dict\(\)"):
        model.module.embedding_bags["t"].weight  # noqa: B018


def test_a_collection_without_tables_is_named() -> None:
    table = EmbeddingBagConfig(10, 8, name="t", feature_names=["f"])
    both = [EmbeddingBagCollection([]), EmbeddingBagCollection([table])]
    with pytest.raises(ConfigError, match="EmbeddingBagCollection at '0' has no tables"):
        table_configs(torch.nn.Sequential(*both))
    with pytest.raises(ConfigError, match="EmbeddingBagCollection has no tables"):
        DistributedModelParallel(both[0])


def test_a_frozen_table_is_trained_by_nobody() -> None:
    tables = [EmbeddingBagConfig(10, 8, name=f"t{i}", feature_names=["f"]) for i in range(2)]
    module = torch.nn.Sequential(EmbeddingBagCollection(tables))
    module[0].embedding_bags["t1"].weight.requires_grad_(False)
    before = module[0].embedding_bags["t1"].weight.clone()
    by_table = {"t0": SGD(lr=0.1), "t1": SGD(lr=0.1)}
    for optimizer in (None, by_table):
        with pytest.raises(ConfigError, match="table 't1' is frozen"):
            DistributedModelParallel(module, sparse_optimizer=optimizer)
    by_table["t1"] = SGD(lr=0.0)
    model = DistributedModelParallel(module, sparse_optimizer=by_table)
    model(KeyedJaggedTensor(["f"], torch.arange(10), lengths=torch.ones(10, dtype=int)))[
        "f@t1"
    ].sum().backward()
    assert torch.equal(model.state_dict()["0.embedding_bags.t1.weight"], before)


@pytest.mark.parametrize("check_ids", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("lengths", [[4, -1], [-1, 4]])
def test_negative_lengths_are_never_looked_up(
    lengths: list[int], ranks: int, check_ids: bool
) -> None:
    table = EmbeddingBagConfig(10, 8, name="t", feature_names=["f"])
    for layout in (table_wise(table, ranks - 1), row_wise(table, range(ranks))):
        plan = plan_for(ranks, {"t": layout}, (tuple(range(ranks)),))

        def rank_main(exchange, plan=plan):
            options = EngineOptions(check_ids=check_ids)
            collection = EmbeddingBagCollection(tables=[table])
            model, _ = sharded(collection, plan, exchange, options=options)
            sizes = torch.tensor([2, 1] if exchange.rank else lengths)
            return model(KeyedJaggedTensor(["f"], torch.arange(3), lengths=sizes))

        with pytest.raises(ShapeError, match=r"3 ids, .* sum to 3 \(the least is -1\)"):
            SimulatedWorld(ranks).run(rank_main)


@pytest.mark.seeds(range(5000, 5040))
def test_gradients_of_learned_weights_equal_unsharded(seed: int) -> None:
    check_weight_gradients(random_world(seed, optimizer=SGD(lr=0.1)))


@pytest.mark.parametrize(
    "data_type, dtype", [(DataType.FP16, torch.float16), (DataType.BF16, torch.bfloat16)]
)
@pytest.mark.seeds(range(6000, 6020))
def test_half_precision_tables_pool_as_unsharded(
    seed: int, data_type: DataType, dtype: torch.dtype
) -> None:
    world = random_world(seed, sequences=True)
    for table in world.tables:
        table.data_type = data_type
    batches = batches_of(world, 1)
    outputs, states, _ = run_sharded(world, batches, targets_of(world, batches), meta=True)
    modules = build_collections(world)
    assert {weight.dtype for _, weight, _ in states} == {dtype}
    for rank in range(world.world_size):
        for i, module in enumerate(modules):
            torch.testing.assert_close(
                outputs[0][rank][i], output_of(module, batches[0][rank]).detach(), **TOLERANCE
            )


@pytest.mark.parametrize(
    "data_type, dtype", [(DataType.FP16, torch.float16), (DataType.BF16, torch.bfloat16)]
)
@pytest.mark.seeds(range(6100, 6140))
def test_half_precision_tables_train_as_float32_ones_that_are_rounded_after_every_step(
    seed: int, data_type: DataType, dtype: torch.dtype
) -> None:
    world = random_world(seed, sequences=True, varying=seed % 3 == 0, unit=4)
    batches = batches_of(world, STEPS)
    targets = targets_of(world, batches)
    reference = Reference(world)
    weights = reference.weights()

    def round_() -> None:
        for weight in weights.values():
            weight.data.copy_(weight.data.to(dtype))

    round_()
    for step in range(STEPS):
        reference.step(batches[step], targets[step])
        round_()
    for table in world.tables:
        table.data_type = data_type
    _, states, _ = run_sharded(world, batches, targets, meta=True)
    ulp = torch.finfo(dtype).eps
    for shard, weight, _ in states:
        # a sum in another order may round to the neighbour once a step; gradients do not depend on
        # rows
        wanted = part_of(weights[shard.table].detach(), shard)
        torch.testing.assert_close(weight.float(), wanted, rtol=STEPS * ulp, atol=1e-4)
