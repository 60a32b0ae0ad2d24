"""The two-hop route equals the flat one and sends fewer bytes between hosts; wire codecs keep their
promises; ids cross once.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch

from rayrec.comm import LocalExchange, SimulatedWorld
from rayrec.comm.codec import CastCodec, Codecs, CommType, Int8Codec, QCommsConfig
from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.errors import InputError
from rayrec.layout import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    ShardingPlan,
    TablePlacement,
    column_wise,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection
from rayrec.optim import SGD
from rayrec.quant import quantize
from rayrec.sparse import KeyedJaggedTensor
from tests.simulation import batches_of, check_equals_unsharded, run_sharded, sharded, targets_of
from tests.worlds import World, plan_for, random_world


@pytest.mark.seeds(range(40))
@pytest.mark.parametrize(
    "hosts",
    [((0, 1), (2, 3)), ((0, 1, 2), (3, 4, 5)), ((0, 1), (2, 3), (4, 5))],
    ids=["2x2", "2x3", "3x2"],
)
def test_two_hop_layouts_equal_unsharded(seed: int, hosts) -> None:
    world = random_world(8000 + seed, hosts=hosts, varying=seed % 4 == 3)
    rng = random.Random(seed)
    ranks = [r for h in hosts for r in h]
    tables = {}
    for table in world.tables:
        table.num_embeddings = max(table.num_embeddings, len(ranks))
        kinds = [
            lambda t: row_wise(t, ranks),
            lambda t: grid_shard(t, hosts),
            lambda t: table_row_wise(t, rng.choice(hosts)),
            lambda t: column_wise(t, ranks[:2]),
        ]
        tables[table.name] = TablePlacement(rng.choice(kinds)(table))
    world.plan = ShardingPlan(world_size=len(ranks), tables=tables, hosts=hosts)
    check_equals_unsharded(world, meta=True)


def test_two_hops_send_one_lth_of_the_bytes_between_hosts() -> None:
    table = EmbeddingBagConfig(64, 32, name="t", feature_names=["f"])
    hosts = ((0, 1), (2, 3))
    plan = plan_for(4, {"t": row_wise(table, range(4))}, hosts)

    def rank_main(exchange):
        model, engine = sharded(EmbeddingBagCollection([table], device="meta"), plan, exchange)
        kjt = KeyedJaggedTensor(["f"], torch.arange(16), lengths=torch.full((8,), 2))
        model(kjt).values().sum().backward()
        exchange.world.meet()
        return engine.deployed.way_of[0].hops.peers.world.sent_bytes

    crossed = SimulatedWorld(4).run(rank_main)
    bags, row_bytes, directions = 8, 32 * 4, 2
    # four ranks, each to the two ranks of the other host
    flat = 4 * 2 * bags * row_bytes * directions
    assert crossed[0] + crossed[1] == flat // 2  # one exchange per local index


@pytest.mark.parametrize(
    "precision, factor", [(CommType.FP16, 2.0), (CommType.BF16, 2.0), (CommType.INT8, 3.5)]
)
def test_codecs_shrink_messages_and_bound_the_error(precision: CommType, factor: float) -> None:
    codec = Codecs.from_config(QCommsConfig(precision, precision)).forward
    assert codec is not None
    generator = torch.Generator().manual_seed(0)
    sizes = [0, 640, 13, 4096]
    values = torch.randn(sum(sizes), generator=generator)
    wire = codec.encode(values, sizes)
    assert wire.numel() == sum(codec.size(n) for n in sizes)
    big = codec.encode(values[:640], [640])
    assert 640 * 4 / (big.numel() * big.element_size()) >= factor
    back = codec.decode(wire, sizes)
    # float16 keeps 11 bits, bfloat16 8; int8 has 256 levels over a block's range, here at most
    # about 8
    bound = {CommType.FP16: 2**-9, CommType.BF16: 2**-6, CommType.INT8: 8 / 255}[precision]
    assert back.shape == values.shape and back.dtype == torch.float32
    assert (back - values).abs().max() < bound
    assert not torch.equal(back, values)


def test_empty_messages_pass_every_codec() -> None:
    for codec in (CastCodec(torch.float16), Int8Codec()):
        assert codec.decode(codec.encode(torch.empty(0), [0, 0]), [0, 0]).numel() == 0


@pytest.mark.parametrize("precision", [CommType.FP16, CommType.BF16, CommType.INT8])
@pytest.mark.seeds(range(10))
def test_coded_training_stays_near_the_exact_one(seed: int, precision: CommType) -> None:
    world: World = random_world(9000 + seed, hosts=[[0, 1], [2, 3]], optimizer=SGD(lr=0.01))
    batches = batches_of(world, 2)
    targets = targets_of(world, batches)
    exact, _, _ = run_sharded(world, batches, targets, meta=True)
    coded, _, _ = run_sharded(
        world,
        batches,
        targets,
        meta=True,
        options=EngineOptions(codecs=Codecs.from_config(QCommsConfig(precision, precision))),
    )
    for a, b in zip(
        (o for s in exact for r in s for o in r),
        (o for s in coded for r in s for o in r),
        strict=True,
    ):
        # up to four ids of values within 1 / sqrt(2), coded to 8 bits of a block's range, twice
        # over
        torch.testing.assert_close(a, b, rtol=0, atol=0.1)


@pytest.mark.seeds(range(30))
def test_sequences_with_distinct_ids_equal_unsharded(seed: int) -> None:
    world = random_world(9500 + seed, sequences=True, varying=seed % 3 == 2)
    check_equals_unsharded(world, meta=True, options=EngineOptions(dedup_sequences=True))


@pytest.mark.parametrize("dedup", [False, True])
def test_a_rank_without_ids_may_have_the_floats_that_torch_makes_of_an_empty_list(
    dedup: bool,
) -> None:
    config = {"num_embeddings": 10, "embedding_dim": 8, "feature_names": ["f"]}
    pooled, sequence = EmbeddingBagConfig(name="p", **config), EmbeddingConfig(name="s", **config)
    plan = plan_for(2, {"p": row_wise(pooled, [0, 1]), "s": table_wise(sequence, 0)})
    empty = KeyedJaggedTensor(["f"], torch.tensor([]), lengths=torch.zeros(2, dtype=int))

    def look_up(model):
        return model[0](empty).values(), model[1](empty)["f"].values()

    def rank_main(exchange):
        both = torch.nn.ModuleList(
            [EmbeddingBagCollection([pooled]), EmbeddingCollection([sequence])]
        )
        options = EngineOptions(dedup_sequences=dedup)
        return look_up(sharded(both, plan, exchange, options=options)[0])

    modules = EmbeddingBagCollection([pooled]), EmbeddingCollection([sequence])
    packed = look_up([quantize(module) for module in modules])
    for pools, rows in [*SimulatedWorld(2).run(rank_main), look_up(modules), packed]:
        assert torch.equal(pools, torch.zeros(2, 8)) and rows.shape == (0, 8)


@pytest.mark.parametrize("bags", [1, 4])
@pytest.mark.parametrize("ids", [torch.int64, torch.int32])
def test_ids_lengths_and_weights_may_be_columns_of_matrices(ids: torch.dtype, bags: int) -> None:
    table = EmbeddingBagConfig(10, 8, name="t", feature_names=["f"])
    collection = EmbeddingBagCollection([table], is_weighted=True)

    def batch(column: int) -> KeyedJaggedTensor:
        numbers = torch.arange(2 * bags).view(bags, 2)
        weights = torch.rand(bags, 2, generator=torch.Generator().manual_seed(0))[:, column]
        ones = torch.ones(bags, 2, dtype=ids)[:, column]
        return KeyedJaggedTensor(["f"], numbers.to(ids)[:, column], weights, ones)

    for layout in (table_wise(table, 0), row_wise(table, [0, 1])):
        plan = plan_for(2, {"t": layout}, ((0, 1),))

        def rank_main(exchange, plan=plan):
            torch.set_num_threads(1)
            options = EngineOptions(share_tables=False)
            copied = copy.deepcopy(collection)
            return sharded(copied, plan, exchange, options=options)[0](batch(exchange.rank))

        for rank, found in enumerate(SimulatedWorld(2).run(rank_main)):
            wanted = collection(batch(rank)).values()
            torch.testing.assert_close(found.values(), wanted)


def test_distinct_ids_cross_once() -> None:
    table = EmbeddingConfig(64, 32, name="t", feature_names=["f"])
    plan = plan_for(2, {"t": row_wise(table, [0, 1])})
    sent = {}
    for dedup in (False, True):
        world = SimulatedWorld(2)

        def rank_main(exchange, dedup=dedup):
            options = EngineOptions(dedup_sequences=dedup, share_tables=False)
            collection = EmbeddingCollection([table], device="meta")
            model, _ = sharded(collection, plan, exchange, options=options)
            ids = torch.tensor([1, 40]).repeat(50)
            kjt = KeyedJaggedTensor(["f"], ids, lengths=torch.full((10,), 10))
            model(kjt)["f"].values().sum().backward()

        world.run(rank_main)
        sent[dedup] = world.sent_bytes
    assert sent[True] * 20 < sent[False]


@pytest.mark.parametrize("others", [[-5, -5, -6], [2**62, 2**63 - 1]])
def test_keys_that_no_sequence_looks_up_may_have_any_ids_beside_distinct_ones(
    others: list[int],
) -> None:
    table = EmbeddingConfig(64, 8, name="t", feature_names=["f"])
    plan = plan_for(2, {"t": row_wise(table, [0, 1])})

    def rank_main(exchange):
        options = EngineOptions(dedup_sequences=True)
        model, _ = sharded(EmbeddingCollection([table]), plan, exchange, options=options)
        ids, sizes = torch.tensor([*others, 1, 40, 3, 40]), torch.tensor([len(others), 1, 3])
        return model(KeyedJaggedTensor(["hash", "g", "f"], ids, lengths=sizes))["f"].values()

    torch.manual_seed(0)
    rows = EmbeddingCollection([table]).embeddings["t"].weight[[40, 3, 40]]
    for found in SimulatedWorld(2).run(rank_main):
        torch.testing.assert_close(found, rows)


@pytest.mark.parametrize("dedup", [False, True])
def test_a_missing_feature_is_named_beside_all_keys(dedup: bool) -> None:
    table = EmbeddingConfig(64, 8, name="t", feature_names=["f"])
    plan, options = plan_for(1, {"t": table_wise(table, 0)}), EngineOptions(dedup_sequences=dedup)
    model, _ = sharded(EmbeddingCollection([table]), plan, LocalExchange(), options=options)
    with pytest.raises(InputError, match=r"lacks feature 'f', .* its keys are \['g'\]"):
        model(KeyedJaggedTensor(["g"], torch.arange(2), lengths=torch.ones(2).int()))


def test_a_clipped_gradient_of_distinct_ids_is_that_of_each_id() -> None:
    table = EmbeddingConfig(4, 8, name="t", feature_names=["f"], init_fn=torch.nn.init.zeros_)
    plan = plan_for(2, {"t": row_wise(table, [0, 1])})

    def rank_main(exchange):
        collection = EmbeddingCollection([table], device="meta")
        optimizer, options = SGD(1.0, max_gradient=0.5), EngineOptions(dedup_sequences=True)
        model, engine = sharded(collection, plan, exchange, optimizer, options=options)
        ids = KeyedJaggedTensor(["f"], torch.tensor([3, 3, 3]), lengths=torch.tensor([3]))
        (0.8 * model(ids)["f"].values()).sum().backward()
        return torch.cat([state.weight[-1] for state in engine.shard_states()]).tolist()

    # .4 is the mean over ranks of each of the six gradients
    assert SimulatedWorld(2).run(rank_main)[1] == pytest.approx([-6 * 0.4] * 8)


def test_int8_exchange_moves_three_and_a_half_times_fewer_bytes() -> None:
    table = EmbeddingBagConfig(64, 64, name="t", feature_names=["f"])
    plan = plan_for(2, {"t": table_wise(table, 1)})
    sent = {}
    for precision in (CommType.FP32, CommType.INT8):
        world = SimulatedWorld(2)

        def rank_main(exchange, precision=precision):
            options = EngineOptions(
                codecs=Codecs.from_config(QCommsConfig(precision, precision)), share_tables=False
            )
            collection = EmbeddingBagCollection([table], device="meta")
            model, _ = sharded(collection, plan, exchange, options=options)
            ids = torch.arange(64)
            kjt = KeyedJaggedTensor(["f"], ids, lengths=torch.ones_like(ids))
            model(kjt).values().sum().backward()

        world.run(rank_main)
        sent[precision] = world.sent_bytes
    rows = 2 * 64 * 64 * 4  # rank 0's 64 bags of 64 columns of float32, forward and backward
    ids = sent[CommType.FP32] - rows
    assert ids > 0
    assert rows / (sent[CommType.INT8] - ids) >= 3.5


def test_ids_of_a_feature_cross_once_however_many_column_blocks_read_them() -> None:
    table = EmbeddingBagConfig(64, 32, name="t", feature_names=["f"])
    sent = {}
    for blocks in (1, 4):
        plan = plan_for(2, {"t": column_wise(table, [1] * blocks)})
        world = SimulatedWorld(2)

        def rank_main(exchange, plan=plan):
            collection = EmbeddingBagCollection([table], device="meta")
            options = EngineOptions(share_tables=False)
            model, _ = sharded(collection, plan, exchange, options=options)
            ids = torch.arange(64)
            model(KeyedJaggedTensor(["f"], ids, lengths=torch.ones_like(ids)))

        world.run(rank_main)
        sent[blocks] = world.sent_bytes
    assert sent[1] == sent[4] > 0
