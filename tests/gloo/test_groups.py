"""The sharded runtime over real gloo process groups: kinds, optimizers, mixed plans, DDP around the
dense rest.
"""

from __future__ import annotations

import pytest
import torch

from rayrec.comm import choose
from rayrec.comm.joined import JoinedExchange
from rayrec.comm.process_group import ProcessGroupExchange
from rayrec.comm.shared_memory import SharedMemoryExchange
from rayrec.distributed import DistributedModelParallel
from rayrec.layout import (
    KINDS,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    TableLayout,
    column_wise,
    data_parallel,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from rayrec.modules import EmbeddingCollection
from rayrec.optim import SGD, Adam, RowWiseAdagrad
from rayrec.sparse import KeyedJaggedTensor
from tests import draws
from tests.draws import RowReference, draw
from tests.ranks import RankPool
from tests.simulation import (
    TOLERANCE,
    Close,
    batches_of,
    check_outputs,
    check_rows,
    targets_of,
    train_step,
)
from tests.worlds import OPTIMIZERS, Reference, World, build_collections, plan_for, random_world

STEPS = 3
TRANSPORTS = {
    "auto": SharedMemoryExchange,
    "process_group": ProcessGroupExchange,
    "joined": JoinedExchange,
}


def world_of_kind(kind: str, world_size: int, optimizer) -> World:
    """Three tables, all of one kind."""
    hosts = ((0, 1), (2, 3)) if world_size == 4 else (tuple(range(world_size)),)
    tables = tuple(
        EmbeddingBagConfig(n, d, name=f"t{i}", feature_names=f, pooling=p)
        for i, (n, d, f, p) in enumerate(
            [
                (11, 8, ["a"], PoolingType.SUM),
                (30, 16, ["a", "b"], PoolingType.MEAN),
                (7, 12, ["c"], PoolingType.SUM),
            ]
        )
    )
    everyone = range(world_size)
    make = {
        "table_wise": lambda i, t: table_wise(t, i % world_size),
        "row_wise": lambda i, t: row_wise(t, everyone),
        "column_wise": lambda i, t: column_wise(t, everyone),
        "table_row_wise": lambda i, t: table_row_wise(t, hosts[i % len(hosts)]),
        "table_column_wise": lambda i, t: table_column_wise(t, hosts[i % len(hosts)]),
        "grid_shard": lambda i, t: grid_shard(t, hosts),
        "data_parallel": lambda i, t: data_parallel(t, everyone),
    }[kind]
    plan = plan_for(world_size, {t.name: make(i, t) for i, t in enumerate(tables)}, hosts)
    return World(7, hosts, [tables], [False], plan, optimizer)


def train_world(
    rank: int,
    world_size: int,
    world: World,
    meta: bool,
    transport: str = "auto",
    share_tables: bool = True,
):
    """One rank's outputs by step and final shards; "joined" as if ranks 0, 1 and 2, 3 were on two
    hosts.
    """
    batches = batches_of(world, STEPS)
    targets = targets_of(world, batches)
    torch.manual_seed(world.seed)
    with pytest.MonkeyPatch.context() as patch:
        if transport == "joined":
            patch.setattr(choose, "host_identity", lambda: f"host{rank // 2}")
        model = DistributedModelParallel(
            build_collections(world, "meta" if meta else "cpu"),
            plan=world.plan,
            sparse_optimizer=world.optimizer,
            seed=world.seed,
            transport="auto" if transport == "joined" else transport,
            share_tables=share_tables,
        )
    assert type(model._engine.exchange) is TRANSPORTS[transport]
    outputs = []
    for step in range(STEPS):
        outputs.append(train_step(model.module, batches[step][rank], targets[step][rank]))
    return outputs, [(s.shard, s.weight.detach().clone()) for s in model.shard_states()]


def check_world(
    ranks: RankPool,
    reference: Reference,
    meta: bool = True,
    share_tables: bool = True,
    close: Close = TOLERANCE,
) -> None:
    world = reference.world
    results = ranks.run(world.world_size, train_world, world, meta, "auto", share_tables)
    batches = batches_of(world, STEPS)
    outputs = [list(step) for step in zip(*(outputs for outputs, _ in results), strict=True)]
    check_outputs(reference, batches, targets_of(world, batches), outputs, close)
    check_rows(reference, [state for _, states in results for state in states], close)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_equals_unsharded_over_gloo(
    ranks: RankPool, kind: str, world_size: int, optimizer
) -> None:
    reference = Reference(world_of_kind(kind, world_size, optimizer))
    check_world(ranks, reference, share_tables=world_size != 3)


@pytest.mark.seeds(range(12))
@pytest.mark.parametrize(
    "hosts", [((0, 1),), ((0, 1, 2),), ((0, 1), (2, 3))], ids=["2", "3", "2x2"]
)
def test_mixed_plan_equals_unsharded_over_gloo(ranks: RankPool, hosts, seed: int) -> None:
    world = random_world(1000 + seed, hosts=hosts, sequences=seed % 3 == 1, varying=seed % 3 == 2)
    check_world(ranks, Reference(world), meta=seed % 2 == 0, share_tables=seed % 4 < 2)


@pytest.mark.seeds(range(12))
def test_everything_at_once_equals_unsharded_over_gloo(ranks: RankPool, seed: int) -> None:
    """The property of tests/sim/test_everything.py, over four ranks as two hosts of two."""
    world, world.optimizer = draw(10_000 + seed, ((0, 1), (2, 3)))
    reference, in_place = RowReference(world, world.optimizer), world.seed % 2 == 0
    check_world(ranks, reference, seed % 2 == 0, in_place, draws.TOLERANCE)


def _where(state) -> tuple[str, int, int]:
    return state[0].table, state[0].rows.start, state[0].cols.start


def check_alike(results, wanted, exact: bool) -> None:
    for (outputs, shards), (want_outputs, want_shards) in zip(results, wanted, strict=True):
        for got, want in zip(outputs, want_outputs, strict=True):
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b) if exact else torch.allclose(a, b, **TOLERANCE)
        for (shard, got), (want_shard, want) in zip(
            sorted(shards, key=_where), sorted(want_shards, key=_where), strict=True
        ):
            assert shard == want_shard and (
                torch.equal(got, want) if exact else torch.allclose(got, want, **TOLERANCE)
            )


