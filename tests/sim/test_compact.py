"""Bags without ids stay at home where that pays, and nothing else changes: not a bit of any output,
row or optimizer state.
"""

from __future__ import annotations

import random

import pytest
import torch

from rayrec.comm import LocalExchange, SimulatedWorld
from rayrec.comm.codec import Codecs, CommType, QCommsConfig
from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.distributed.steps import bucketize
from rayrec.distributed.ways import exchanged
from rayrec.layout import EmbeddingBagConfig, TableLayout, even_cuts, row_wise, table_wise
from rayrec.modules import EmbeddingBagCollection
from rayrec.optim import RowWiseAdagrad
from rayrec.sparse import KeyedJaggedTensor
from tests.simulation import batches_of, check_same, run_sharded, sharded, targets_of
from tests.worlds import plan_for, random_world

ALWAYS, NEVER = 2.0, 0.0


def leave_out(monkeypatch: pytest.MonkeyPatch, share: float) -> list[int]:
    """Leave bags out where less than `share` of them have ids; returns how often that was done,
    filled as it is.
    """
    done: list[int] = []
    real = bucketize._leave_out
    monkeypatch.setattr(bucketize, "COMPACT_BELOW", share)
    monkeypatch.setattr(bucketize, "_leave_out", lambda *args: (done.append(1), real(*args))[1])
    return done


def train_random(seed: int, share: float, monkeypatch: pytest.MonkeyPatch):
    """What `run_sharded` finds for a random world, and how often bags were left out."""
    world = random_world(seed)
    batches = batches_of(world, 3)
    with monkeypatch.context() as patch:
        counted = leave_out(patch, share)
        patch.setattr(exchanged, "COMPACT_COLUMNS", 1)  # their tables are narrow
        return run_sharded(world, batches, targets_of(world, batches), meta=False), len(counted)


@pytest.mark.seeds(range(120))
def test_random_worlds_do_not_see_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = train_random(seed, ALWAYS, monkeypatch)
    wanted, done = train_random(seed, NEVER, monkeypatch)
    assert not done
    check_same(found, wanted)


def test_those_worlds_leave_bags_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(train_random(seed, ALWAYS, monkeypatch)[1] for seed in range(20)) >= 20


# rows that are read in place have no empty bags to leave out
EXCHANGED = EngineOptions(share_tables=False)
BATCH, ROWS = 50, 300


def grid(rows: int, dim: int, ranks: int) -> TableLayout:
    """Row blocks and two column blocks, both spread over all ranks."""
    cuts = even_cuts(rows, ranks)
    owners = tuple(tuple((i + j) % ranks for j in range(2)) for i in range(len(cuts) - 1))
    return TableLayout(cuts, (0, dim // 2, dim), owners)


def train(ranks: int, kinds: str, lengths: list[int], options: EngineOptions | None = None):
    """Outputs of two steps by rank, and values that every rank sent, of tables that are cut as
    `kinds` says, one letter each.
    """
    tables = [
        EmbeddingBagConfig(ROWS, 64, name=f"t{i}", feature_names=[f"f{i}"])
        for i in range(len(kinds))
    ]
    layouts = {
        "r": lambda: row_wise(tables[0], range(ranks)),
        "g": lambda: grid(ROWS, 64, ranks),
        "t": lambda: table_wise(tables[0], ranks - 1),
    }
    plan = plan_for(ranks, {t.name: layouts[kind]() for t, kind in zip(tables, kinds, strict=True)})

    def rank_main(exchange: LocalExchange):
        torch.manual_seed(0)
        rng, sent = random.Random(exchange.rank), []
        real = exchange.views

        def views(send, *splits):
            sent.append(send.numel())
            return real(send, *splits)

        monkey = pytest.MonkeyPatch()
        monkey.setattr(exchange, "views", views)
        collection = EmbeddingBagCollection(tables)
        optimizer = RowWiseAdagrad(lr=0.1)
        model, _ = sharded(collection, plan, exchange, optimizer, options=options or EXCHANGED)
        outputs = []
        for _ in range(2):
            counts = torch.tensor([rng.choice(lengths) for _ in range(BATCH * len(tables))])
            ids = torch.tensor([rng.randrange(ROWS) for _ in range(int(counts.sum()))])
            keys = [f"f{i}" for i in range(len(tables))]
            out = model(KeyedJaggedTensor(keys, ids, lengths=counts)).values()
            (out * torch.arange(out.numel()).view_as(out).remainder(7)).sum().backward()
            outputs.append(out.detach().clone())
        monkey.undo()
        return outputs, sent

    results = SimulatedWorld(ranks).run(rank_main)
    return [outputs for outputs, _ in results], [sum(sent) for _, sent in results]


@pytest.mark.parametrize("lengths", [[1], [0, 1], [0, 0, 0, 2], [3]])
@pytest.mark.parametrize("kinds", ["rrr", "ggt", "rgt"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_same_outputs_come_home_in_fewer_values(
    ranks: int, kinds: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        done = leave_out(patch, ALWAYS)
        outputs, sent = train(ranks, kinds, lengths)
        assert len(done) == 2 * ranks
    with monkeypatch.context() as patch:
        leave_out(patch, NEVER)
        all_outputs, all_sent = train(ranks, kinds, lengths)
    for got, want in zip(outputs, all_outputs, strict=True):
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    if lengths != [3]:
        assert sum(sent) < (0.85 if ranks == 2 else 0.7) * sum(all_sent)


def test_one_id_a_bag_comes_home_once_from_any_number_of_ranks() -> None:
    """Without any setting; full matrices would send a row for every bag and rank."""
    every_bag_once = 3 * BATCH * 64
    # of a rank, a step and a direction; its own among them
    values = sum(train(4, "rrr", [1])[1]) / (2 * 2 * 4)
    # a matrix is as high as its fullest piece
    assert every_bag_once <= values < 1.5 * every_bag_once


def test_full_bags_are_all_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    done = leave_out(monkeypatch, bucketize.COMPACT_BELOW)
    train(2, "rr", [8])
    assert not done


@pytest.mark.parametrize("precision", [CommType.FP16, CommType.INT8])
def test_codecs_see_no_rubbish_in_the_padding(
    precision: CommType, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EngineOptions(codecs=Codecs.from_config(QCommsConfig(precision, precision)))
    outputs, _ = train(3, "rg", [0, 1], options)
    with monkeypatch.context() as patch:
        leave_out(patch, NEVER)
        all_outputs, _ = train(3, "rg", [0, 1], options)
    for got, want in zip(outputs, all_outputs, strict=True):
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=0.05, atol=0.05)


def test_narrow_tables_keep_full_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of fewer than 16 columns are not worth an index each."""
    done = leave_out(monkeypatch, ALWAYS)
    table = EmbeddingBagConfig(ROWS, 8, name="t", feature_names=["f"])
    plan = plan_for(2, {"t": row_wise(table, range(2))})

    def rank_main(exchange: LocalExchange):
        collection, ids = EmbeddingBagCollection([table]), torch.arange(BATCH)
        model, _ = sharded(collection, plan, exchange, options=EXCHANGED)
        kjt = KeyedJaggedTensor(["f"], ids, lengths=torch.ones_like(ids))
        model(kjt).values().sum().backward()

    SimulatedWorld(2).run(rank_main)
    assert not done