@pytest.mark.seeds(range(12))
def test_every_transport_trains_alike_bit_for_bit(ranks: RankPool, seed: int) -> None:
    """Tables that are read in place sum a bag in the order of its ids, and not row block by row
    block: bit for bit where nothing is cut.
    """
    world = random_world(
        2000 + seed, hosts=((0, 1), (2, 3)), sequences=seed % 3 == 1, varying=seed % 3 == 2
    )
    wanted = ranks.run(4, train_world, world, False, "process_group")
    for transport in ("auto", "joined"):
        check_alike(ranks.run(4, train_world, world, False, transport, False), wanted, exact=True)
    cut = any(
        isinstance(p.layout, TableLayout) and p.layout.num_row_blocks > 1
        for p in world.plan.tables.values()
    )
    check_alike(ranks.run(4, train_world, world, False, "auto", True), wanted, exact=not cut)


@pytest.mark.parametrize(
    "optimizer", [RowWiseAdagrad(lr=0.1, eps=1e-6), Adam(lr=0.01)], ids=lambda o: o.name
)
@pytest.mark.parametrize(
    "kind", ["table_wise", "row_wise", "column_wise", "table_column_wise", "data_parallel"]
)
def test_tables_read_in_place_equal_those_whose_rows_travel(
    ranks: RankPool, kind: str, optimizer
) -> None:
    world = world_of_kind(kind, 2, optimizer)
    wanted = ranks.run(2, train_world, world, False, "process_group")
    check_alike(
        ranks.run(2, train_world, world, False, "auto", True), wanted, exact=kind != "row_wise"
    )


def count_waits(rank: int, world_size: int, world: World, share_tables: bool) -> list[int]:
    batches, targets = batches_of(world, STEPS), targets_of(world, batches_of(world, STEPS))
    model = DistributedModelParallel(
        build_collections(world, "meta"),
        plan=world.plan,
        sparse_optimizer=world.optimizer,
        seed=world.seed,
        share_tables=share_tables,
    )
    exchange = model._engine.exchange
    assert isinstance(exchange, SharedMemoryExchange)
    counts = []
    for step in range(STEPS):
        before = exchange.collectives
        train_step(model.module, batches[step][rank], targets[step][rank])
        counts.append(exchange.collectives - before)
    return counts


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "grid_shard", "data_parallel"])
def test_a_step_waits_twice_or_three_times(ranks: RankPool, kind: str) -> None:
    for counts in ranks.run(2, count_waits, world_of_kind(kind, 2, SGD(lr=0.1)), False):
        assert counts == [3] * STEPS  # ids with their header, rows, gradients
    for counts in ranks.run(2, count_waits, world_of_kind(kind, 2, SGD(lr=0.1)), True):
        # ids with their header, gradients; rows are read in place
        assert counts[1:] == [2] * (STEPS - 1)


def keep_outputs(rank: int, world_size: int) -> bool:
    tables = [EmbeddingConfig(50, 8, name=f"t{i}", feature_names=[f"f{i}"]) for i in range(4)]
    plan = plan_for(world_size, {t.name: table_wise(t, i % 2) for i, t in enumerate(tables)})
    model = DistributedModelParallel(EmbeddingCollection(tables, device="meta"), plan=plan, seed=1)
    generator = torch.Generator().manual_seed(rank)
    kept, copies = [], []
    for _ in range(3):
        lengths = torch.full((4 * 6,), 3)
        kjt = KeyedJaggedTensor(
            [f"f{i}" for i in range(4)],
            torch.randint(0, 50, (72,), generator=generator),
            lengths=lengths,
        )
        kept.append([jagged.values() for jagged in model(kjt).values()])
        copies.append([values.clone() for values in kept[-1]])
    return all(
        torch.equal(a, b)
        for x, y in zip(kept, copies, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_outputs_of_earlier_steps_stay_as_they_were(ranks: RankPool) -> None:
    assert ranks.run(2, keep_outputs) == [True, True]
